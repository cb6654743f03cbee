"""How every connection to a source is made.

Source of the settings: PostgreSQL documentation, "Client Connection Defaults".
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql

from ingestd.decode.values.encodings import Encoding, encoding_of
from ingestd.model.errors import OperatorError
from ingestd.postgres.connection.authentication import required
from ingestd.postgres.connection.claim_session import member_lock
from ingestd.postgres.connection.dsn import read_dsn
from ingestd.postgres.connection.errors import is_understood
from ingestd.postgres.connection.liveness import SERVER, LivenessCheckedConnection, ServerInstance
from ingestd.postgres.connection.names import read_names
from ingestd.postgres.connection.pinned_settings import (
    ENCODING,
    SETTINGS,
    WHERE_KNOWN,
    as_options,
    differing,
    differing_reports,
    not_pinned,
    pinning,
    refused_setting,
)
from ingestd.postgres.connection.pooler import pooled, refuses_options, shares_sessions
from ingestd.postgres.connection.refusals import named
from ingestd.postgres.connection.server_messages import server_text
from ingestd.postgres.connection.tls import Transport, resolved, secured, transport

# Nothing is locked where nothing was set: the session may be others'.
_WHO = sql.SQL(
    f"(SELECT {{member}} WHERE EXISTS (SELECT FROM made)), pg_catalog.pg_backend_pid(), {SERVER}"  # noqa: S608 - a constant
)

MAX_NAME_BYTES = 63
"""What a server keeps of an `application_name`."""

DEFAULTS: Mapping[str, str] = {
    "application_name": "ingestd",
    "connect_timeout": "10",
    "keepalives": "1",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "25000",
}
"""libpq parameters for those that the DSN leaves out: a silent drop is noticed in 25 s.

What TCP does not notice, `watched` does.
"""


async def connect(
    dsn: str,
    *,
    autocommit: bool = True,
    replication: bool = False,
    statement_timeout_s: float = 0,
    lock_timeout_s: float = 0,
    claim: str | None = None,
    reads_names: bool = False,
) -> LivenessCheckedConnection:
    """Connect with pinned settings; with `replication` to a walsender of the DSN's database.

    A timeout of 0 means none. The settings go with the startup message, after any `options` of the
    DSN (or PGOPTIONS), and are set and checked by the first statement
    (`ingestd.postgres.connection.pinned_settings`). A pooler that takes no `options` there gets
    them by statement alone, if the session is ours alone. Raises psycopg.Error, for `classify`;
    OperatorError if the DSN can't be read, for a pooler in transaction mode, and where a setting
    does not hold. `claim`: the holder of the claim of that name connects; who holds it next ends
    the session, if it is still there. `reads_names`: for the catalog, whose names may have any
    bytes (`ingestd.postgres.connection.names`), not for rows of tables.
    """
    parameters = parameters_of(dsn)
    settings = {
        **SETTINGS,
        "statement_timeout": str(round(statement_timeout_s * 1000)),
        "lock_timeout": str(round(lock_timeout_s * 1000)),
    }
    own = parameters.pop("options", None) or os.environ.get("PGOPTIONS", "")
    parameters.pop("replication", None)
    if replication:
        parameters["replication"] = "database"
        parameters["application_name"] = stream_name(parameters["application_name"])
    is_pooled = not (own or replication)
    connection = await _open(parameters, own, settings, claim, is_pooled=is_pooled)
    try:
        if reads_names:
            await read_names(connection)
        await connection.set_autocommit(autocommit)
    except BaseException:
        await connection.close()
        raise
    return connection


def stream_name(application: str) -> str:
    """Return the `application_name` of a replication connection.

    One that no standby has: the server may choose by it for whom commits wait.
    """
    suffix = " (stream)"
    kept = application.encode()[: MAX_NAME_BYTES - len(suffix)].decode(errors="ignore")
    return f"{kept}{suffix}"


async def end_without_client(connection: AsyncConnection[Any]) -> None:
    """Have the server look each second whether we are still there, while it sends nothing.

    Else it works on for whom was killed, and keeps its temporary slots meanwhile. Not every
    server's system can.
    """
    with contextlib.suppress(psycopg.errors.InvalidParameterValue):
        await connection.execute("SET client_connection_check_interval = '1s'")


async def _open(
    parameters: Mapping[str, Any],
    own: str,
    settings: Mapping[str, str],
    claim: str | None,
    *,
    is_pooled: bool,
) -> LivenessCheckedConnection:
    """Connect, in autocommit; `is_pooled`: without `options`, where these are refused."""
    options = f"{own} {as_options(settings)}".strip()
    # A walsender takes the simple query protocol only: nothing may be prepared there.
    plain: dict[str, Any] = {**parameters, "autocommit": True, "prepare_threshold": None}
    try:
        connection = await LivenessCheckedConnection.connect(**plain, options=options)
    except psycopg.OperationalError as error:
        if (refused := refused_setting(error, own)) is not None:
            raise refused from error
        if not is_pooled or not refuses_options(error):
            told = error if is_understood(server_text(error)) else await named(error, parameters)
            if told is error:
                raise
            raise told from error
        connection = await LivenessCheckedConnection.connect(**plain, options="")
    wanted = {**settings, **WHERE_KNOWN, ENCODING: str(parameters[ENCODING])}
    try:
        connection.watch(plain)
        # No pooler shares walsenders.
        only_ours = "replication" not in parameters
        names = await _pin(connection, wanted, own, claim, only_ours=only_ours)
        if not names:
            await _ensure_unshared(connection, parameters)
            await _pin(connection, wanted, own, claim, only_ours=False)
    except BaseException:
        await connection.close()
        raise
    return connection


async def _ensure_unshared(connection: AsyncConnection[Any], parameters: Mapping[str, Any]) -> None:
    """Raise OperatorError if the session is not ours alone: then nothing may be set in it."""
    if await shares_sessions(connection, {**parameters, "options": ""}):
        raise pooled()


async def _pin(
    connection: LivenessCheckedConnection,
    wanted: Mapping[str, str],
    own: str,
    claim: str | None,
    *,
    only_ours: bool,
) -> list[str]:
    """Set the settings, see to it that the server has them, and return their names.

    None are set with `only_ours` where `options` did not arrive. Raises OperatorError for one that
    does not hold.
    """
    member = sql.SQL("NULL") if claim is None else member_lock(claim)
    query = pinning(wanted, only_ours=only_ours) + _WHO.format(member=member)
    try:
        cursor = await connection.execute(query)
    except psycopg.OperationalError:
        raise
    except psycopg.Error as error:
        raise await _unsettable(connection, wanted, own) or error from error
    [(names, values, _, pid, *server)] = await cursor.fetchall()
    connection.is_session(int(pid), ServerInstance(*server))
    if names:
        found = differing(wanted, names, values) or differing_reports(wanted, connection)
        if found:
            raise await not_pinned(connection, wanted, found, own)
    return list(names)


async def _unsettable(
    connection: LivenessCheckedConnection, wanted: Mapping[str, str], own: str
) -> OperatorError | None:
    """Return the error for settings that can't be set, one after the other; None if all can."""
    found = {}
    for name, value in wanted.items():
        try:
            await connection.execute(pinning({name: value}) + sql.SQL("0"))
        except psycopg.OperationalError:
            raise
        except psycopg.Error as error:
            found[name] = f"refused, SQLSTATE {error.sqlstate}"
    if not found or len(found) == len(wanted):
        return None  # it is not about a setting
    return await not_pinned(connection, wanted, found, own)


async def read_bytes_as_they_are(connection: AsyncConnection[Any], *, yes: bool = True) -> None:
    """Have the values of a database that is not in UTF-8 sent as they are stored.

    Otherwise the server converts them, and ends with an error at one that it can't. Only while
    libpq itself is read: texts are in `sent_encoding` then, and queries are written by
    `query_bytes`. Source: PostgreSQL documentation, "Character Set Support".
    """
    name = _server_encoding(connection)
    if name == "SQL_ASCII" or encoding_of(name) is not None:
        encoding = sql.Literal(name if yes else "UTF8")
        await connection.execute(sql.SQL("SET client_encoding TO {}").format(encoding))


def sent_encoding(connection: AsyncConnection[Any]) -> Encoding | None:
    """Return what texts come in while they are read as they are; None for UTF-8 or no encoding."""
    return encoding_of(_server_encoding(connection))


def query_bytes(connection: AsyncConnection[Any], query: sql.Composable) -> bytes:
    """Return a query as it is sent while texts are read as they are."""
    encoding = sent_encoding(connection)
    return query.as_bytes(None) if encoding is None else encoding.encode(query.as_string(None))


def _server_encoding(connection: AsyncConnection[Any]) -> str:
    return (connection.pgconn.parameter_status(b"server_encoding") or b"").decode()


def parameters_of(dsn: str) -> dict[str, Any]:
    """Return what every connection to a source is made with.

    See `DEFAULTS`, `ingestd.postgres.connection.tls` and
    `ingestd.postgres.connection.authentication`. Raises OperatorError as `read_dsn`.
    """
    found = read_dsn(dsn)
    known = resolved(found)
    added = {**secured(found, known), **required(found, known)}
    return {**DEFAULTS, **found, **added, "client_encoding": "UTF8"}


def transport_of(dsn: str) -> Transport:
    """Say who could read a DSN's connections. Raises OperatorError as `read_dsn`."""
    return transport(read_dsn(dsn))
