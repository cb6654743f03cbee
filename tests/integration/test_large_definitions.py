"""A table's definition, however deep or large, stops at most that table (I8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ingestd.model.errors import TableError
from ingestd.postgres.captured.catalog import read_catalog
from ingestd.postgres.captured.definition import TableDefinitions
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.planner_functions import MOST_EXPRESSIONS
from ingestd.postgres.catalog.relation_lock import lock_table
from ingestd.postgres.catalog.user_types import MOST_PARTS, MOST_TYPES
from ingestd.postgres.connection.answer_size import LimitedConnection
from ingestd.postgres.connection.session import connect
from ingestd.postgres.settings import WalSettings
from ingestd.testing.embedded.waiting import await_until
from tests.harness.bystander import GOOD, config_for, ids_in, peak_mb

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.model.schema import Table
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("table owner")

LIMIT_MB = 64 + 200
BAD = "CREATE TABLE bad (id int PRIMARY KEY, note text)"
_LOOP = "DO $$ BEGIN FOR i IN {} LOOP EXECUTE format({}); END LOOP; END $$"


def loop(numbers: str, statement: str, *arguments: str) -> str:
    """Return SQL that runs a statement with each of these numbers, i."""
    return _LOOP.format(numbers, ", ".join([f"'{statement}'", *arguments]))


def large(statement: str, megabytes: int = 12) -> str:
    """Return SQL that runs a statement with a long text for %L."""
    text = f"repeat('x', {megabytes} * 1000000)"
    return f"DO $$ BEGIN EXECUTE format('{statement}', {text}); END $$"


def labels(number: int) -> str:
    return ", ".join(f"'{i:060}'" for i in range(number))


DEFINITIONS = {
    "statistics": (BAD, large("CREATE STATISTICS s ON (note || %L) FROM bad")),
    "statistics in all": (
        BAD,
        loop(
            "1..12",
            "CREATE STATISTICS s%s ON (note || %L) FROM bad",
            "i",
            "repeat(i::text, 1000000)",
        ),
    ),
    "indexes": (
        BAD,
        loop(
            "1..40",
            "CREATE INDEX i%s ON bad ((length(note || %L)))",
            "i",
            "repeat(i::text, 60000)",
        ),
    ),
    "partial indexes": (
        BAD,
        loop(
            "1..40",
            "CREATE INDEX i%s ON bad (id) WHERE note <> %L",
            "i",
            "repeat(i::text, 60000)",
        ),
    ),
    "partition key": (
        "CREATE TABLE bad (id int, note text) PARTITION BY LIST (id)",
        "DROP TABLE bad",
        large(
            "CREATE TABLE bad (id int, note text) PARTITION BY RANGE ((length(note || %L)))",
        ),
    ),
    "default": (BAD, large("ALTER TABLE bad ALTER note SET DEFAULT %L")),
    "values of older rows": (
        BAD,
        loop("1..12", "ALTER TABLE bad ADD c%s text DEFAULT %L", "i", "repeat('x', 500000)"),
    ),
    "check": (BAD, large("ALTER TABLE bad ADD CHECK (note <> %L)")),
    "check of a domain": (
        large("CREATE DOMAIN d AS text CHECK (VALUE <> %L)"),
        "CREATE TABLE bad (id int PRIMARY KEY, note d)",
    ),
    "comments": (
        BAD,
        loop("1..900", "ALTER TABLE bad ADD c%s int", "i"),
        loop("1..900", "COMMENT ON COLUMN bad.c%s IS %L", "i", "repeat('x', 20000)"),
    ),
    "labels": (
        f"CREATE TYPE e AS ENUM ({labels(MOST_PARTS + 1)})",
        "CREATE TABLE bad (id int PRIMARY KEY, note e)",
    ),
    "labels of many types": (
        f"CREATE TYPE e AS ENUM ({labels(MOST_PARTS - 1000)})",
        loop("1..200", "CREATE DOMAIN d%s AS e", "i"),
        "CREATE TABLE bad (id int PRIMARY KEY)",
        loop("1..200", "ALTER TABLE bad ADD c%s d%1$s", "i"),
    ),
    "fields": (
        "CREATE TYPE t0 AS (a0 int, a1 int, a2 int, a3 int, a4 int, a5 int, a6 int, a7 int)",
        loop(
            "1..6",
            "CREATE TYPE t%2$s AS (a0 t%1$s, a1 t%1$s, a2 t%1$s, a3 t%1$s, a4 t%1$s, a5 t%1$s)",
            "i - 1",
            "i",
        ),
        "CREATE TABLE bad (id int PRIMARY KEY, note t6)",
    ),
    "sum": (BAD, f"CREATE STATISTICS s ON ((id{' + 1' * 1500})) FROM bad"),
    "domains": (
        "CREATE DOMAIN d0 AS int",
        loop(f"1..{MOST_TYPES + 1}", "CREATE DOMAIN d%s AS d%s", "i", "i - 1"),
        f"CREATE TABLE bad (id int PRIMARY KEY, note d{MOST_TYPES + 1})",
    ),
    "arrays": (
        "CREATE DOMAIN d0 AS int",
        loop("1..200", "CREATE DOMAIN d%s AS d%s[]", "i", "i - 1"),
        "CREATE TABLE bad (id int PRIMARY KEY, note d200)",
    ),
}
"""Statements that make the table `bad`, by what is large or deep in it."""
IS_REFUSED = {
    "statistics": "more than 4 MB",
    "statistics in all": "more than 4 MB",
    "indexes": "more than 4 MB",
    "partial indexes": "more than 4 MB",
    "partition key": "more than 4 MB",
    "values of older rows": "of 0.5 MB",
    "labels": "user-defined types",
    "fields": "fields",
    "domains": "user-defined types",
    "arrays": "lists in lists",
}
"""Those that stop their table, and why; the others are captured."""


async def described(database: Database, settings: WalSettings) -> Table:
    """Describe and lock `bad` as a source does. Raises TableError."""
    catalog = await read_catalog(settings)
    assert {row.name for row in catalog.rows} >= {"good", "bad"}
    definitions = TableDefinitions(settings)
    async with await connect(database.dsn, autocommit=False) as connection:
        await definitions.use_catalog(connection, catalog, {})
        [row] = [row for row in catalog.rows if row.name == "bad"]
        table = definitions.table(row, catalog.columns[row.oid])
        is_partitioned = row.oid not in catalog.files.get(row.oid, {})
        blocks = BlockRange("public", "bad", is_whole=is_partitioned, oid=row.oid)
        await lock_table(connection, table, blocks)
    return table


@pytest.mark.parametrize("kind", DEFINITIONS)
async def test_what_the_catalog_holds_of_a_table_is_limited(
    database: Database, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(LimitedConnection, "answer_limit_bytes", MOST_EXPRESSIONS + (2 << 20))
    database.execute(*GOOD, *DEFINITIONS[kind])
    settings = WalSettings.model_validate(
        {
            "kind": "wal",
            "dsn": database.dsn,
            "slot": "ingestd",
            "publication": "ingestd",
            "tables": ["public.*"],
            "table": {"public.bad": {"types": {"note": "struct"}}} if kind == "fields" else {},
        }
    )
    if kind not in IS_REFUSED:
        assert (await described(database, settings)).id.name == "bad"
        return
    with pytest.raises(TableError, match=IS_REFUSED[kind]) as refused:
        await described(database, settings)
    assert refused.value.table.name == "bad"
    assert refused.value.remedy


@pytest.mark.parametrize(
    "refused",
    [
        RecursionError("maximum recursion depth exceeded"),
        MemoryError(),
    ],
    ids=lambda e: type(e).__name__,
)
async def test_what_no_limit_covers_is_its_own_fault(
    database: Database, monkeypatch: pytest.MonkeyPatch, refused: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise refused

    database.execute(*GOOD, BAD)
    settings = WalSettings.model_validate(
        {
            "kind": "wal",
            "dsn": database.dsn,
            "slot": "ingestd",
            "publication": "ingestd",
            "tables": ["public.*"],
        }
    )
    for place in (
        "ingestd.postgres.captured.definition.table_of",
        "ingestd.postgres.catalog.relation_lock.ensure_plannable",
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, fails)
            with pytest.raises(
                TableError, match=f"too deep or too large .*{type(refused).__name__}"
            ):
                await described(database, settings)


# --- a daemon --------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["wal", "polling"])
@pytest.mark.parametrize("what", ["sum", "domains", "arrays"])
def test_a_deep_definition_stops_no_other_table(
    database: Database, lake: Path, make_daemon: MakeDaemon, kind: str, what: str
) -> None:
    database.execute(*GOOD, *DEFINITIONS[what])
    daemon = make_daemon(config_for(kind, database, lake))
    daemon.start()
    await_until(lambda: 1 in ids_in(lake), 25, lambda: f"good's row\n{daemon.tail()[-2500:]}")
    database.execute("INSERT INTO good VALUES (2)")
    await_until(lambda: 2 in ids_in(lake), 15, lambda: f"its change\n{daemon.tail()[-2500:]}")


@pytest.mark.thorough
@pytest.mark.parametrize("megabytes", [60, 160])
def test_large_statistics_fill_no_memory(
    database: Database, lake: Path, make_daemon: MakeDaemon, megabytes: int
) -> None:
    database.execute(
        *GOOD,
        BAD,
        "INSERT INTO bad VALUES (1)",
        large("CREATE STATISTICS s ON (note || %L) FROM bad", megabytes),
    )
    config = config_for("polling", database, lake, more='[limits]\nmemory = "64MB"\n')
    daemon = make_daemon(config)
    daemon.start()
    await_until(lambda: 1 in ids_in(lake), 60, lambda: f"good's row\n{daemon.tail()[-2500:]}")
    await_until(
        lambda: 1 in ids_in(lake, "bad") or daemon.events("table.stopped"), 60, "bad to be decided"
    )
    assert peak_mb(daemon) < LIMIT_MB
    database.execute("INSERT INTO good VALUES (2)")
    await_until(lambda: 2 in ids_in(lake), 30, lambda: f"its change\n{daemon.tail()[-2500:]}")


@pytest.mark.thorough
@pytest.mark.parametrize("types", [100, 400])
def test_many_labels_fill_no_memory(
    database: Database, lake: Path, make_daemon: MakeDaemon, types: int
) -> None:
    columns = ", ".join(f"c{i} d{i}" for i in range(types))
    database.execute(
        *GOOD,
        f"CREATE TYPE e AS ENUM ({labels(20_000)})",
        loop(f"0..{types}", "CREATE DOMAIN d%s AS e", "i"),
        f"CREATE TABLE bad (id int PRIMARY KEY, {columns})",
    )
    config = config_for("polling", database, lake, more='[limits]\nmemory = "64MB"\n')
    daemon = make_daemon(config)
    daemon.start()
    await_until(lambda: 1 in ids_in(lake), 60, lambda: f"good's row\n{daemon.tail()[-2500:]}")
    assert peak_mb(daemon) < LIMIT_MB
