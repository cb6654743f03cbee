"""The best way to capture a database: the first that passes the checks of `ingestd check`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psycopg
from pydantic import ValidationError

from ingestd.app.connectors import FACTORIES
from ingestd.app.table_report import SourceFindings
from ingestd.config.errors import problems_of
from ingestd.model.check import CheckLine
from ingestd.model.errors import ConfigError, OperatorError
from ingestd.model.schema import TableId
from ingestd.ports import Connector, Refused, TableInfo
from ingestd.postgres.catalog.publication import find_publication
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.session import connect
from ingestd.postgres.settings import SETTINGS, PostgresSettings

_MEMORY_BYTES = 64_000_000
_TIMEOUT_S = 30.0
_SPECIAL = re.compile(r"[*?\[]")
WAYS: tuple[Mapping[str, Any], ...] = (
    {"kind": "wal", "manage": True},
    {"kind": "wal", "manage": False},
    {"kind": "polling"},
)
"""Settings of a source's section for each way to capture it, the best first."""


@dataclass(frozen=True, slots=True)
class Database:
    """The database that a DSN connects to. `tables`: all its tables."""

    name: str
    role: str
    server: str
    tables: Sequence[TableInfo]

    @property
    def patterns(self) -> list[str]:
        """Return patterns that match every table."""
        schemas = sorted({t.id.schema for t in self.tables}) or ["public"]
        return [pattern_of(TableId(schema, "*"), any_name=True) for schema in schemas]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A way to capture a source, with the failed checks of this way and of better ones.

    `patterns`: the config's `tables`, with an exclusion for each of `refused`, the tables that
    can't be captured yet. `tables`: the captured ones. `document`: as of `ingestd tables`.
    `blockers`: the checks that fail. `better`: for each better way, its failed checks.
    """

    settings: PostgresSettings
    way: Mapping[str, Any]
    patterns: Sequence[str]
    tables: Sequence[TableId]
    refused: Sequence[Refused]
    document: Mapping[str, Any]
    blockers: Sequence[CheckLine]
    better: Sequence[Sequence[CheckLine]] = ()

    @property
    def why_not_wal(self) -> Sequence[CheckLine]:
        """The failed checks of kind `wal`, if polling is proposed instead."""
        return self.better[0] if self.way["kind"] == "polling" and self.better else ()


async def look_at(dsn: str, where: str) -> Database:
    """Return the database of a DSN. Raises the errors of `classify`; `where` begins their text."""
    try:
        async with await connect(dsn) as connection:
            info = connection.info
            cursor = await connection.execute(
                "SELECT current_user::text, current_setting('server_version')"
            )
            [(role, version)] = await cursor.fetchall()
            name = info.dbname
    except psycopg.Error as error:
        raise classify(error, where, dsn) from error
    settings = _settings("new", dsn, ["-.-"], WAYS[-1])
    connector = _connector("new", settings)
    try:
        return Database(
            name, role, version.split()[0], await connector.metadata(_TIMEOUT_S).tables()
        )
    finally:
        await connector.close()


async def propose(
    source: str, dsn: str, patterns: Sequence[str], database: Database, kind: str | None = None
) -> Proposal:
    """Return the best way without blockers to capture the tables that match the patterns.

    If every way has blockers, return the first way of the requested `kind`. Raises ConfigError for
    an invalid pattern or a table that does not exist; OperatorError if no kind is requested and
    none is possible.
    """
    ways = WAYS
    if await _is_of_others(dsn, f"ingestd_{source}"):
        ways = (WAYS[1], WAYS[0], *WAYS[2:])
    found: list[Proposal] = []
    for way in ways:
        if kind in {None, way["kind"]}:
            proposal = await _tried(source, dsn, patterns, database, way)
            if not proposal.blockers:
                return replace(proposal, better=[p.blockers for p in found])
            found.append(proposal)
    if kind is not None:
        return found[0]
    first = found[-1].blockers[0]
    raise OperatorError(f"{first.subject}: {first.detail}", remedy=first.remedy)


async def _is_of_others(dsn: str, publication: str) -> bool:
    """Return whether this publication exists, and the role may not alter it."""
    try:
        async with await connect(dsn) as connection:
            found = await find_publication(connection, publication)
    except psycopg.Error as error:
        raise classify(error, "publication", dsn) from error
    return found is not None and not found.owned


async def _tried(
    source: str, dsn: str, patterns: Sequence[str], database: Database, way: Mapping[str, Any]
) -> Proposal:
    """Return a proposal, with the failures of `ingestd check` for the tables it can capture."""
    asked = _settings(source, dsn, patterns, way)
    connector = _connector(source, asked)
    try:
        coverage = await connector.coverage({}, _TIMEOUT_S)
    finally:
        await connector.close()
    missing = [r.table.id for r in coverage.refused if r.table.oid == 0]
    if missing:
        raise ConfigError(f"--tables: no table {missing[0]} is visible to this role")
    excluded = [f"!{pattern_of(r.table.id)}" for r in coverage.refused]
    settings = _settings(source, dsn, [*patterns, *excluded], way)
    connector = _connector(source, settings)
    try:
        lines = await connector.check()
    finally:
        await connector.close()
    tables = SourceFindings(asked, database.tables, coverage, {}).tables(None)
    return Proposal(
        settings,
        way,
        [*patterns, *excluded],
        [t.id for t in coverage.tables],
        coverage.refused,
        {"sources": {source: {"tables": tables, "faults": []}}},
        [line for line in lines if line.level == "fail"],
    )


def _connector(source: str, settings: PostgresSettings) -> Connector:
    return FACTORIES[settings.kind].create(source, settings, memory_bytes=_MEMORY_BYTES)


def _settings(
    source: str, dsn: str, patterns: Sequence[str], way: Mapping[str, Any]
) -> PostgresSettings:
    model = SETTINGS[way["kind"]]
    values = {**model.defaults(source), **way, "dsn": dsn, "tables": list(patterns)}
    try:
        settings = model.model_validate(values)
    except ValidationError as error:
        problem = problems_of(error, model, ())[0]
        option, *place = problem.at
        at = place[0] if place and option == "tables" else None
        given = f" {patterns[at]!r}" if isinstance(at, int) else ""
        raise ConfigError(f"--{option}{given}: {problem.why}") from None
    assert isinstance(settings, PostgresSettings)
    return settings


def pattern_of(table: TableId, *, any_name: bool = False) -> str:
    """Return the pattern that matches only this table or, with `any_name`, all of its schema."""
    schema = _SPECIAL.sub(r"[\g<0>]", table.schema)
    if schema.startswith("!"):
        schema = f"?{schema[1:]}"  # else it would exclude
    name = table.name if any_name else _SPECIAL.sub(r"[\g<0>]", table.name)
    return str(TableId(schema, name))
