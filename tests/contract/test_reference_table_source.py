"""The one implementation is the fake; a real one is one more parameter of `reference`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pytest

from ingestd.fakes.tables import FakeReferenceTable, FakeReferenceTableSource
from tests.contract.conftest import make_table

if TYPE_CHECKING:
    from ingestd.ports import ReferenceTableSource


class Reference(Protocol):
    """A table (id, name) to be read as a reference table."""

    def upsert(self, row: dict[str, object]) -> None: ...

    def delete(self, row: dict[str, object]) -> None: ...

    def source(self) -> ReferenceTableSource:
        """A new source, which begins with the snapshot."""


class FakeReference(FakeReferenceTable):
    def __init__(self) -> None:
        super().__init__(make_table(1))

    def source(self) -> ReferenceTableSource:
        return FakeReferenceTableSource(self)


@pytest.fixture(params=["fake"])
def reference(request: pytest.FixtureRequest) -> Reference:
    return {"fake": FakeReference}[request.param]()


def rows(count: int) -> list[dict[str, object]]:
    return [{"id": i, "name": f"row {i}"} for i in range(count)]


def by_id(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda row: row["id"])


async def drain(source: ReferenceTableSource) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while (batch := await source.poll_snapshot()) is not None:
        found += batch.to_pylist()
    return found


def fold(current: list[dict[str, Any]], changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    held = {row["id"]: row for row in current}
    for change in changes:
        op = change.pop("_cdc_op")
        if op == "d":
            held.pop(change["id"], None)
        else:
            held[change["id"]] = change
    return by_id(list(held.values()))


async def test_exactly_once_every_row_then_none_for_good(reference: Reference) -> None:
    for row in rows(7):
        reference.upsert(row)
    source = reference.source()
    assert by_id(await drain(source)) == rows(7)
    assert source.is_snapshot_complete()
    assert await source.poll_snapshot() is None
    reference.upsert({"id": 100, "name": "late"})
    assert await source.poll_snapshot() is None


async def test_an_empty_poll_is_not_completion(reference: Reference) -> None:
    for row in rows(3):
        reference.upsert(row)
    source = reference.source()
    first = await source.poll_snapshot()
    assert first is not None
    assert not source.is_snapshot_complete()
    assert by_id(first.to_pylist() + await drain(source)) == rows(3)


async def test_an_empty_table_completes(reference: Reference) -> None:
    source = reference.source()
    assert await drain(source) == []
    assert source.is_snapshot_complete()


async def test_no_changes_before_the_snapshot_is_complete(reference: Reference) -> None:
    for row in rows(3):
        reference.upsert(row)
    source = reference.source()
    assert await source.poll_changes() is None
    await source.poll_snapshot()
    assert await source.poll_changes() is None


async def test_changes_made_during_the_snapshot_are_not_lost(reference: Reference) -> None:
    for row in rows(5):
        reference.upsert(row)
    source = reference.source()
    first = await source.poll_snapshot()
    assert first is not None
    reference.upsert({"id": 1, "name": "changed"})
    reference.delete({"id": 4})
    reference.upsert({"id": 9, "name": "new"})
    current = first.to_pylist() + await drain(source)
    changes = await source.poll_changes()
    assert changes is not None
    assert fold(current, changes.to_pylist()) == [
        {"id": 0, "name": "row 0"},
        {"id": 1, "name": "changed"},
        {"id": 2, "name": "row 2"},
        {"id": 3, "name": "row 3"},
        {"id": 9, "name": "new"},
    ]


async def test_exactly_once_each_change(reference: Reference) -> None:
    source = reference.source()
    await drain(source)
    reference.upsert({"id": 1, "name": "a"})
    first = await source.poll_changes()
    second = await source.poll_changes()
    assert first is not None
    assert second is not None
    assert first.num_rows == 1
    assert second.num_rows == 0


@pytest.mark.parametrize("polls", range(5))
async def test_exactly_once_over_a_restart_at_any_checkpoint(
    reference: Reference, polls: int
) -> None:
    for row in rows(6):
        reference.upsert(row)
    before = reference.source()
    found: list[dict[str, Any]] = []
    for _ in range(polls):
        batch = await before.poll_snapshot()
        found += [] if batch is None else batch.to_pylist()
    kept = before.checkpoint()
    assert before.checkpoint() == kept, "checkpoint changed something"
    await before.close()
    reference.upsert({"id": 50, "name": "meanwhile"})
    after = reference.source()
    after.restore(kept)
    found += await drain(after)
    changes = await after.poll_changes()
    assert changes is not None
    assert len({row["id"] for row in found}) == len(found), "a row came twice"
    expected = [*rows(6), {"id": 50, "name": "meanwhile"}]
    assert fold(found, changes.to_pylist()) == expected
    await after.close()
    await after.close()
