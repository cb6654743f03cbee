"""What every ReferenceTableSource must do: the fake, a table read by COPY, a raw table."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
import pytest

from ingestd.lake.reference.source import RawReferenceSource
from ingestd.model.errors import IngestdError, TransientError
from ingestd.model.row_checks import UNLIMITED_BYTES
from ingestd.postgres.reference_copy import CopiedReferenceSource
from ingestd.postgres.settings import SETTINGS
from ingestd.testing.fakes.reference import FakeReferenceTable, FakeReferenceTableSource
from tests.contract.conftest import NAME, make_table
from tests.harness.change_log import ChangeLogWriter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from ingestd.ports import ReferenceTableSource
    from tests.harness.databases import Database


class Reference(Protocol):
    """A table (id, name) to be read as a reference table.

    `sees_changes`: `poll_changes` returns them; else only another snapshot shows them.
    """

    sees_changes: bool

    async def upsert(self, row: dict[str, Any]) -> None: ...

    async def delete(self, row: dict[str, Any]) -> None: ...

    async def truncate(self) -> None: ...

    def source(self) -> ReferenceTableSource:
        """A new source, which begins with the snapshot."""

    def fault(self) -> AbstractContextManager[None]:
        """Have what is being read fail, once or while this lasts."""


class FakeReference:
    sees_changes = True

    def __init__(self) -> None:
        self._table = FakeReferenceTable(make_table(1))

    async def upsert(self, row: dict[str, Any]) -> None:
        self._table.upsert(row)

    async def delete(self, row: dict[str, Any]) -> None:
        self._table.delete(row)

    async def truncate(self) -> None:
        self._table.truncate()

    def source(self) -> ReferenceTableSource:
        return FakeReferenceTableSource(self._table)

    @contextmanager
    def fault(self) -> Iterator[None]:
        self._table.faults.append(TransientError("gone", reason="connection_lost"))
        yield


class CopiedReference:
    """A table on a server, of a source of some kind."""

    sees_changes = False

    def __init__(self, database: Database, kind: str) -> None:
        self._database = database
        model = SETTINGS[kind]
        section = {"kind": kind, "dsn": database.dsn, "tables": [str(NAME)]}
        self._settings = model.model_validate({**model.defaults("shop"), **section})
        database.execute('CREATE TABLE "Größe x" (id bigint PRIMARY KEY, name text)')

    async def upsert(self, row: dict[str, Any]) -> None:
        with self._database.connect() as connection:
            connection.execute(
                """INSERT INTO "Größe x" VALUES (%s, %s)
                       ON CONFLICT (id) DO UPDATE SET name = excluded.name""",
                [row["id"], row["name"]],
            )

    async def delete(self, row: dict[str, Any]) -> None:
        with self._database.connect() as connection:
            connection.execute('DELETE FROM "Größe x" WHERE id = %s', [row["id"]])

    async def truncate(self) -> None:
        self._database.execute('TRUNCATE "Größe x"')

    def source(self) -> ReferenceTableSource:
        return CopiedReferenceSource("shop", self._settings, NAME, row_limit_bytes=UNLIMITED_BYTES)

    @contextmanager
    def fault(self) -> Iterator[None]:
        with psycopg.connect(self._database.dsn, autocommit=True) as connection:
            connection.execute(
                """SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
                    WHERE datname = current_database() AND pid <> pg_backend_pid()"""
            )
        yield


class RawReference:
    """A raw table, each change an epoch of its own."""

    sees_changes = True

    def __init__(self, lake: Path, memory_bytes: int) -> None:
        self._lake = lake
        self._memory_bytes = memory_bytes
        self._log = ChangeLogWriter(lake, make_table(1))

    async def upsert(self, row: dict[str, Any]) -> None:
        await self._log.epoch([("u", row)])

    async def delete(self, row: dict[str, Any]) -> None:
        await self._log.epoch([("d", row)])

    async def truncate(self) -> None:
        await self._log.epoch([("t", {})])

    async def begin(self) -> None:
        await self._log.begin()

    def source(self) -> ReferenceTableSource:
        return RawReferenceSource(
            str(self._lake), "shop", NAME, memory_bytes=self._memory_bytes, batch_rows=2
        )

    @contextmanager
    def fault(self) -> Iterator[None]:
        found = [p for p in self._lake.rglob("*.parquet") if "_delta_log" not in p.parts]
        for path in found:
            path.rename(path.with_suffix(".away"))
        try:
            yield
        finally:
            for path in found:
                path.with_suffix(".away").rename(path)


@pytest.fixture(params=["fake", "wal", "polling", "raw", "raw in shares"])
async def reference(request: pytest.FixtureRequest) -> Reference:
    if request.param == "fake":
        return FakeReference()
    if request.param.startswith("raw"):
        memory_bytes = 1 << 26 if request.param == "raw" else 20_000
        raw = RawReference(request.getfixturevalue("lake"), memory_bytes)
        await raw.begin()
        return raw
    return CopiedReference(request.getfixturevalue("database"), request.param)


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": i, "name": f"row {i}"} for i in range(count)]


def by_id(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda row: row["id"])


async def drain(source: ReferenceTableSource) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while (batch := await source.poll_snapshot()) is not None:
        assert batch.schema.names == ["id", "name"]
        found += batch.to_pylist()
    return found


def fold(current: list[dict[str, Any]], changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    held = {row["id"]: row for row in current}
    for change in changes:
        if change["_cdc_op"] == "d":
            held.pop(change["id"], None)
        else:
            assert not change.get("_cdc_unchanged")
            held[change["id"]] = {n: v for n, v in change.items() if not n.startswith("_cdc_")}
    return by_id(list(held.values()))


async def current_rows(
    reference: Reference, source: ReferenceTableSource, found: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the changes; re-read the table where the source sees none."""
    changes = await source.poll_changes()
    assert changes is not None
    if not reference.sees_changes:
        assert changes.num_rows == 0
        again = reference.source()
        found = await drain(again)
        await again.close()
    return fold(found, changes.to_pylist())


async def test_exactly_once_every_row_then_none_for_good(reference: Reference) -> None:
    for row in rows(7):
        await reference.upsert(row)
    source = reference.source()
    assert by_id(await drain(source)) == rows(7)
    assert source.is_snapshot_complete()
    assert await source.poll_snapshot() is None
    await reference.upsert({"id": 100, "name": "late"})
    assert await source.poll_snapshot() is None
    await source.close()


async def test_an_empty_poll_is_not_completion(reference: Reference) -> None:
    for row in rows(3):
        await reference.upsert(row)
    source = reference.source()
    first = await source.poll_snapshot()
    assert first is not None
    assert not source.is_snapshot_complete()
    assert by_id(first.to_pylist() + await drain(source)) == rows(3)
    await source.close()


async def test_an_error_is_not_the_end_of_a_snapshot(reference: Reference) -> None:
    for row in rows(7):
        await reference.upsert(row)
    source = reference.source()
    first = await source.poll_snapshot()
    assert first is not None
    found = first.to_pylist()
    with reference.fault(), pytest.raises(IngestdError):
        await drain(source)
    assert not source.is_snapshot_complete()
    kept = source.checkpoint()
    try:
        found += await drain(source)
    except TransientError:
        with pytest.raises(TransientError) as again:
            await source.poll_snapshot()
        assert again.value.reason == "snapshot_gone"
        assert not source.is_snapshot_complete()
        await source.close()
        source = reference.source()
        assert not source.restore(kept), "what was given would come twice"
        found = await drain(source)
    assert by_id(found) == rows(7)
    assert source.is_snapshot_complete()
    await source.close()


async def test_an_empty_table_completes_and_tells_its_columns(reference: Reference) -> None:
    source = reference.source()
    first = await source.poll_snapshot()
    assert first is not None
    assert [str(f.type) for f in first.schema] == ["int64", "string"]
    assert await drain(source) == []
    assert source.is_snapshot_complete()
    await source.close()


async def test_no_changes_before_the_snapshot_is_complete(reference: Reference) -> None:
    for row in rows(3):
        await reference.upsert(row)
    source = reference.source()
    assert await source.poll_changes() is None
    await source.poll_snapshot()
    assert await source.poll_changes() is None
    await source.close()


async def test_changes_made_during_the_snapshot_are_not_lost(reference: Reference) -> None:
    for row in rows(5):
        await reference.upsert(row)
    source = reference.source()
    first = await source.poll_snapshot()
    assert first is not None
    await reference.upsert({"id": 1, "name": "changed"})
    await reference.delete({"id": 4})
    await reference.upsert({"id": 9, "name": "new"})
    current = first.to_pylist() + await drain(source)
    assert await current_rows(reference, source, current) == [
        {"id": 0, "name": "row 0"},
        {"id": 1, "name": "changed"},
        {"id": 2, "name": "row 2"},
        {"id": 3, "name": "row 3"},
        {"id": 9, "name": "new"},
    ]
    await source.close()


async def test_a_snapshot_is_the_table_at_one_moment(reference: Reference) -> None:
    for row in rows(6):
        await reference.upsert(row)
    source = reference.source()
    found: list[dict[str, Any]] = []
    for number in range(3):
        batch = await source.poll_snapshot()
        found += [] if batch is None else batch.to_pylist()
        if batch is not None and number:
            await reference.delete({"id": 5 - number})
            await reference.upsert({"id": 20 + number, "name": "later"})
    found += await drain(source)
    assert by_id(found) == rows(6)
    await source.close()


async def test_exactly_once_each_change_one_row_a_key(reference: Reference) -> None:
    source = reference.source()
    await drain(source)
    before = source.position
    await reference.upsert({"id": 1, "name": "a"})
    await reference.upsert({"id": 1, "name": "b"})
    first = await source.poll_changes()
    moved = source.position
    second = await source.poll_changes()
    assert first is not None
    assert second is not None
    assert second.num_rows == 0
    assert source.position == moved
    if reference.sees_changes:
        assert [(r["name"], r["_cdc_op"]) for r in first.to_pylist()] == [("b", "u")]
        assert moved > before
        assert list(source.key) == ["id"]
    await source.close()


async def test_a_truncate_voids_the_snapshot(reference: Reference) -> None:
    for row in rows(3):
        await reference.upsert(row)
    source = reference.source()
    await drain(source)
    await reference.truncate()
    await reference.upsert({"id": 7, "name": "after"})
    changes = await source.poll_changes()
    if not reference.sees_changes:
        await source.close()
        return
    assert changes is None
    assert not source.is_snapshot_complete()
    assert await drain(source) == [{"id": 7, "name": "after"}]
    last = await source.poll_changes()
    assert last is not None
    assert last.num_rows == 0
    await source.close()


@pytest.mark.thorough
@pytest.mark.parametrize("polls", range(5))
async def test_exactly_once_over_a_restart_at_any_checkpoint(
    reference: Reference, polls: int
) -> None:
    for row in rows(6):
        await reference.upsert(row)
    before = reference.source()
    found: list[dict[str, Any]] = []
    for _ in range(polls):
        batch = await before.poll_snapshot()
        found += [] if batch is None else batch.to_pylist()
    kept = before.checkpoint()
    assert before.checkpoint() == kept, "checkpoint changed something"
    await before.close()
    await reference.upsert({"id": 50, "name": "meanwhile"})
    after = reference.source()
    if not after.restore(kept):
        found = []
    found += await drain(after)
    assert len({row["id"] for row in found}) == len(found), "a row came twice"
    if reference.sees_changes:
        expected = [*rows(6), {"id": 50, "name": "meanwhile"}]
        assert await current_rows(reference, after, found) == expected
    elif polls < 3:  # re-read in full
        assert by_id(found) == [*rows(6), {"id": 50, "name": "meanwhile"}]
    await after.close()
    await after.close()
