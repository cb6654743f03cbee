"""A table to be read, in memory and on a server."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from ingestd.decode.type_mapping import lake_type
from ingestd.model.row_checks import UNLIMITED_BYTES
from ingestd.model.schema import Column, Table, TableId
from ingestd.postgres.connection.session import connect
from ingestd.postgres.snapshot.ctid_splits import CtidSplits
from ingestd.postgres.snapshot.external_reader import CopyPageSource
from ingestd.postgres.snapshot.key_splits import KeySplits
from ingestd.testing.fakes.tables import FakePageSource, FakeSplitManager, FakeTables

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from ingestd.model.predicates import Predicate
    from ingestd.ports import PageSource, Split, SplitManager
    from tests.harness.databases import Database

NAME = TableId("public", "Größe x")


class TableWorld(Protocol):
    """One table (id bigint, name text) and what reads it."""

    table: Table

    def insert(self, ids: range) -> None:
        """Add a row for each id; its name is ``row <id>``, null for multiples of 7."""

    def clear(self) -> None: ...

    def snapshot(self) -> AbstractAsyncContextManager[str]:
        """Export a snapshot of now, good inside the context."""

    def splits(self) -> SplitManager: ...

    def page_source(
        self,
        split: Split,
        columns: Sequence[str] | None = None,
        predicates: Sequence[Predicate] = (),
    ) -> PageSource: ...


def make_table(oid: int) -> Table:
    columns = [("id", 20, "bigint"), ("name", 25, "text")]
    return Table(
        NAME,
        oid,
        tuple(Column(n, type_oid, -1, lake_type(type_oid, -1), p) for n, type_oid, p in columns),
        key=("id",),
        before=("id",),
    )


class FakeWorld:
    def __init__(self) -> None:
        self.table = make_table(1)
        self._tables = FakeTables()

    def insert(self, ids: range) -> None:
        rows = [{"id": i, "name": f"row {i}" if i % 7 else None} for i in ids]
        self._tables.insert(NAME, rows)

    def clear(self) -> None:
        self._tables.delete_all(NAME)

    @asynccontextmanager
    async def snapshot(self) -> AsyncGenerator[str, None]:
        name = self._tables.export_snapshot()
        yield name
        self._tables.end_snapshot(name)

    def splits(self) -> SplitManager:
        return FakeSplitManager(self._tables)

    def page_source(
        self,
        split: Split,
        columns: Sequence[str] | None = None,
        predicates: Sequence[Predicate] = (),
    ) -> PageSource:
        return FakePageSource(self._tables, split, columns, predicates)


class PostgresWorld:
    """Cut by blocks, or by the key."""

    def __init__(
        self, database: Database, manager: Callable[[str], SplitManager] = CtidSplits
    ) -> None:
        self._database = database
        self._manager = manager
        database.execute('CREATE TABLE "Größe x" (id bigint PRIMARY KEY, name text)')
        self.table = make_table(database.value("""SELECT '"Größe x"'::regclass::oid::int8"""))

    def insert(self, ids: range) -> None:
        self._database.execute(
            f"""INSERT INTO "Größe x" SELECT i, CASE WHEN i % 7 > 0 THEN 'row ' || i END
                  FROM generate_series({ids.start}, {ids.stop - 1}) i"""
        )

    def clear(self) -> None:
        self._database.execute('DELETE FROM "Größe x"')

    @asynccontextmanager
    async def snapshot(self) -> AsyncGenerator[str, None]:
        async with exported_snapshot(self._database.dsn) as name:
            yield name

    def splits(self) -> SplitManager:
        return self._manager(self._database.dsn)

    def page_source(
        self,
        split: Split,
        columns: Sequence[str] | None = None,
        predicates: Sequence[Predicate] = (),
    ) -> PageSource:
        return CopyPageSource(
            self._database.dsn, split, columns, predicates, row_limit_bytes=UNLIMITED_BYTES
        )


@asynccontextmanager
async def exported_snapshot(dsn: str) -> AsyncGenerator[str, None]:
    async with await connect(dsn, autocommit=False) as connection:
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        row: Any = await (await connection.execute("SELECT pg_export_snapshot()")).fetchone()
        yield row[0]


@pytest.fixture(params=["fake", "blocks", "keys"])
def world(request: pytest.FixtureRequest) -> TableWorld:
    if request.param == "fake":
        return FakeWorld()
    manager = CtidSplits if request.param == "blocks" else KeySplits
    return PostgresWorld(request.getfixturevalue("database"), manager)
