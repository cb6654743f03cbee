"""Opening of connections to a source.

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
from ingestd.postgres.connection.claim import member_lock
from ingestd.postgres.connection.dsn import read_dsn
from ingestd.postgres.connection.errors import is_understood
from ingestd.postgres.connection.liveness import (
    SERVER,
    LivenessCheckedConnection,
    LivenessPolicy,
    ServerInstance,
)
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

# If nothing was set, nothing is locked: the session may be shared with other clients.
_WHO = sql.SQL(
    f"(SELECT {{member}} WHERE EXISTS (SELECT FROM made)), pg_catalog.pg_backend_pid(), {SERVER}"  # noqa: S608 - a constant
)

MAX_NAME_BYTES = 63
"""Maximum length of an `application_name` that a server keeps."""

DEFAULTS: Mapping[str, str] = {
    "application_name": "ingestd",
    "connect_timeout": "10",
    "keepalives": "1",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "25000",
}
"""libpq parameters that apply if the DSN omits them. A silent drop is detected in 25 s.

`liveness` detects what TCP does not.
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
    liveness: LivenessPolicy | None = None,
) -> LivenessCheckedConnection:
    """Connect with pinned settings; with `replication` to a walsender of the DSN's database.

    A timeout of 0 means none. The settings are sent in the startup message, after any `options` of
    the DSN (or PGOPTIONS), and the first statement sets and checks them again
    (`ingestd.postgres.connection.pinned_settings`). Behind a pooler that accepts no `options`
    there, only the statement sets them, provided that the session is not shared. `claim`: the
    holder of the claim of that name connects; the next holder ends this session if it still exists.
    `reads_names`: for the catalog, whose names may have any bytes
    (`ingestd.postgres.connection.names`), not for table rows. `liveness`: another policy than the
    default. Raises psycopg.Error, for `classify`; OperatorError if the DSN can't be read, for a
    pooler in transaction mode, and for a setting that does not take effect.
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
    connection.liveness = liveness or connection.liveness
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

    No standby has this name: the server may use it to choose the standbys that commits wait for.
    """
    suffix = " (stream)"
    kept = application.encode()[: MAX_NAME_BYTES - len(suffix)].decode(errors="ignore")
    return f"{kept}{suffix}"


async def end_without_client(connection: AsyncConnection[Any]) -> None:
    """Make the server check every second that the client still exists, even when it sends nothing.

    Otherwise it keeps working for a killed client, and keeps its temporary slots. Not every
    server's operating system supports the check.
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
    """Connect in autocommit mode. `is_pooled`: retry without `options` if these are refused."""
    options = f"{own} {as_options(settings)}".strip()
    # A walsender accepts only the simple query protocol: nothing may be prepared.
    plain: dict[str, Any] = {**parameters, "autocommit": True, "prepare_threshold": None}
    try:
        connection = await LivenessCheckedConnection.connect(**plain, options=options)
    except psycopg.OperationalError as error:
        if (refused := refused_setting(error, own)) is not None:
            raise refused from error
        if not is_pooled or not refuses_options(error):
            understood = (
                error if is_understood(server_text(error)) else await named(error, parameters)
            )
            if understood is error:
                raise
            raise understood from error
        connection = await LivenessCheckedConnection.connect(**plain, options="")
    wanted = {**settings, **WHERE_KNOWN, ENCODING: str(parameters[ENCODING])}
    try:
        connection.watch(plain)
        # Poolers do not share walsenders.
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
    """Raise OperatorError if the session is shared: then nothing may be set in it."""
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
    """Set the settings, check that they are in effect, and return their names.

    With `only_ours`, none are set if `options` did not arrive. Raises OperatorError for a setting
    that does not take effect.
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
    """Return the error for settings that can't be set, tried one by one; None if all can."""
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
    """Make a database that is not in UTF-8 send values as they are stored.

    Otherwise the server converts them, and fails at one that it can't convert. Only while the
    caller reads libpq directly: texts are then in `sent_encoding`, and `query_bytes` encodes
    queries. Source: PostgreSQL documentation, "Character Set Support".
    """
    name = _server_encoding(connection)
    if name == "SQL_ASCII" or encoding_of(name) is not None:
        encoding = sql.Literal(name if yes else "UTF8")
        await connection.execute(sql.SQL("SET client_encoding TO {}").format(encoding))


def sent_encoding(connection: AsyncConnection[Any]) -> Encoding | None:
    """Return the encoding of texts read unconverted; None for UTF-8 or no encoding."""
    return encoding_of(_server_encoding(connection))


def query_bytes(connection: AsyncConnection[Any], query: sql.Composable) -> bytes:
    """Return a query's bytes to send while texts are read unconverted."""
    encoding = sent_encoding(connection)
    return query.as_bytes(None) if encoding is None else encoding.encode(query.as_string(None))


def _server_encoding(connection: AsyncConnection[Any]) -> str:
    return (connection.pgconn.parameter_status(b"server_encoding") or b"").decode()


def parameters_of(dsn: str) -> dict[str, Any]:
    """Return the parameters of every connection to a source.

    See `DEFAULTS`, `ingestd.postgres.connection.tls` and
    `ingestd.postgres.connection.authentication`. Raises OperatorError as `read_dsn`.
    """
    found = read_dsn(dsn)
    known = resolved(found)
    added = {**secured(found, known), **required(found, known)}
    return {**DEFAULTS, **found, **added, "client_encoding": "UTF8"}


def transport_of(dsn: str) -> Transport:
    """Return how a DSN's connections are protected. Raises OperatorError as `read_dsn`."""
    return transport(read_dsn(dsn))
