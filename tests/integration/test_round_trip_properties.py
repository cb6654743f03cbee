"""Generated values of every kind of type, through the snapshot and the stream (I7).

Without a daemon: the server's own messages go through the real decoder, the server's COPY through
the real pages, so that many rows take little time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import sql

from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.decode.type_mapping import Types, override_type
from ingestd.model.changes import change_schema
from ingestd.model.lsn import Lsn
from ingestd.model.row_checks import UNLIMITED_BYTES
from ingestd.ports import Split
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.tables import describe, list_tables, list_types
from ingestd.postgres.connection.pinned_settings import SETTINGS
from ingestd.postgres.connection.session import connect
from ingestd.postgres.snapshot.read_view import ExportedView, ReadPoint
from ingestd.postgres.snapshot.table_pages import TablePages
from tests.harness.databases import Database, fresh_database
from tests.harness.generated_values import GENERATED
from tests.harness.round_trip import Texts, row_faults, source_texts
from tests.harness.user_types import SETUP

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ingestd.model.changes import TableBatch
    from ingestd.model.schema import Column, Table
    from ingestd.testing.embedded.postgres import PostgresServer

    Connection = psycopg.Connection[tuple[Any, ...]]

POINT = Lsn(0x1_0000_0000)
AT = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
EXAMPLES = 20
ROWS = 40
CHANGES = """
SELECT data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL,
  'proto_version', '1', 'publication_names', 'every')"""


@dataclass(frozen=True)
class World:
    """A database with a slot, whose only session has the settings that readers pin."""

    database: Database
    connection: Connection

    def changes(self) -> list[bytes]:
        """Take what was changed since the last call, as pgoutput messages."""
        return [data for (data,) in self.connection.execute(CHANGES, [self.database.name])]

    def texts(self, table: Table) -> dict[int, Texts]:
        return source_texts(self.connection, table.id.name, [c.name for c in table.columns[1:]])


@pytest.fixture(scope="module")
def world(postgres: PostgresServer) -> Iterator[World]:
    pinned = {**SETTINGS, "search_path": "public"}  # it makes tables, too
    options = " ".join(f"-c {n}={v.replace(' ', chr(92) + ' ')}" for n, v in pinned.items())
    with fresh_database(postgres) as database:
        database.execute(*SETUP, "CREATE PUBLICATION every FOR ALL TABLES")
        dsn = psycopg.conninfo.make_conninfo(database.dsn, options=options)
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [database.name]
            )
            yield World(database, connection)


def make_table(world: World, name: str) -> Table:
    """Make a table with a column v0, v1, ... of each type; with REPLICA IDENTITY FULL."""
    types = enumerate(GENERATED[name])
    columns = sql.SQL(", ").join(sql.SQL(f"v{i} {t.name}") for i, t in types)
    table = sql.Identifier(name)
    for statement in ("CREATE TABLE {} (id int, {})", "ALTER TABLE {} REPLICA IDENTITY FULL"):
        world.connection.execute(sql.SQL(statement).format(table, columns))
    return asyncio.run(table_named(world.database, name))


async def table_named(database: Database, name: str) -> Table:
    async with await connect(database.dsn) as connection:
        rows = [r for r in await list_tables(connection) if r.name == name]
        [table] = await describe(connection, rows, before_full=True)
        types = await list_types(connection, [c.type_oid for c in table.columns])
    chosen = {f"v{i}": t.chosen for i, t in enumerate(GENERATED[name]) if t.chosen is not None}
    return replace(table, columns=tuple(with_type(c, chosen, types) for c in table.columns))


def with_type(column: Column, chosen: Mapping[str, str], types: Types) -> Column:
    if column.name not in chosen:
        return column
    wanted = override_type(chosen[column.name], column.type_oid, column.typmod, types)
    return replace(column, type=wanted, is_override=True)


def decoded(messages: Sequence[bytes], table: Table) -> list[TableBatch]:
    decoder = PgoutputDecoder(lambda relation: table if relation.oid == table.oid else None)
    ends = np.cumsum([len(m) for m in messages], dtype=np.int64)
    starts = np.concatenate(([0], ends[:-1]))
    chunks = decoder.feed(b"".join(messages), starts, ends)
    return [batch for chunk in chunks for batch in chunk.batches]


async def pages(dsn: str, table: Table, snapshot: str, *, is_packed: bool) -> list[TableBatch]:
    """Read the table by packed columns or by rows, whichever the daemon would choose."""
    blocks = BlockRange(table.id.schema, table.id.name, is_packed=is_packed, oid=table.oid)
    view = ExportedView(dsn, snapshot, ReadPoint(POINT, AT))
    reading = TablePages(
        dsn, Split(table, snapshot, blocks.to_text(), 0), view, row_limit_bytes=UNLIMITED_BYTES
    )
    return [page.batch async for page in reading.pages()]


def read_both_ways(world: World, table: Table) -> list[list[TableBatch]]:
    with world.database.connect(autocommit=False) as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        [[snapshot]] = connection.execute("SELECT pg_export_snapshot()")
        return [
            asyncio.run(pages(world.database.dsn, table, snapshot, is_packed=is_packed))
            for is_packed in (True, False)
        ]


def assert_given_back(
    table: Table,
    batches: Sequence[TableBatch],
    expected: Mapping[str, tuple[dict[int, Texts], dict[int, Texts] | None]],
) -> None:
    """Each row of each operation (its new and old values) exists and is exact."""
    found: dict[str, set[int]] = {op: set() for op in expected}
    faults = []
    for batch in batches:
        batch.rows.validate(full=True)
        assert batch.rows.schema == change_schema(table)
        for row in batch.rows.to_pylist(maps_as_pydicts="strict"):
            op, i = row["_cdc_op"], row["id"]
            assert i not in found[op]
            found[op].add(i)
            new, old = expected[op]
            before = None if old is None else old[i]
            faults += [f"{op}: {f}" for f in row_faults(row, batch.rows.schema, new[i], before)]
    assert not faults, "\n".join(faults[:10])
    assert found == {op: set(new) for op, (new, _) in expected.items()}


@pytest.mark.parametrize("name", GENERATED)
def test_lossless_generated_values_are_given_back(world: World, name: str) -> None:
    table, run = make_table(world, name), world.connection.execute
    strategies = [st.none() | t.values for t in GENERATED[name]]
    insert, update, truncate, delete = statements(table, [t.name for t in GENERATED[name]])

    @given(st.lists(st.tuples(*strategies), min_size=1, max_size=ROWS))
    @settings(max_examples=EXAMPLES)
    def check(rows: list[tuple[str | None, ...]]) -> None:
        run(truncate)
        world.changes()
        run(insert, [list(values) for values in zip(*rows, strict=True)])
        inserted = world.texts(table)
        for batches in read_both_ways(world, table):
            assert_given_back(table, batches, {"r": (inserted, None)})
        run(update, [len(rows)])
        updated = world.texts(table)
        run(delete)
        assert_given_back(
            table,
            decoded(world.changes(), table),
            {"c": (inserted, None), "u": (updated, inserted), "d": (updated, updated)},
        )

    check()


def statements(table: Table, types: Sequence[str]) -> list[sql.Composed]:
    """Insert lists of texts, one for each column; give each row the next one's values; empty it."""
    names = [f"v{i}" for i in range(len(types))]
    values = [f"{n}::{t}" for n, t in zip(names, types, strict=True)]
    lists = ", ".join(["%s::text[]"] * len(names))
    insert = (
        f"INSERT INTO {{}} SELECT n, {', '.join(values)}"
        f" FROM unnest({lists}) WITH ORDINALITY u({', '.join(names)}, n)"
    )
    assigned = ", ".join(f"{n} = next.{n}" for n in names)
    update = f"UPDATE {{0}} SET {assigned} FROM {{0}} next WHERE next.id = {{0}}.id %% %s + 1"
    return [
        sql.SQL(statement).format(sql.Identifier(table.id.name))
        for statement in (insert, update, "TRUNCATE {}", "DELETE FROM {}")
    ]
