"""The catalog, compared with what the stream reports at the same time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pydantic import SecretStr

from ingestd.model.lake_state import TableEvent, TableState, registered
from ingestd.model.lsn import Lsn
from ingestd.postgres.captured.catalog import read_catalog
from ingestd.postgres.connection.session import connect
from ingestd.postgres.connection.wal_position import insert_position
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal import discovery
from ingestd.postgres.wal.server import inspect_server

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ingestd.model.schema import TableId
    from ingestd.ports import Discovery
    from ingestd.postgres.captured.catalog import Catalog
    from ingestd.postgres.catalog.publication import Published
    from tests.harness.databases import Database


def test_a_column_dropped_while_the_catalog_is_read_is_no_gap(database: Database) -> None:
    """The stream may report the drop before the (older) catalog is read."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
    settings = WalSettings(
        kind="wal", dsn=SecretStr(database.dsn), tables=["public.*"], publication="p", slot="s"
    )
    database.execute("CREATE PUBLICATION p FOR TABLE t")

    async def look_twice() -> Discovery:
        async with await connect(database.dsn) as connection:
            server = await inspect_server(connection, database.dsn)
            is_second = False

            async def read_slowly(
                settings: WalSettings, last: Mapping[TableId, Published]
            ) -> Catalog:
                catalog = await read_catalog(settings, last)
                if is_second:
                    without = replace(table, columns=table.columns[:1])
                    event = TableEvent(without, TableState.LIVE, at, Lsn(2))
                    known[table.id] = registered(event, live)
                return catalog

            tables = discovery.SourceTables(settings, read=read_slowly)
            [table] = (await tables.discover(connection, server, {})).tables
            at = datetime.now(UTC)
            live = registered(TableEvent(table, TableState.LIVE, at, Lsn(1)), None)
            known = {table.id: live}

            is_second = True
            return await tables.discover(connection, server, known)

    found = asyncio.run(look_twice())
    assert found.interrupted == {}
    assert found.rewritten == {}


async def test_what_others_do_to_the_publication_meanwhile_is_found(database: Database) -> None:
    """Between a discovery and acting on it: else a table stays stopped indefinitely."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE TABLE u (id int PRIMARY KEY)",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    settings = WalSettings(
        kind="wal",
        dsn=SecretStr(database.dsn),
        tables=["public.*"],
        publication="p",
        slot="s",
        manage=False,
    )
    async with await connect(database.dsn) as connection:
        server = await inspect_server(connection, database.dsn)
        tables = discovery.SourceTables(settings)
        found = await tables.discover(connection, server, {})
        assert [str(refused.table.id) for refused in found.refused] == ["public.u"]
        database.execute("ALTER PUBLICATION p ADD TABLE u")
        assert await tables.take_publication() == (False, {})
        assert await tables.have_changed()
        assert not (await tables.discover(connection, server, {})).refused
        assert not await tables.have_changed()
        database.execute("ALTER PUBLICATION p DROP TABLE u")
        assert await tables.take_publication() == (False, {})
        assert await tables.have_changed()


def test_the_insert_position_is_not_below_an_asynchronous_commit(database: Database) -> None:
    """It is the end of a record: an idle stream reaches it."""
    database.execute("CREATE TABLE t (id int)")

    async def look() -> tuple[Lsn, Lsn]:
        async with await connect(database.dsn) as connection:
            await connection.execute("SET synchronous_commit = off")
            await connection.execute("INSERT INTO public.t VALUES (1)")
            position = await insert_position(connection)
            cursor = await connection.execute("SELECT pg_current_wal_insert_lsn()::text")
            row = await cursor.fetchone()
            assert row is not None
            return position, Lsn.parse(row[0])

    position, written = asyncio.run(look())
    assert written - 40 <= position <= written


async def test_bounded_the_first_8_kb_of_a_comment_are_kept(database: Database) -> None:
    """The owner of a table may write a comment of 1 GB."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE PUBLICATION p FOR TABLE t",
        "DO $$BEGIN EXECUTE format('COMMENT ON COLUMN t.id IS %L', repeat('x', 2000000)); END$$",
    )
    settings = WalSettings(
        kind="wal", dsn=SecretStr(database.dsn), tables=["public.*"], publication="p", slot="s"
    )
    async with await connect(database.dsn) as connection:
        server = await inspect_server(connection, database.dsn)
        [table] = (await discovery.SourceTables(settings).discover(connection, server, {})).tables
    assert table.columns[0].comment == "x" * 8192
