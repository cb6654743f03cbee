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

from ingestd.capture.dsn import read_dsn
from ingestd.capture.faults import is_understood
from ingestd.capture.pooler import pooled, refuses_options, shares_sessions
from ingestd.capture.refusals import named
from ingestd.capture.tls import Transport, secured, transport
from ingestd.capture.watched import SERVER, Server, WatchedConnection

SETTINGS: Mapping[str, str] = {
    "DateStyle": "ISO",
    "TimeZone": "UTC",
    "IntervalStyle": "iso_8601",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    # Rows that a policy would hide are an error, never silently missing.
    "row_security": "off",
    # A default of the role or database must not end a long COPY or drop an exported snapshot.
    "idle_in_transaction_session_timeout": "0",
    # Others would have publications refused, or a snapshot wait or be refused (on a standby).
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    "default_transaction_isolation": "read committed",
    # A name is written with its schema, and quoted, where these have it so; money as in C.
    "search_path": '"$user", public',
    "quote_all_identifiers": "off",
    "lc_monetary": "C",
    # A COPY of many columns looks expensive, and compiling it costs more than it gains.
    "jit": "off",
}
"""Pinned on every connection, so that a value has the same text wherever it is read."""

# Not every server has them (14 and 17 brought them), and one that has not refuses the connection.
_UNTIMED = ("idle_session_timeout", "transaction_timeout")
"""The claim idles for long; a snapshot, and decoding a large transaction, last long."""
_MARK = "ingestd.options"
"""Set with the others: a pooler may leave them all out, and say nothing."""
# None is set if the options have not arrived.
_NO_TIMEOUTS = sql.SQL(
    "SELECT pg_catalog.pg_backend_pid(), {server},"
    " (SELECT count(pg_catalog.set_config(name, '0', false)) FROM pg_catalog.pg_settings"
    " WHERE name = ANY({}) AND pg_catalog.current_setting({}, true) = 'on')"
).format(list(_UNTIMED), _MARK, server=sql.SQL(SERVER))
_ALL = sql.SQL(
    "SELECT pg_catalog.set_config(s.name, s.value, false)"
    " FROM unnest({}::text[], {}::text[]) AS s(name, value)"
    " JOIN pg_catalog.pg_settings p ON p.name = s.name"
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
) -> WatchedConnection:
    """Connect with pinned settings; with `replication` to a walsender of the DSN's database.

    A timeout of 0 means none. The settings go with the startup message, after any `options` of the
    DSN (or PGOPTIONS), so they hold for replication connections too. A pooler that takes no
    `options` there gets them as statements, if the session is ours alone. Raises psycopg.Error, for
    `classify`; OperatorError if the DSN can't be read, or for a pooler in transaction mode.
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
    connection = await _open(parameters, own, settings, is_pooled=not (own or replication))
    try:
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
    parameters: Mapping[str, Any], own: str, settings: Mapping[str, str], *, is_pooled: bool
) -> WatchedConnection:
    """Connect, in autocommit; `is_pooled`: without `options`, where these are refused."""
    pinned = " ".join(
        f"-c {name}={value.replace(' ', chr(92) + ' ')}"
        for name, value in {**settings, _MARK: "on"}.items()
    )
    options = f"{own} {pinned}".strip()
    # A walsender takes the simple query protocol only: nothing may be prepared there.
    plain: dict[str, Any] = {**parameters, "autocommit": True, "prepare_threshold": None}
    try:
        connection = await WatchedConnection.connect(**plain, options=options)
    except psycopg.OperationalError as error:
        if not is_pooled or not refuses_options(error):
            told = error if is_understood(str(error)) else await named(error, parameters)
            if told is error:
                raise
            raise told from error
        connection = await WatchedConnection.connect(**plain, options="")
    try:
        connection.watch(plain)
        cursor = await connection.execute(_NO_TIMEOUTS)
        [(pid, *server, settings_made)] = await cursor.fetchall()
        connection.is_session(int(pid), Server(*server))
        if not int(settings_made) and "replication" not in parameters:
            await _pin(connection, parameters, settings)
    except BaseException:
        await connection.close()
        raise
    return connection


async def _pin(
    connection: AsyncConnection[Any], parameters: Mapping[str, Any], settings: Mapping[str, str]
) -> None:
    """Set what did not come with the startup message."""
    if await shares_sessions(connection, {**parameters, "options": ""}):
        raise pooled()
    every = {**settings, **dict.fromkeys(_UNTIMED, "0")}
    await connection.execute(_ALL.format(list(every), list(every.values())))


async def read_bytes_as_they_are(connection: AsyncConnection[Any], *, yes: bool = True) -> None:
    """Have the values of a database without an encoding sent, whatever bytes they are.

    Otherwise the server checks that they are UTF-8, and ends with an error where they are not. Only
    while libpq itself is read: psycopg gives no texts then. Source: PostgreSQL documentation,
    "Character Set Support", SQL_ASCII.
    """
    if connection.pgconn.parameter_status(b"server_encoding") == b"SQL_ASCII":
        name = "SQL_ASCII" if yes else "UTF8"
        await connection.execute(f"SET client_encoding TO '{name}'")


def parameters_of(dsn: str) -> dict[str, Any]:
    """Give what every connection to a source is made with: see `DEFAULTS`, `ingestd.capture.tls`.

    Raises OperatorError as `read_dsn`.
    """
    found = read_dsn(dsn)
    return {**DEFAULTS, **found, **secured(found), "client_encoding": "UTF8"}


def transport_of(dsn: str) -> Transport:
    """Say who could read a DSN's connections. Raises OperatorError as `read_dsn`."""
    return transport(read_dsn(dsn))
