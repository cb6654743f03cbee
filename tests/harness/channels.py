"""DSNs for each kind of channel to one server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg.conninfo import make_conninfo

from ingestd.postgres.transport.channels import choice
from tests.harness.tls_servers import NAME

if TYPE_CHECKING:
    import pytest

    from tests.harness.databases import Database
    from tests.harness.tls_servers import TlsServer

WAYS = ("tcp", "unix", "tls", "libpq")
"""The last one uses TLS, too, as if the TLS session were not accessible."""


def dsn_by(way: str, secure: TlsServer, database: Database, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the DSN of a database of `secure`, as a superuser."""
    if way == "unix":
        return database.socket_dsn
    if way == "tcp":
        return make_conninfo(database.dsn, sslmode="disable")
    if way == "libpq":
        monkeypatch.setattr(choice, "tls_channel", lambda _: None)
    return encrypted(database.dsn, secure)


def encrypted(dsn: str, secure: TlsServer) -> str:
    """Return a DSN of `secure` as a remote server."""
    roots = str(secure.authority.cert)
    return make_conninfo(
        dsn, host=NAME, hostaddr="127.0.0.1", sslmode="verify-full", sslrootcert=roots
    )
