"""Sweeps on a server: deleted keys of every type, under concurrent writes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from psycopg import AsyncCursor

from ingestd.model.changes import TableBatch
from ingestd.model.errors import TableChangedError, TransientError
from ingestd.model.row_checks import UNLIMITED_BYTES
from ingestd.model.schema import Mask
from ingestd.ports import Split
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.connection.session import connect
from ingestd.postgres.polling.keys.delete_sweep import Sweep, SweepPolicy, absent
from ingestd.postgres.polling.keys.key_pages import KeyPages
from ingestd.postgres.polling.keys.key_set import KeySet
from ingestd.postgres.polling.keys.lake_keys import WHOLE, KeyPartition
from ingestd.postgres.settings import PollingSettings
from ingestd.postgres.snapshot.external_reader import CopyPageSource
from tests.harness.collations import make_collations
from tests.integration.test_key_splits import AFTER, KEYS, PREPARE
from tests.integration.test_pages import exported, table_named

if TYPE_CHECKING:
    from ingestd.digests.value_hashes import Hashes
    from ingestd.model.schema import Table, TableId
    from ingestd.postgres.connection.liveness import LivenessCheckedConnection
    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.harness.databases import Database

ROWS = 600
MORE: dict[str, tuple[str, str]] = {
    "columns in opposite orders": ("id int NOT NULL, n text NOT NULL", "i % 7, 'n' || i"),
    "all columns in falling order": ("id int NOT NULL, n int NOT NULL", "i % 7, i"),
    "index of another collation": ('id text COLLATE "C" NOT NULL', "'ä' || i"),
    "oid": ("id oid PRIMARY KEY", "i + 4000000000"),
    "numeric with a scale": ("id numeric(30,4) PRIMARY KEY", "(i - 300) / 16.0"),
    "float4": ("id float4 PRIMARY KEY", "CASE i WHEN 1 THEN 'NaN' ELSE (i - 99) / 7.0 END"),
    "timestamptz, odd": (
        "id timestamptz PRIMARY KEY",
        """CASE i WHEN 10 THEN '-infinity' WHEN 11 THEN '0044-03-15 BC' WHEN 20 THEN '99999-01-01'
             ELSE timestamptz '1969-12-31' + i * interval '1.000001 s' END""",
    ),
}
INDEXES = {
    "columns in opposite orders": "CREATE UNIQUE INDEX by_key ON t (id DESC, n)",
    "all columns in falling order": "CREATE UNIQUE INDEX by_key ON t (id DESC, n DESC)",
    "index of another collation": "CREATE UNIQUE INDEX by_key ON t (id COLLATE german)",
}


@dataclass
class Log:
    """A lake that has read a table once."""

    rows: pa.Table
    readings: list[Sequence[str]] = field(default_factory=list)

    async def changes(
        self, table: TableId, columns: Sequence[str]
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        del table
        self.readings.append(columns)
        for batch in self.rows.select(columns).to_batches(max_chunksize=100):
            yield batch


async def lake_of(database: Database, table: Table) -> Log:
    """Read the table's keys, and `number`, into a lake."""
    async with exported(database) as snapshot:
        whole = BlockRange(table.id.schema, table.id.name, is_whole=True, oid=table.oid).to_text()
        split = Split(table, snapshot, whole, 1 << 20)
        columns = list(dict.fromkeys([*table.key, "number"]))
        source = CopyPageSource(database.dsn, split, columns, row_limit_bytes=UNLIMITED_BYTES)
        rows = pa.Table.from_batches([batch async for batch in source.batches()])
        await source.close()
    count = rows.num_rows
    for name, value in (("_cdc_op", "r"), ("_cdc_lsn", 7), ("_cdc_seq", 0), ("_cdc_epoch", 1)):
        rows = rows.append_column(name, pa.repeat(pa.scalar(value), count))
    return Log(rows)


def settings_of(database: Database, **more: Any) -> PollingSettings:
    return PollingSettings.model_validate(
        {"kind": "polling", "dsn": database.dsn, "tables": ["*.*"], **more}
    )


def sweep_of(database: Database, table: Table, keys: KeySet | None, log: Log, **more: Any) -> Sweep:
    settings = settings_of(database, **more)
    return Sweep(
        settings,
        table,
        keys,
        log,
        key_bytes=1 << 20,
        row_limit_bytes=UNLIMITED_BYTES,
        page_rows=64,
        policy=SweepPolicy(retry_s=0.01),
    )


def in_parts(database: Database, table: Table, log: Log, **more: Any) -> Sweep:
    """A sweep that has room for 100 keys at a time."""
    return Sweep(
        settings_of(database),
        table,
        None,
        log,
        key_bytes=1600,
        row_limit_bytes=UNLIMITED_BYTES,
        page_rows=64,
        policy=SweepPolicy(least_key_bytes=1),
        **more,
    )


async def loaded(log: Log, table: Table) -> KeySet:
    keys = await KeySet.load(log, table, limit_bytes=1 << 20)
    assert keys is not None
    return keys


async def found_by(one: Sweep) -> list[pa.RecordBatch]:
    async with aclosing(one.missing()) as batches:
        return [rows async for rows in batches]


async def swept(database: Database, table: Table, log: Log) -> list[pa.RecordBatch]:
    return await found_by(sweep_of(database, table, await loaded(log, table), log))


@asynccontextmanager
async def snapshot_of(database: Database) -> AsyncGenerator[LivenessCheckedConnection, None]:
    async with await connect(database.dsn, autocommit=False) as connection:
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await connection.execute("SELECT pg_current_snapshot()")
        yield connection


async def absent_of(
    database: Database, table: Table, candidates: Sequence[pa.RecordBatch]
) -> list[pa.RecordBatch]:
    async with snapshot_of(database) as connection:
        return [await absent(connection, table, rows, UNLIMITED_BYTES) for rows in candidates]


def keys_in(table: Table, batches: Sequence[pa.RecordBatch]) -> list[str]:
    """The keys of these rows, as texts, sorted."""
    names = [table.column(name).lake_name for name in table.key]
    found = []
    for rows in batches:
        raw = rows.column("_cdc_raw").to_pylist(maps_as_pydicts="strict")
        values = [rows.column(n).to_pylist() for n in names]
        for kept, *parts in zip(raw, *values, strict=True):
            found.append(str([(kept or {}).get(n, v) for n, v in zip(names, parts, strict=True)]))
    return sorted(found)


def numbered(table: Table, log: Log, numbers: Sequence[int]) -> list[str]:
    """The keys of the rows with these numbers."""
    chosen = log.rows.filter(pc.is_in(log.rows["number"], pa.array(numbers, pa.int32())))
    return keys_in(table, chosen.to_batches())


def make(database: Database, columns: str, values: str, rows: int = ROWS) -> None:
    database.execute(
        f"CREATE TABLE t ({columns}, number int)",
        f"INSERT INTO t SELECT {values}, i FROM generate_series(1, {rows}) i",
    )


async def keyed(database: Database, name: str = "t") -> Table:
    """The table, with a key: that of `by_key` if it has no primary key."""
    table = await table_named(database, name)
    if table.key:
        return table
    names = database.value(
        "SELECT array_agg(attname::text ORDER BY attnum) FROM pg_attribute"
        " WHERE attrelid = 't'::regclass AND attnotnull AND attnum > 0"
    )
    return replace(table, key=tuple(names))


DELETED = list(range(10, ROWS + 1, 10))
UNINDEXED = frozenset({"domain over an enum", "domain over a composite value"})
"""No name of a type below a domain is used, so that its owner decides nothing."""


@pytest.mark.thorough
@pytest.mark.parametrize("case", [*KEYS, *MORE])
async def test_a_sweep_finds_the_deleted_rows_by_any_key(database: Database, case: str) -> None:
    database.execute(*PREPARE)
    make_collations(database)
    make(database, *(KEYS | MORE)[case])
    database.execute(*AFTER.get(case, ()), *([INDEXES[case]] if case in INDEXES else []))
    table = await keyed(database)
    log = await lake_of(database, table)
    database.execute("DELETE FROM t WHERE number % 10 = 0")
    expected = numbered(table, log, DELETED)
    assert len(expected) == len(DELETED)
    found = await swept(database, table, log)
    assert keys_in(table, found) == expected
    assert keys_in(table, await absent_of(database, table, found)) == expected
    everything = [rows for rows in log.rows.to_batches() if rows.num_rows]
    assert keys_in(table, await absent_of(database, table, everything)) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("case", [c for c in [*KEYS, *MORE] if c not in UNINDEXED])
async def test_pages_follow_an_index(database: Database, case: str) -> None:
    """Else each page would sort all keys."""
    database.execute(*PREPARE)
    make_collations(database)
    make(database, *(KEYS | MORE)[case], 50)
    database.execute(*AFTER.get(case, ()), *([INDEXES[case]] if case in INDEXES else []))
    table = await keyed(database)
    async with snapshot_of(database) as connection:
        reader = KeyPages(table, UNLIMITED_BYTES)
        page = await reader.page(connection, None, 20)
        assert page is not None
        for setting in ("enable_seqscan", "enable_sort", "enable_bitmapscan"):
            await connection.execute(f"SET LOCAL {setting} = off".encode())
        plan = await plan_of(connection, reader, page.last)
    assert "Index Cond" in plan
    assert "Sort" not in plan


async def plan_of(
    connection: LivenessCheckedConnection, reader: KeyPages, place: Sequence[bytes]
) -> str:
    """How the server finds the page that follows a place."""
    execute, asked = AsyncCursor.execute, []

    async def ask(self: AsyncCursor[Any], query: Any, *args: Any, **options: Any) -> Any:
        asked.append(query)
        return await execute(self, query, *args, **options)

    with mock.patch.object(AsyncCursor, "execute", ask):
        await reader.page(connection, place, 20)
    cursor = await connection.execute(b"EXPLAIN " + asked[-1])
    return "\n".join(line for (line,) in await cursor.fetchall())


async def test_no_live_row_is_taken_for_deleted(database: Database) -> None:
    """A candidate that exists again at the poll is none, whatever the sweep saw."""
    make(database, "id int PRIMARY KEY", "i")
    table = await keyed(database)
    log = await lake_of(database, table)
    database.execute("DELETE FROM t WHERE number % 10 = 0")
    found = await swept(database, table, log)
    async with snapshot_of(database) as before:
        database.execute("INSERT INTO t SELECT i * 20, 0 FROM generate_series(1, 30) i")
        gone = [await absent(before, table, rows, UNLIMITED_BYTES) for rows in found]
        assert keys_in(table, gone) == numbered(table, log, DELETED)
    gone = await absent_of(database, table, found)
    assert keys_in(table, gone) == numbered(table, log, range(10, ROWS + 1, 20))


async def test_a_key_with_another_text_of_an_equal_value_is_deleted(database: Database) -> None:
    """The lake distinguishes rows by their text: 1.0 is not 1.00 there."""
    make(database, "id numeric PRIMARY KEY", "i + 0.5", 3)
    table = await keyed(database)
    log = await lake_of(database, table)
    database.execute("UPDATE t SET id = 1.50 WHERE id = 1.5")
    found = await swept(database, table, log)
    assert keys_in(table, found) == ["['1.5']"]
    assert keys_in(table, await absent_of(database, table, found)) == ["['1.5']"]


async def test_masked_keys_are_compared_as_the_lake_has_them(database: Database) -> None:
    make(database, "id text PRIMARY KEY", "'person ' || i")
    plain = await keyed(database)
    columns = [replace(plain.columns[0], mask=Mask("sha256", b"key")), *plain.columns[1:]]
    table = replace(plain, columns=tuple(columns))
    log = await lake_of(database, table)
    database.execute("DELETE FROM t WHERE number % 10 = 0")
    found = await swept(database, table, log)
    assert keys_in(table, found) == numbered(table, log, DELETED)
    assert keys_in(table, await absent_of(database, table, found)) == keys_in(table, found)
    assert "person" not in str(keys_in(table, found))


async def test_more_keys_than_fit_are_swept_part_by_part(database: Database) -> None:
    make(database, "id int PRIMARY KEY", "i")
    table = await keyed(database)
    log = await lake_of(database, table)
    database.execute("DELETE FROM t WHERE number % 10 = 0")
    found = await found_by(in_parts(database, table, log))
    assert keys_in(table, found) == numbered(table, log, DELETED)


async def test_a_sweep_resumes_at_the_interrupted_part(database: Database) -> None:
    make(database, "id int PRIMARY KEY", "i")
    table = await keyed(database)
    log = await lake_of(database, table)
    database.execute("DELETE FROM t WHERE number % 10 = 0")
    begun: list[KeyPartition] = []

    part_by_part = partial(in_parts, database, table, log, began=begun.append)

    found = []
    async with aclosing(part_by_part(first=WHOLE).missing()) as batches:
        async for rows in batches:
            if len(begun) == 3:
                break  # what is found in the part is lost with it
            found.append(rows)
    found += await found_by(part_by_part(first=begun[-1]))
    assert keys_in(table, found) == numbered(table, log, DELETED)
    numbers = [part.number for part in begun]
    assert numbers == [0, 1, 2, *range(2, begun[0].count)]


async def test_every_partition_is_swept(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int, at date, number int, PRIMARY KEY (id,at)) PARTITION BY RANGE(at)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM ('2024-01-01') TO ('2025-01-01')",
        "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM ('2025-01-01') TO ('2026-01-01')",
        "INSERT INTO t SELECT i, date '2024-01-01' + i % 700, i FROM generate_series(1, 600) i",
    )
    table = await keyed(database)
    log = await lake_of(database, table)
    database.execute("DELETE FROM t WHERE number % 10 = 0")
    found = await swept(database, table, log)
    assert keys_in(table, found) == numbered(table, log, DELETED)
    assert keys_in(table, await absent_of(database, table, found)) == keys_in(table, found)


async def test_children_of_a_plain_table_are_not_its_rows(database: Database) -> None:
    make(database, "id int PRIMARY KEY", "i", 10)
    table = await keyed(database)
    log = await lake_of(database, table)
    database.execute(
        "CREATE TABLE child () INHERITS (t)",
        "INSERT INTO child VALUES (3, 3)",
        "DELETE FROM ONLY t WHERE id = 3",
    )
    found = await swept(database, table, log)
    assert keys_in(table, found) == ["[3]"]
    assert keys_in(table, await absent_of(database, table, found)) == ["[3]"]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["text", "char(9)"])
@pytest.mark.parametrize(
    ("encoding", "value"),
    [
        ("LATIN1", "'ä' || i"),
        ("SQL_ASCII", "'ä' || i"),
        ("SQL_ASCII", r"convert_from('\xe9', 'SQL_ASCII') || i"),
    ],
)
async def test_keys_of_a_database_of_another_encoding(
    database: Database, encoding: str, value: str, kind: str
) -> None:
    name = f"{database.name}_other"
    database.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    other = replace(database, name=name)
    try:
        make(other, f"id {kind} PRIMARY KEY", value)
        table = await keyed(other)
        log = await lake_of(other, table)
        other.execute("DELETE FROM t WHERE number % 10 = 0")
        found = await swept(other, table, log)
        assert keys_in(table, found) == numbered(table, log, DELETED)
        one, *_ = log.rows.filter(pc.equal(log.rows["number"], 1)).to_batches()
        assert keys_in(table, await absent_of(other, table, [*found, one])) == keys_in(table, found)
    finally:
        database.execute(f"DROP DATABASE {name} (FORCE)")


async def test_keys_of_another_type_in_the_lake_are_not_deleted(
    database: Database,
) -> None:
    """Text to the server, to which ``0.5`` is not ``0.50``."""
    make(database, "id text PRIMARY KEY", "i || '.5'", 10)
    table = await keyed(database)
    chosen = replace(table.columns[0], type=pa.decimal128(10, 2), is_override=True)
    table = replace(table, columns=(chosen, *table.columns[1:]))
    log = await lake_of(database, table)
    database.execute("DELETE FROM t WHERE number = 3")
    every = log.rows.combine_chunks().to_batches()
    gone = [str([Decimal("3.50")])]
    assert keys_in(table, await swept(database, table, log)) == gone
    assert keys_in(table, await absent_of(database, table, every)) == gone


async def test_keys_that_went_meanwhile_are_no_candidates(database: Database) -> None:
    make(database, "id int PRIMARY KEY", "i", 100)
    table = await keyed(database)
    log = await lake_of(database, table)
    database.execute("DELETE FROM t WHERE number <= 2")
    gone = log.rows.filter(pc.equal(log.rows["number"], 1)).combine_chunks().to_batches()[0]
    index = gone.schema.get_field_index("_cdc_op")
    rows = gone.set_column(index, "_cdc_op", pa.array(["d"]))

    class ChangingKeys(KeySet):
        """Loses a key while a sweep reads the others."""

        @contextmanager
        def still(self) -> Iterator[Hashes]:
            with super().still() as hashes:
                self.apply_changes(TableBatch(table, rows, rows.nbytes))
                yield hashes

    keys = await ChangingKeys.load(log, table, limit_bytes=1 << 20)
    found = await found_by(sweep_of(database, table, keys, log))
    assert keys_in(table, found) == ["[2]"]


async def test_without_deletions_the_lake_is_not_scanned_again(database: Database) -> None:
    make(database, "id int PRIMARY KEY", "i", 100)
    table = await keyed(database)
    log = await lake_of(database, table)
    keys = await loaded(log, table)
    readings = len(log.readings)
    assert await found_by(sweep_of(database, table, keys, log)) == []
    assert len(log.readings) == readings


async def test_an_empty_source_and_an_empty_lake(database: Database) -> None:
    make(database, "id int PRIMARY KEY", "i", 100)
    table = await keyed(database)
    log = await lake_of(database, table)
    nothing = Log(log.rows.slice(0, 0))
    assert await swept(database, table, nothing) == []
    database.execute("DELETE FROM t")
    found = await swept(database, table, log)
    assert len(keys_in(table, found)) == 100
    assert await absent_of(database, table, found) == found


async def test_a_sweep_can_be_abandoned_and_restarted(database: Database) -> None:
    make(database, "id int PRIMARY KEY", "i")
    table = await keyed(database)
    log = await lake_of(database, table)
    keys = await loaded(log, table)
    database.execute("DELETE FROM t WHERE number % 2 = 0")
    reading = sweep_of(database, table, keys, log).missing()
    await anext(reading)
    await reading.aclose()
    found = await found_by(sweep_of(database, table, keys, log))
    assert len(keys_in(table, found)) == ROWS // 2
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    assert database.value(query) == 1


async def test_a_sweep_continues_after_transient_faults(database: Database) -> None:
    make(database, "id int PRIMARY KEY", "i")
    table = await keyed(database)
    log = await lake_of(database, table)
    keys = await loaded(log, table)
    database.execute("DELETE FROM t WHERE number % 10 = 0")
    asked, read = [], KeyPages.page

    async def page(self: KeyPages, connection: Any, place: Any, rows: int) -> Any:
        asked.append(place)
        if len(asked) in {1, 4, 5}:
            database.execute(f"SELECT pg_terminate_backend({connection.info.backend_pid}, 5000)")
        return await read(self, connection, place, rows)

    with mock.patch.object(KeyPages, "page", page):
        found = await found_by(sweep_of(database, table, keys, log))
    assert keys_in(table, found) == numbered(table, log, DELETED)
    assert asked[:3] == [None, None, (b"71",)]
    assert asked[3] == asked[4] == asked[5]


async def test_a_sweep_of_a_table_that_stays_locked_or_is_another_ends(
    database: Database, postgres: PostgresServer
) -> None:
    make(database, "id int PRIMARY KEY", "i", 10)
    table = await keyed(database)
    log = await lake_of(database, table)
    keys = await loaded(log, table)
    with postgres.connect(database.name, autocommit=False) as connection:
        connection.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(TransientError) as fault:
            await found_by(sweep_of(database, table, keys, log, lock_timeout="50ms"))
        assert fault.value.reason == "lock_timeout"
    for statement in ("ALTER TABLE t RENAME id TO other", "DROP TABLE t"):
        database.execute(statement)
        with pytest.raises(TableChangedError):
            await found_by(sweep_of(database, table, keys, log))


async def test_large_keys_come_in_small_pages(database: Database) -> None:
    database.execute("CREATE TABLE t (id text PRIMARY KEY, number int)")
    database.execute(
        "INSERT INTO t SELECT i || string_agg(md5(i::text || j), ''), i"
        " FROM generate_series(1, 4000) i, generate_series(1, 60) j GROUP BY i"
    )
    table = await keyed(database)
    async with snapshot_of(database) as connection:
        sizes = [
            (page.rows, page.nbytes)
            async for page in KeyPages(table, UNLIMITED_BYTES).pages(connection)
        ]
    assert sum(rows for rows, _ in sizes) == 4000
    assert np.mean([nbytes for _, nbytes in sizes[1:]] or [0]) < 5 << 20
