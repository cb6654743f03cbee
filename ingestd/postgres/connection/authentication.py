"""Which answers to a password request are given: SCRAM only, unless TLS has verified the server.

libpq gives the password in clear, or as an MD5 hash that opens the server, to whatever listens on
the port or socket and asks for it. On one machine that may be any account's process while Postgres
is down. With SCRAM the other end gets nothing, and has to know the role's verifier.

What the DSN, its service file or PGREQUIREAUTH say of `require_auth` holds. Without a password (in
the DSN, PGPASSWORD, a service or password file) there is nothing to give, and nothing is required.

Source: PostgreSQL documentation, libpq, "Parameter Key Words" (require_auth, requirepeer), "The
Password File".
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from psycopg import pq

from ingestd.model.check import CheckLine
from ingestd.postgres.connection.tls import VERIFIED, is_socket, resolved, secured

SCRAM = "scram-sha-256"
_FIRST_WITH_REQUIRE_AUTH = 160000
_VERIFIED_MODES = frozenset({VERIFIED, "verify-ca"})
_OWN_PASSFILE = "~/.pgpass"
_OTHERS = 0o077
_FIELD = re.compile(r"((?:\\.|[^:\\])*):")
_STEALABLE = frozenset({"password", "md5"})
_SOCKET_FOLDERS = ("/run/postgresql", "/var/run/postgresql", "/tmp")  # noqa: S108 - looked at only
"""Where libpq's builds have their default socket."""


def required(
    parameters: Mapping[str, Any], found: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the parameters to add to a DSN's so that no other end gets the password.

    Empty where something else is said, where there is no password, where TLS verifies the server,
    and with a libpq that has no `require_auth`. `found`: as `resolved`, where that is known.
    """
    found = resolved(parameters) if found is None else found
    if found.get("require_auth") or pq.version() < _FIRST_WITH_REQUIRE_AUTH:
        return {}
    return {"require_auth": SCRAM} if _is_open(parameters, found) else {}


def check_lines(source: str, parameters: Mapping[str, Any]) -> list[CheckLine]:
    """Return the lines of `check`: what holds for the password, and who may stand in for Postgres.

    Where there is nothing to say, none.
    """
    return [*_of_password(source, parameters), *_of_sockets(source, parameters)]


def _of_password(source: str, parameters: Mapping[str, Any]) -> list[CheckLine]:
    found = resolved(parameters)
    if not _is_open(parameters, found):
        return []
    subject = "authentication"
    if pq.version() < _FIRST_WITH_REQUIRE_AUTH:
        what = (
            f"libpq {pq.version() // 10000} has no require_auth: the password goes to whatever "
            "listens in the server's place and asks for it"
        )
        remedy = "install psycopg[binary], or libpq 16 or later; or sslmode=verify-full in `dsn`"
        return [CheckLine(source, subject, "warn", what, remedy)]
    chosen = found.get("require_auth")
    if chosen is None:
        what = "the password is used with SCRAM only (require_auth): the server is not verified"
        return [CheckLine(source, subject, "ok", what)]
    methods = {method.strip() for method in chosen.split(",")}
    is_negated = all(method.startswith("!") for method in methods)
    allowed = _STEALABLE - {m[1:] for m in methods} if is_negated else _STEALABLE & methods
    if not allowed:
        return []
    what = (
        f"require_auth={chosen}: the password goes to whatever listens in the server's place and "
        "asks for it"
    )
    remedy = f"require_auth={SCRAM} in `dsn`, or sslmode=verify-full"
    return [CheckLine(source, subject, "warn", what, remedy)]


def _of_sockets(source: str, parameters: Mapping[str, Any]) -> list[CheckLine]:
    found = resolved(parameters)
    if found.get("requirepeer"):
        return []
    folders = [Path(host) for host in _hosts(found) if host.startswith("/")]
    if any(not host for host in _hosts(found)):
        folders += [Path(f) for f in _SOCKET_FOLDERS if _has_socket(Path(f))][:1]
    return [
        CheckLine(
            source,
            "socket",
            "warn",
            f"any account may write {folder}: another process can listen there while Postgres does "
            "not",
            "requirepeer=postgres in `dsn` (the account that the server runs as), or "
            "unix_socket_directories = a folder that only that account may write",
        )
        for folder in folders
        if _is_open_to_all(folder)
    ]


def _is_open(parameters: Mapping[str, Any], found: Mapping[str, str]) -> bool:
    """Return whether there is a password, and the server that it is for is not verified."""
    found = {**found, **secured(parameters, found)}
    hosts = _hosts(found)
    # TLS is not used on a socket, whatever the mode.
    is_verified = found.get("sslmode") in _VERIFIED_MODES and not any(map(is_socket, hosts))
    return not is_verified and (bool(found.get("password")) or _is_in_passfile(found, hosts))


def _hosts(found: Mapping[str, str]) -> Sequence[str]:
    return (found.get("host") or found.get("hostaddr") or "").split(",")


def _is_in_passfile(found: Mapping[str, str], hosts: Sequence[str]) -> bool:
    """Whether libpq's password file has one, whatever the port: a service file may say that."""
    path = Path(found.get("passfile") or _OWN_PASSFILE).expanduser()
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) or mode & _OTHERS:
            return False  # libpq does not read it either
        lines = path.read_text(errors="replace").splitlines()
    except (OSError, RuntimeError):
        return False
    names = {*hosts, *(["localhost"] if any(map(is_socket, hosts)) else [])}
    user = found.get("user", "")
    wanted = (names, None, {found.get("dbname") or user}, {user})
    return any(_is_for(line, wanted) for line in lines if not line.startswith("#"))


def _is_for(line: str, wanted: Sequence[set[str] | None]) -> bool:
    at = 0
    for names in wanted:
        field = _FIELD.match(line, at)
        if field is None:
            return False
        value = re.sub(r"\\(.)", r"\1", field[1])
        if names is not None and field[1] != "*" and value not in names:
            return False
        at = field.end()
    return at < len(line)


def _has_socket(folder: Path) -> bool:
    try:
        return any(path.name.startswith(".s.PGSQL.") for path in folder.iterdir())
    except OSError:
        return False


def _is_open_to_all(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return False
