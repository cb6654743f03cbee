"""A table that its owner keeps locked stops at most that table (I8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from pydantic import SecretStr

from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from ingestd.postgres.captured.catalog import read_catalog
from ingestd.postgres.captured.definition import TableDefinitions
from ingestd.postgres.catalog.published_filters import MOST_BYTES
from ingestd.postgres.connection.session import connect
from ingestd.postgres.polling.discovery import PolledTables
from ingestd.postgres.settings import PollingSettings, WalSettings
from ingestd.postgres.wal.discovery import SourceTables
from ingestd.postgres.wal.publication.alteration import keep_each
from ingestd.postgres.wal.server import inspect_server
from ingestd.testing.embedded.waiting import await_until
from tests.harness.bystander import GOOD, config_for, ids_in
from tests.harness.databases import skip_without_lists

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.ports import Discovery
    from ingestd.postgres.captured.catalog import Catalog
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("table owner")

BAD = ("CREATE TABLE bad (id int PRIMARY KEY, note text)", "INSERT INTO bad VALUES (1)")
COMPARED = {
    "polling": (BAD, "VACUUM FULL bad", "bad"),
    "wal": (
        ("CREATE TABLE bad (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)",),
        "CREATE TABLE late PARTITION OF bad FOR VALUES FROM (0) TO (9)",
        "late",
    ),
}
"""How `bad` is made, altered and locked."""
LOCK = "LOCK TABLE bad IN ACCESS EXCLUSIVE MODE"


def settings_for(database: Database, **more: Any) -> WalSettings:
    return WalSettings.model_validate(
        {
            "kind": "wal",
            "dsn": database.dsn,
            "slot": "ingestd",
            "publication": "ingestd",
            "tables": ["public.*"],
            **more,
        }
    )


async def table_of(database: Database, catalog: Catalog, name: str) -> str | None:
    """Describe a table; return its row filter. Raises TableError."""
    definitions = TableDefinitions(settings_for(database))
    async with await connect(database.dsn) as connection:
        await definitions.use_catalog(connection, catalog, {})
    [row] = [row for row in catalog.rows if row.name == name]
    return definitions.table(row, catalog.columns[row.oid]).row_filter


async def test_a_locked_tables_filter_is_its_own_fault(database: Database) -> None:
    skip_without_lists(database)
    database.execute(
        *GOOD,
        *BAD,
        "CREATE PUBLICATION ingestd FOR TABLE good WHERE (id > 0), bad WHERE (id > 1)",
    )
    settings = settings_for(database)
    before = await read_catalog(settings)
    with database.connect(autocommit=False) as owner:
        owner.execute(LOCK)
        catalog = await read_catalog(settings)
        assert await table_of(database, catalog, "good") == "(id > 0)"
        with pytest.raises(TableError, match=r"row filter can't be read.*holds a lock") as refused:
            await table_of(database, catalog, "bad")
        assert refused.value.table == TableId("public", "bad")
        # While a daemon runs, the lock changes nothing: the filter is known.
        kept = await read_catalog(settings, before.published)
        assert kept == before
        assert await table_of(database, kept, "bad") == "(id > 1)"
    assert await read_catalog(settings) == before


async def test_another_filter_of_a_locked_table_is_not_the_last_one(database: Database) -> None:
    skip_without_lists(database)
    database.execute(*BAD, "CREATE PUBLICATION ingestd FOR TABLE bad WHERE (id > 1)")
    settings = settings_for(database)
    before = await read_catalog(settings)
    database.execute("ALTER PUBLICATION ingestd SET TABLE bad WHERE (id > 2)")
    with database.connect(autocommit=False) as owner:
        owner.execute(LOCK)
        catalog = await read_catalog(settings, before.published)
        with pytest.raises(TableError, match="row filter can't be read"):
            await table_of(database, catalog, "bad")
    assert await table_of(database, await read_catalog(settings), "bad") == "(id > 2)"


async def test_a_large_filter_is_its_own_fault(database: Database) -> None:
    skip_without_lists(database)
    database.execute(
        *GOOD,
        *BAD,
        "CREATE PUBLICATION ingestd FOR TABLE good WHERE (id > 0)",
        f"ALTER PUBLICATION ingestd ADD TABLE bad WHERE (note <> '{'x' * MOST_BYTES}' OR id > 0)",
    )
    catalog = await read_catalog(settings_for(database))
    assert await table_of(database, catalog, "good") == "(id > 0)"
    with pytest.raises(TableError, match="more than 256 kB"):
        await table_of(database, catalog, "bad")


async def test_a_filter_is_kept_with_another_column_list(database: Database) -> None:
    skip_without_lists(database)
    database.execute(*GOOD, *BAD, "CREATE PUBLICATION ingestd FOR TABLE bad WHERE (id > 1)")
    bad, lists = TableId("public", "bad"), {TableId("public", "bad"): ["id"]}
    async with await connect(database.dsn, reads_names=True) as connection:
        with database.connect(autocommit=False) as owner:
            owner.execute(LOCK)
            refused = await keep_each(connection, "ingestd", [bad], lists)
        assert isinstance(refused[bad], psycopg.errors.LockNotAvailable)
        assert await keep_each(connection, "ingestd", [bad], lists) == {}
    catalog = await read_catalog(settings_for(database))
    assert catalog.published[bad].columns == frozenset({"id"})
    assert await table_of(database, catalog, "bad") == "(id > 1)"


async def test_a_locked_partition_does_not_keep_others_unpublished(database: Database) -> None:
    skip_without_lists(database)
    database.execute(
        *GOOD,
        "CREATE TABLE bad (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)",
        "CREATE TABLE bad1 PARTITION OF bad FOR VALUES FROM (0) TO (9)",
    )
    tables = [TableId("public", "bad"), TableId("public", "good")]
    async with await connect(database.dsn, reads_names=True) as connection:
        with database.connect(autocommit=False) as owner:
            owner.execute("LOCK TABLE bad1 IN ACCESS EXCLUSIVE MODE")
            refused = await keep_each(connection, "ingestd", tables, {tables[0]: ["id"]})
    assert TableId("public", "good") not in refused


@pytest.mark.parametrize("kind", ["wal", "polling"])
async def test_a_lock_while_tables_are_compared_is_its_own_fault(
    database: Database, kind: str
) -> None:
    """The relation itself shows whether a new file or partition holds other rows."""
    made, altered, locked = COMPARED[kind]
    database.execute(
        *GOOD,
        *made,
        "CREATE PUBLICATION ingestd FOR TABLE good, bad WITH (publish_via_partition_root = true)",
    )
    wal = SourceTables(settings_for(database))
    polled = PolledTables(
        PollingSettings(kind="polling", dsn=SecretStr(database.dsn), tables=["public.*"])
    )

    async def discover() -> Discovery:
        async with await connect(database.dsn) as connection:
            if kind == "polling":
                return await polled.discover(connection, {})
            server = await inspect_server(connection, database.dsn)
            return await wal.discover(connection, server, {})

    assert len((await discover()).tables) == 2
    database.execute(altered)
    with database.connect(autocommit=False) as owner:
        owner.execute(f"LOCK TABLE {locked} IN ACCESS EXCLUSIVE MODE")
        found = await discover()
    assert [t.id.name for t in found.tables] == ["good"]
    [refused] = found.refused
    assert refused.table.id.name == "bad"
    assert "another session holds a lock on it" in refused.error.reason
    assert len((await discover()).tables) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["wal", "wal filtered", "wal excluding", "polling"])
def test_the_other_table_is_delivered_after_a_restart(
    database: Database, lake: Path, make_daemon: MakeDaemon, kind: str
) -> None:
    skip_without_lists(database)
    database.execute(*GOOD, *BAD)
    if kind == "wal filtered":
        database.execute(
            f"CREATE PUBLICATION ingestd_{database.name} FOR TABLE good, bad WHERE (id > 0)"
            " WITH (publish_via_partition_root = true)"
        )
    section = '[sources.shop.table."public.bad"]\nexclude_columns = ["note"]\n'
    interval = "" if kind == "polling" else 'discover_interval = "500ms"\n'
    more = section if kind == "wal excluding" else ""
    capture, _, _ = kind.partition(" ")
    daemon = make_daemon(config_for(capture, database, lake, extra=interval, more=more))
    daemon.start_ready()
    await_until(lambda: 1 in ids_in(lake, "bad"), 20, "the row of bad")
    daemon.sigterm()
    with database.connect(autocommit=False) as owner:
        owner.execute(LOCK)
        database.execute("INSERT INTO good VALUES (2)")
        daemon.start()
        await_until(lambda: 2 in ids_in(lake), 40, lambda: f"good\n{daemon.tail()[-2500:]}")
    database.execute("INSERT INTO bad VALUES (2)")
    await_until(lambda: 2 in ids_in(lake, "bad"), 60, lambda: f"bad\n{daemon.tail()[-2500:]}")
