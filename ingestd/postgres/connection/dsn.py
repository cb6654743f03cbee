"""The connection string of a source."""

from __future__ import annotations

import re
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from ingestd.model.errors import OperatorError


def read_dsn(dsn: str) -> dict[str, Any]:
    """Return the parameters of a DSN. Raises OperatorError, which never quotes it.

    If a password's special characters are not escaped, parts of it end up in host, port or database
    and from there in messages. Such a DSN is refused.
    """
    try:
        found = conninfo_to_dict(dsn)
    except psycopg.Error:
        found = {"port": "unreadable"}
    host, database = (str(found.get(name) or "") for name in ("host", "dbname"))
    # A host has no @, except as the first character of an abstract socket.
    is_spilt = "@" in host[1:] or ("://" in dsn and "@" in host + database)
    if is_spilt or not re.fullmatch(r"[\d,]*", str(found.get("port") or "")):
        raise OperatorError(
            "the dsn is not a connection string (not shown: it may hold a password)",
            remedy="write postgresql://user:password@host:5432/dbname, with special characters of "
            "the password percent-encoded, or host=... dbname=... user=... password='...'",
        )
    return found


def role_of(dsn: str) -> str | None:
    """Return the DSN's user; None if the environment sets it."""
    user = read_dsn(dsn).get("user")
    return None if user is None else str(user)
