"""The owner of a table puts a view in its place while a reader waits: nothing of it runs.

Nor does anything of another column that gets the name of one that is read.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

from ingestd.model.errors import TableChangedError, TableError
from ingestd.model.lsn import Lsn
from ingestd.model.row_checks import UNLIMITED_BYTES
from ingestd.ports import Split
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.connection.pinned_settings import WHERE_KNOWN
from ingestd.postgres.connection.session import connect
from ingestd.postgres.polling.keys.delete_sweep import absent
from ingestd.postgres.polling.keys.key_pages import KeyPages
from ingestd.postgres.polling.poll import (
    TablePoll,
    backend_of,
    begin_poll,
    first_progress,
    latest_cursor,
    scan_table,
)
from ingestd.postgres.polling.polled_table import Cursor, PolledTable
from ingestd.postgres.polling.preflight import _is_growing_uuid
from ingestd.postgres.polling.progress import PollProgress, SeenXids
from ingestd.postgres.rewrites.catalog_evidence import Doubt, Question
from ingestd.postgres.rewrites.dependent_text_queries import holds
from ingestd.postgres.rewrites.dependent_texts import StaleText as TextDoubt
from ingestd.postgres.rewrites.dependent_texts import TypeUse
from ingestd.postgres.rewrites.fingerprint import StoredColumn, TableFingerprint, digest
from ingestd.postgres.rewrites.fingerprint_queries import _holds
from ingestd.postgres.snapshot.ctid_splits import CtidSplits
from ingestd.postgres.snapshot.external_reader import CopyPageSource
from ingestd.postgres.snapshot.key_lookup import KeyedRelation
from ingestd.postgres.snapshot.key_range import KeyColumn, KeyRange
from ingestd.postgres.snapshot.key_splits import KeySplits
from ingestd.postgres.snapshot.read_probe import read_fault
from ingestd.postgres.snapshot.read_view import ExportedView, OwnView, ReadPoint
from ingestd.postgres.snapshot.table_pages import TablePages
from ingestd.postgres.snapshot.where import check_condition
from ingestd.testing.embedded.waiting import await_until
from tests.harness.hostile import CALLED, hostile_calls
from tests.integration.test_pages import exported, table_named

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator

    from ingestd.model.schema import Table
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("table owner")

LIMIT_S = 30.0
KEY = (KeyColumn("id", ("pg_catalog", "int4"), ("pg_catalog", "<", ">=")),)
EVIL = (
    f"CREATE FUNCTION public.evil(t text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN "
    f"RAISE WARNING '{CALLED}: % by %', t, current_user; RETURN '7'; END $$"
)
VIEW = """CREATE VIEW public.t AS SELECT evil('a')::int AS id, evil('b')::timestamptz AS at,
 evil('c') AS note, evil('d')::regclass AS r, evil('e')::xid AS xmin, evil('f')::tid AS ctid
 WHERE evil('g') <> ''"""
GRANT = "GRANT SELECT ON public.t TO PUBLIC"
REPLACING = {
    "dropped": ("DROP TABLE public.t", VIEW, GRANT),
    "renamed": ("ALTER TABLE public.t RENAME TO before", VIEW, GRANT),
    "moved": (
        "CREATE SCHEMA elsewhere",
        "ALTER TABLE public.t SET SCHEMA elsewhere",
        VIEW,
        GRANT,
    ),
    "made anew": ("DROP TABLE public.t", "CREATE TABLE public.t (id int)", GRANT),
    # A sequence has no row type, so its name is free for a domain.
    "a sequence": (
        "ALTER TABLE public.t RENAME TO before",
        "CREATE TYPE public.of_rows AS (id int, at timestamptz, note text, r regclass)",
        "CREATE SEQUENCE public.t",
        "GRANT SELECT ON SEQUENCE public.t TO PUBLIC",
        "CREATE DOMAIN public.t AS public.of_rows CHECK (public.evil('a') = '7')",
    ),
    # Up to PostgreSQL 15 a rule makes an empty table a view, which keeps its OID.
    "made a view": (
        "TRUNCATE public.t",
        """CREATE RULE "_RETURN" AS ON SELECT TO public.t DO INSTEAD SELECT public.evil('a')::int
 AS id, public.evil('b')::timestamptz AS at, public.evil('c') AS note,
 public.evil('d')::regclass AS r WHERE public.evil('g') <> ''""",
    ),
}


COLUMNS = {"id": "7", "at": "2020-01-01", "note": "x", "r": "1"}
"""By name, a text of what the casts of the owner's type return."""
CASTS = {
    "text": ("id", "at", "note", "r"),
    "int4": ("id",),
    "timestamptz": ("at",),
    "oid": ("r",),
}
"""By type, the columns whose owner's type is cast to it: by assignment, or implicitly."""


def own_type(column: str, owner: str) -> Iterator[str]:
    """SQL that makes a type for a column, whose casts report who called them."""
    made = f"public.of_{column}"
    yield f"CREATE TYPE {made} AS ENUM ('a')"
    for target in (target for target, columns in CASTS.items() if column in columns):
        function = f"public.{column}_{target}({made})"
        yield (
            f"CREATE FUNCTION {function} RETURNS {target} LANGUAGE plpgsql AS $$ BEGIN RAISE"
            f" WARNING '{CALLED}: cast of {column} to {target} by %', current_user;"
            f" RETURN '{COLUMNS[column]}'; END $$"
        )
        # Two implicit casts are ambiguous, so that neither would be called.
        how = "" if target == "text" and column != "note" else "AS IMPLICIT"
        yield f"CREATE CAST ({made} AS {target}) WITH FUNCTION {function} {how}"
        yield f"ALTER FUNCTION {function} OWNER TO {owner}"
    yield f"ALTER TYPE {made} OWNER TO {owner}"


def retyped(how: str, *columns: str) -> list[str]:
    """SQL that puts columns of the owner's types in the place of these, without a rewrite."""
    return [
        f"ALTER TABLE public.t {statement}"
        for c in columns
        for statement in (how.format(c), f"ADD COLUMN {c} public.of_{c} NOT NULL DEFAULT 'a'")
    ]


RENAMED = "RENAME COLUMN {0} TO {0}0"
RETYPING = {
    "all": retyped(RENAMED, *COLUMNS),
    "all, dropped": retyped("DROP COLUMN {0} CASCADE", *COLUMNS),
    "the key": retyped(RENAMED, "id"),
    "the cursor": retyped(RENAMED, "at"),
    "a text": retyped(RENAMED, "note"),
    "an object": retyped(RENAMED, "r"),
    # Neither number, name nor type of the others differ.
    "and back": [*retyped(RENAMED, "note"), "ALTER TABLE public.t RENAME note TO note1",
                 "ALTER TABLE public.t RENAME note0 TO note"],
}  # fmt: skip


@pytest.fixture
def dsn(database: Database, stranger: str) -> Iterator[str]:
    """A role that may read, and no more; log_min_messages is WARNING."""
    owner = f"o_{database.name}"
    database.execute(
        EVIL,
        f"CREATE ROLE {owner}",
        *(statement for column in COLUMNS for statement in own_type(column, owner)),
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, note text, r regclass)",
        "CREATE INDEX ON t (at)",
        "INSERT INTO t SELECT i, now() - interval '1 day', 'x', 't' FROM generate_series(1, 500) i",
        "ANALYZE t",
        GRANT,
    )
    yield make_conninfo(database.dsn, user=stranger)
    database.execute(f"DROP OWNED BY {owner} CASCADE", f"DROP ROLE {owner}")
    assert not [line for line in hostile_calls(database.server) if stranger in line]


async def described(database: Database) -> Table:
    """The table as a daemon knows it: with the fingerprint of its columns."""
    table = await table_named(database, "t")
    columns = database.rows(
        "SELECT attnum::int, atttypid::int8, atttypmod, attname::text FROM pg_attribute"
        " WHERE attrelid = 't'::regclass AND attnum > 0"
    )
    stored = [
        StoredColumn(n, oid, mod, 1, has_missing=False, name=digest(name))
        for n, oid, mod, name in columns
    ]
    return replace(table, fingerprint=str(TableFingerprint(tuple(stored), {table.oid: 1})))


async def polled_of(table: Table) -> PolledTable:
    polled = replace(table, key=("id",))
    cursor, timestamptz = Cursor(("at",), "time"), 1184
    return PolledTable(polled, cursor, None, 1.0, None, {"at": timestamptz})


async def read_pages(pages: TablePages) -> None:
    async with aclosing(pages.pages()) as found:
        async for _ in found:
            pass


def place() -> ReadPoint:
    return ReadPoint(Lsn(1), datetime.now(UTC))


async def export(dsn: str, table: Table, snapshot: str) -> None:
    for split in await CtidSplits(dsn).splits(table, snapshot, 8192):
        await read_pages(
            TablePages(
                dsn, split, ExportedView(dsn, snapshot, place()), row_limit_bytes=UNLIMITED_BYTES
            )
        )


async def whole(dsn: str, table: Table, snapshot: str) -> None:
    blocks = BlockRange("public", "t", is_whole=True, oid=table.oid)
    split = Split(table, snapshot, blocks.to_text(), 0)
    await read_pages(
        TablePages(
            dsn, split, ExportedView(dsn, snapshot, place()), row_limit_bytes=UNLIMITED_BYTES
        )
    )


async def chunk(dsn: str, table: Table, _: str) -> None:
    blocks = BlockRange("public", "t", oid=table.oid)
    await read_pages(
        TablePages(
            dsn, Split(table, "", blocks.to_text(), 0), OwnView(), row_limit_bytes=UNLIMITED_BYTES
        )
    )


async def by_keys(dsn: str, table: Table, _: str) -> None:
    blocks = BlockRange("public", "t", oid=table.oid)
    pages = TablePages(
        dsn, Split(table, "", blocks.to_text(), 0), OwnView(), row_limit_bytes=UNLIMITED_BYTES
    )
    async with aclosing(pages.rows_of(KeyedRelation(blocks), [("1",), ("2",)])) as found:
        async for _page in found:
            pass


async def key_splits(dsn: str, table: Table, snapshot: str) -> None:
    await KeySplits(dsn).splits(table, snapshot, 8192)


async def key_range(dsn: str, table: Table, snapshot: str) -> None:
    where = KeyRange("public", "t", KEY, ("1",), ("9",), table.oid).to_text()
    source = CopyPageSource(dsn, Split(table, snapshot, where, 0), row_limit_bytes=UNLIMITED_BYTES)
    async for _ in source.batches():
        pass


@asynccontextmanager
async def polling(dsn: str) -> AsyncGenerator[tuple[Any, Any], None]:
    async with await connect(dsn, autocommit=False) as connection:
        backend = await backend_of(connection)
        yield connection, await begin_poll(connection, backend)


async def poll(dsn: str, table: Table, _: str, *, is_whole: bool = True) -> None:
    async with polling(dsn) as (connection, now):
        progress = PollProgress(SeenXids(), SeenXids(), floor=None if is_whole else "2020-01-01")
        scan = TablePoll(
            await polled_of(table),
            progress,
            is_whole,
            page_rows=10,
            row_limit_bytes=UNLIMITED_BYTES,
        )
        async with aclosing(scan_table(connection, scan, now)) as pages:
            async for _rows in pages:
                pass


async def near(dsn: str, table: Table, snapshot: str) -> None:
    await poll(dsn, table, snapshot, is_whole=False)


async def first(dsn: str, table: Table, _: str) -> None:
    async with polling(dsn) as (connection, now):
        await first_progress(connection, await polled_of(table), now)


async def peak(dsn: str, table: Table, _: str) -> None:
    async with await connect(dsn) as connection:
        await latest_cursor(connection, await polled_of(table))


async def key_page(dsn: str, table: Table, _: str) -> None:
    async with polling(dsn) as (connection, _now):
        pages = KeyPages((await polled_of(table)).table, UNLIMITED_BYTES)
        await pages.lock(connection)
        await pages.page(connection, None, 10)


async def sought(dsn: str, table: Table, _: str) -> None:
    keys = pa.RecordBatch.from_pylist(
        [{"id": 1, "_cdc_raw": None}],
        pa.schema([("id", pa.int32()), ("_cdc_raw", pa.map_(pa.string(), pa.string()))]),
    )
    async with polling(dsn) as (connection, _now):
        await absent(connection, (await polled_of(table)).table, keys, UNLIMITED_BYTES)


async def older_row(dsn: str, table: Table, _: str) -> None:
    async with await connect(dsn) as connection:
        doubt = Doubt("it was", table.oid, Question.HAS_OLDER_ROW, 1)
        assert not await _holds(connection, doubt)


async def texts(dsn: str, table: Table, _: str) -> None:
    async with await connect(dsn) as connection:
        use = TypeUse("regclass", "value", "r", 2205)
        assert await holds(connection, table.oid, [use], [TextDoubt("regclass", is_total=True)])


async def probe(dsn: str, table: Table, _: str) -> None:
    async with await connect(dsn) as connection:
        if fault := await read_fault(connection, table, dsn):
            raise fault


async def growing(dsn: str, table: Table, _: str) -> None:
    async with await connect(dsn) as connection:
        await _is_growing_uuid(connection, await polled_of(table), "at")


async def condition(dsn: str, table: Table, _: str) -> None:
    await check_condition(dsn, [table], "id > 7")


READING = [
    export, whole, chunk, by_keys, key_splits, key_range, poll, near, first, peak, key_page, sought,
    older_row, texts, probe, growing, condition,
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("how", REPLACING)
@pytest.mark.parametrize("read", READING)
async def test_a_relation_replaced_while_a_reader_waits_is_not_read(
    database: Database,
    dsn: str,
    read: Callable[[str, Table, str], Awaitable[None]],
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if how == "made a view" and database.server.major >= 16:
        pytest.skip("the server makes no table a view")
    if how == "made a view":
        dropped = "ALTER TABLE t DROP CONSTRAINT t_pkey, ALTER id DROP NOT NULL"
        database.execute(dropped, "DROP INDEX t_at_idx", "VACUUM t")
    # As a server that has no such setting yet.
    monkeypatch.delitem(WHERE_KNOWN, "restrict_nonsystem_relation_kind")
    table = await described(database)
    async with exported(database) as snapshot:
        with database.connect(autocommit=False) as owner:
            for statement in REPLACING[how]:
                owner.execute(statement.encode())
            reading = asyncio.create_task(of_the_table(read(dsn, table, snapshot)))
            await await_a_waiter(database, reading)
            owner.commit()
        async with asyncio.timeout(LIMIT_S):
            await reading


@pytest.mark.parametrize("read", READING)
@pytest.mark.parametrize("how", ["all", *(pytest.param(how, marks=pytest.mark.thorough)
                                          for how in list(RETYPING)[1:])])  # fmt: skip
async def test_a_retyped_column_is_not_read_by_a_waiter(
    database: Database, dsn: str, read: Callable[[str, Table, str], Awaitable[None]], how: str
) -> None:
    table = await described(database)
    async with exported(database) as snapshot:
        with database.connect(autocommit=False) as owner:
            for statement in RETYPING[how]:
                owner.execute(statement.encode())
            reading = asyncio.create_task(of_the_table(read(dsn, table, snapshot)))
            await await_a_waiter(database, reading)
            owner.commit()
        async with asyncio.timeout(LIMIT_S):
            await reading


@pytest.mark.parametrize("read", [poll, near, first, peak, growing])
async def test_a_retyped_cursor_that_is_not_captured_is_not_read(
    database: Database, dsn: str, read: Callable[[str, Table, str], Awaitable[None]]
) -> None:
    table = await described(database)
    few = replace(table, columns=(table.column("id"),), before=("id",))
    database.execute(*RETYPING["the cursor"])
    with pytest.raises(TableChangedError, match="column 'at' was replaced"):
        await read(dsn, few, "")


@pytest.mark.thorough
@pytest.mark.parametrize("read", READING)
@pytest.mark.parametrize("how", RETYPING)
async def test_a_column_retyped_since_its_snapshot_is_not_read(
    database: Database, dsn: str, read: Callable[[str, Table, str], Awaitable[None]], how: str
) -> None:
    table = await described(database)
    async with exported(database) as snapshot:
        database.execute(*RETYPING[how])
        await of_the_table(read(dsn, table, snapshot))


@pytest.mark.thorough
@pytest.mark.parametrize("read", [export, whole, chunk, key_range])
async def test_a_type_that_is_known_is_read_as_a_text(
    database: Database, dsn: str, read: Callable[[str, Table, str], Awaitable[None]]
) -> None:
    """A column of another role's type does not stop the table, and its casts are not called."""
    database.execute("ALTER TABLE t ADD COLUMN own of_note NOT NULL DEFAULT 'a'")
    table = await described(database)
    async with exported(database) as snapshot:
        await read(dsn, table, snapshot)


async def test_another_column_of_the_same_name_and_type_is_not_read(
    database: Database, dsn: str
) -> None:
    """The snapshot sees its rows with the new column's default instead of their values."""
    table = await described(database)
    async with exported(database) as snapshot:
        database.execute(
            "ALTER TABLE t RENAME note TO note0",
            "ALTER TABLE t ADD COLUMN note text NOT NULL DEFAULT 'another'",
        )
        with pytest.raises(TableChangedError, match="column 'note' was replaced"):
            await export(dsn, table, snapshot)


async def of_the_table(reading: Awaitable[None]) -> None:
    """Take what a table is stopped or read again for; the connection's own faults are raised."""
    try:
        await reading
    except TableError:
        return
    except psycopg.Error as error:
        assert error.sqlstate in {"42P01", "55000"}, error  # noqa: PT017 - of any reader


async def await_a_waiter(database: Database, reading: asyncio.Task[None]) -> None:
    def waits() -> bool:
        return reading.done() or bool(
            database.value(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
                " AND wait_event_type = 'Lock'",
                database.name,
            )
        )

    await asyncio.to_thread(await_until, waits, LIMIT_S, "a reader to wait for the lock")
