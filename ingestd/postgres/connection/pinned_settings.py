"""The settings of every session, and the check that they are in effect.

The startup packet is not enough. The server applies, in this order: ALTER DATABASE and ALTER ROLE
settings, the packet's `options`, what libpq adds from its environment (PGTZ, PGDATESTYLE, PGGEQO),
and the settings of a login event trigger (17+). So the first statement sets them once more, and
returns the values in effect. libpq also has some of them as parameter statuses.

Source: PostgreSQL documentation, "Setting Parameters", "Message Formats" (ParameterStatus), and of
libpq, "Environment Variables".
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql

from ingestd.model.errors import OperatorError
from ingestd.postgres.connection.server_messages import server_text

SETTINGS: Mapping[str, str] = {
    "DateStyle": "ISO, MDY",
    "TimeZone": "UTC",
    "IntervalStyle": "iso_8601",
    "extra_float_digits": "3",
    "bytea_output": "hex",
    # The output of catalog functions: types, defaults, quoted names. Money as in locale C.
    "quote_all_identifiers": "off",
    "lc_monetary": "C",
    # The meaning of our own statements: database users may create functions, operators and types.
    "search_path": "pg_catalog, pg_temp",
    "standard_conforming_strings": "on",
    "transform_null_equals": "off",
    "array_nulls": "on",
    # Rows that a policy hides must raise an error, never be silently missing.
    "row_security": "off",
    # A default of the role or database must not end a long COPY or drop an exported snapshot.
    "idle_in_transaction_session_timeout": "0",
    # Other defaults make the server refuse publications, or delay or refuse a snapshot (on a
    # standby).
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    "default_transaction_isolation": "read committed",
    # A COPY of many columns looks expensive, but compiling it costs more than it saves.
    "jit": "off",
    "geqo": "on",
    # Otherwise the planner evaluates constant parts of a table's CHECK constraints.
    "constraint_exclusion": "off",
}
"""Pinned on every connection, so that a value has the same text wherever it is read."""
WHERE_KNOWN: Mapping[str, str] = {
    # The claim idles for long; a snapshot, or the decoding of a large transaction, takes long.
    "idle_session_timeout": "0",
    "transaction_timeout": "0",
    # Only tables are read: a view in the place of one would run its owner's functions.
    "restrict_nonsystem_relation_kind": "view, foreign-table",
}
"""Also pinned, but missing on some servers, which would refuse them in `options`."""
ENCODING = "client_encoding"
MARK = "ingestd.options"
"""Set in `options` along with the others: a pooler may silently drop all of them."""

_ENVIRONMENT = {
    "TimeZone": "PGTZ",
    "DateStyle": "PGDATESTYLE",
    "geqo": "PGGEQO",
    ENCODING: "PGCLIENTENCODING",
}
"""Environment variables that libpq adds to the startup packet, by setting."""
_REPORTED = (
    "DateStyle",
    "TimeZone",
    "IntervalStyle",
    "standard_conforming_strings",
    "default_transaction_read_only",
    ENCODING,
)
"""Settings that the server reports whenever they change."""
_UNITS_MS = {"": 1, "ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_TIME = re.compile(r"(\d+)(ms|s|min|h|d|)")
# Unknown to the server: null, and left out. A CTE is evaluated once: names and values agree.
_MADE = sql.SQL(
    "WITH made AS MATERIALIZED ("
    "SELECT s.name, pg_catalog.set_config(s.name, s.value, {is_local}) AS now"
    " FROM (VALUES {settings}) AS s(name, value)"
    " WHERE pg_catalog.current_setting(s.name, true) IS NOT NULL AND {condition})"
    " SELECT ARRAY(SELECT name FROM made), ARRAY(SELECT now FROM made), "
)
_IS_OURS = sql.SQL(
    "coalesce(pg_catalog.current_setting({}, true) OPERATOR(pg_catalog.=) 'on', false)"
).format(MARK)
_SOURCES = (
    "SELECT name, source FROM pg_catalog.pg_settings"
    " WHERE name OPERATOR(pg_catalog.=) ANY (%s::pg_catalog.text[])"
)
_TRIGGERS = (
    "SELECT evtname::pg_catalog.text FROM pg_catalog.pg_event_trigger"
    " WHERE evtevent OPERATOR(pg_catalog.=) 'login'::pg_catalog.name"
    " AND evtenabled OPERATOR(pg_catalog.<>) 'D'::pg_catalog.char"
)


def as_options(settings: Mapping[str, str]) -> str:
    """Format the settings, and the mark, as `options` of a startup packet."""
    return " ".join(
        f"-c {name}={value.replace(' ', chr(92) + ' ')}"
        for name, value in {**settings, MARK: "on"}.items()
    )


def pinning(
    settings: Mapping[str, str], *, only_ours: bool = False, is_local: bool = False
) -> sql.Composed:
    """Return a SELECT that sets them; its first two columns are names and resulting values.

    The caller must append more columns. `only_ours`: if `options` did not arrive, nothing is set
    and both columns are empty. `is_local`: for this statement only. It is one statement, because a
    walsender of PostgreSQL 14 accepts no more.
    """
    row = sql.SQL("({}::pg_catalog.text, {}::pg_catalog.text)")
    return _MADE.format(
        settings=sql.SQL(", ").join(row.format(*pair) for pair in settings.items()),
        is_local=is_local,
        condition=_IS_OURS if only_ours else sql.SQL("true"),
    )


def differing(
    wanted: Mapping[str, str], names: Sequence[str], values: Sequence[str]
) -> dict[str, str]:
    """Return the settings whose values on the server differ from `wanted`, with those values."""
    return {
        name: value
        for name, value in zip(names, values, strict=True)
        if not _is_same(name, wanted[name], value)
    }


def differing_reports(
    wanted: Mapping[str, str], connection: AsyncConnection[Any]
) -> dict[str, str]:
    """Return the settings whose values the server reports differently. Sends nothing."""
    found = {}
    for name in _REPORTED:
        status = connection.pgconn.parameter_status(name.encode())
        if status is not None and name in wanted:
            value = status.decode(errors="replace")
            if not _is_same(name, wanted[name], value):
                found[name] = value
    return found


async def not_pinned(
    connection: AsyncConnection[Any],
    wanted: Mapping[str, str],
    settings: Mapping[str, str],
    own_options: str,
) -> OperatorError:
    """Return the error for settings that stay as `settings`; query what sets them, if known.

    `own_options`: from the DSN or PGOPTIONS.
    """
    sources: dict[str, str] = {}
    triggers: list[str] = []
    with contextlib.suppress(psycopg.Error):
        cursor = await connection.execute(_SOURCES, (list(settings),))
        sources = dict(await cursor.fetchall())
        triggers = [row[0] for row in await (await connection.execute(_TRIGGERS)).fetchall()]
    differences = ", ".join(
        f"{name} is {value!r}, not {wanted[name]!r}" for name, value in settings.items()
    )
    known = [_setter(name, own_options) or sources.get(name) for name in settings]
    who = [f"{name}: {setter}" for name, setter in zip(settings, known, strict=True) if setter]
    if triggers:
        who.append(f"login event triggers: {', '.join(triggers)}")
    by = f" (set by {'; '.join(who)})" if who else ""
    return OperatorError(
        f"settings that ingestd depends on can't be set for its session: {differences}{by}",
        remedy="let clients set them: check the pooler or proxy in between, which may drop SET, "
        "and what is named here; or use the server's own address in `dsn`",
    )


def refused_setting(error: psycopg.Error, own_options: str) -> OperatorError | None:
    """Return the error if the server refused a connection because of one of these settings.

    Works in any language: names of settings are never translated.
    """
    text = server_text(error)
    for name in (*SETTINGS, *WHERE_KNOWN, ENCODING):
        if re.search(rf"\b{name}\b", text, re.IGNORECASE) is None:
            continue
        setter = _setter(name, own_options)
        if setter is not None:
            return OperatorError(
                f"the server refuses the connection because of setting {name} from {setter}: "
                "the value is invalid",
                remedy=f"remove {name} from {setter}: ingestd sets it itself",
            )
    return None


def _setter(name: str, own_options: str) -> str | None:
    """Return what sets it differently on the client, if anything does."""
    variable = _ENVIRONMENT.get(name)
    if variable is not None and os.environ.get(variable):
        return f"environment variable {variable}"
    if re.search(rf"\b{name}\b", own_options, re.IGNORECASE):
        return "`options` of the DSN, or PGOPTIONS"
    return None


def _is_same(name: str, wanted: str, value: str) -> bool:
    if name == ENCODING:
        return _plain(wanted) == _plain(value)
    if wanted.isdecimal() and (time := _TIME.fullmatch(value)) is not None:
        return int(wanted) == int(time[1]) * _UNITS_MS[time[2]]
    return wanted.lower() == value.lower()


def _plain(encoding: str) -> str:
    """Normalize an encoding's name as the server does to compare it."""
    return "".join(filter(str.isalnum, encoding)).lower()
