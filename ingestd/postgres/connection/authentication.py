"""Password authentication: SCRAM only, unless TLS has verified the server.

libpq sends the password in clear text, or as an MD5 hash that is sufficient to log in, to any
process that listens on the port or socket and asks for it. While Postgres is down on the same
machine, any account can run such a process. With SCRAM the peer learns nothing, and must know the
role's verifier.

A `require_auth` in the DSN, its service file or PGREQUIREAUTH is kept. Without a password (in the
DSN, PGPASSWORD, a service or password file) nothing can leak, so nothing is required.

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
_SOCKET_FOLDERS = ("/run/postgresql", "/var/run/postgresql", "/tmp")  # noqa: S108 - only read
"""Default socket folders of libpq builds."""


def required(
    parameters: Mapping[str, Any], resolved_parameters: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the parameters to add to a DSN's, so that no other peer receives the password.

    Empty if the DSN sets `require_auth`, if there is no password, if TLS verifies the server, and
    for a libpq without `require_auth`. `resolved_parameters`: of `resolved`, if available.
    """
    resolved_parameters = (
        resolved(parameters) if resolved_parameters is None else resolved_parameters
    )
    if resolved_parameters.get("require_auth") or pq.version() < _FIRST_WITH_REQUIRE_AUTH:
        return {}
    return {"require_auth": SCRAM} if _is_open(parameters, resolved_parameters) else {}


def check_lines(source: str, parameters: Mapping[str, Any]) -> list[CheckLine]:
    """Return lines of `check`: how the password is protected, and whether the socket folder is.

    Empty if there is nothing to report.
    """
    return [*_of_password(source, parameters), *_of_sockets(source, parameters)]


def _of_password(source: str, parameters: Mapping[str, Any]) -> list[CheckLine]:
    found = resolved(parameters)
    if not _is_open(parameters, found):
        return []
    subject = "authentication"
    if pq.version() < _FIRST_WITH_REQUIRE_AUTH:
        what = (
            f"libpq {pq.version() // 10000} has no require_auth: any process that listens in the "
            "server's place can ask for the password and receives it"
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
        f"require_auth={chosen}: any process that listens in the server's place can ask for the "
        "password and receives it"
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
            f"any account may write to {folder}: another process can listen there while Postgres "
            "is down",
            "requirepeer=postgres in `dsn` (the account that runs the server), or "
            "unix_socket_directories = a folder that only that account may write to",
        )
        for folder in folders
        if _is_open_to_all(folder)
    ]


def _is_open(parameters: Mapping[str, Any], resolved_parameters: Mapping[str, str]) -> bool:
    """Return whether there is a password and its server is not verified."""
    resolved_parameters = {**resolved_parameters, **secured(parameters, resolved_parameters)}
    hosts = _hosts(resolved_parameters)
    # Sockets never use TLS, whatever the mode.
    is_verified = resolved_parameters.get("sslmode") in _VERIFIED_MODES and not any(
        map(is_socket, hosts)
    )
    return not is_verified and (
        bool(resolved_parameters.get("password")) or _is_in_passfile(resolved_parameters, hosts)
    )


def _hosts(parameters: Mapping[str, str]) -> Sequence[str]:
    return (parameters.get("host") or parameters.get("hostaddr") or "").split(",")


def _is_in_passfile(parameters: Mapping[str, str], hosts: Sequence[str]) -> bool:
    """Return whether libpq's password file has one, for any port: a service file may set it."""
    path = Path(parameters.get("passfile") or _OWN_PASSFILE).expanduser()
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) or mode & _OTHERS:
            return False  # libpq ignores it, too
        lines = path.read_text(errors="replace").splitlines()
    except (OSError, RuntimeError):
        return False
    names = {*hosts, *(["localhost"] if any(map(is_socket, hosts)) else [])}
    user = parameters.get("user", "")
    wanted = (names, None, {parameters.get("dbname") or user}, {user})
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
