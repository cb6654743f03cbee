"""What every ReferenceSink must do (ports.ReferenceSink), on the fake and on Delta."""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from ingestd.lake.delta.read import read_files
from ingestd.lake.layout import Layout
from ingestd.lake.reference.table import DeltaReferenceTable
from ingestd.lake.store.local_store import LocalStore
from ingestd.model.errors import OperatorError, TransientError
from ingestd.model.schema import TIMESTAMP_NTZ, TableId
from ingestd.testing.fakes.reference import FakeReferenceLake, FakeReferenceSink
from tests.contract.test_page_sink import NotedFsync

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from ingestd.ports import ReferenceSink

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
CHANGES = pa.schema(
    [
        *SCHEMA,
        ("_cdc_op", pa.string()),
        ("_cdc_unchanged", pa.list_(pa.string())),
        ("_cdc_before", pa.struct([("id", pa.int64())])),
    ]
)
NAME = TableId("public", "Größe x")
Rows = list[dict[str, Any]]


class World(Protocol):
    """One reference table."""

    def sink(self) -> ReferenceSink: ...

    def versions(self) -> list[Rows]:
        """The rows of every version."""


class FakeWorld:
    def __init__(self) -> None:
        self._lake = FakeReferenceLake()

    def sink(self) -> ReferenceSink:
        return FakeReferenceSink(self._lake)

    def versions(self) -> list[Rows]:
        return self._lake.versions


class DeltaWorld:
    def __init__(self, lake: Path) -> None:
        self.lake = lake
        self.path = lake / Layout("shop").reference(NAME)

    def sink(
        self, step: Callable[[str], None] = lambda _: None, **more: Any
    ) -> DeltaReferenceTable:
        return DeltaReferenceTable(str(self.lake), "shop", NAME, file_bytes=4000, step=step, **more)

    def versions(self) -> list[Rows]:
        newest = DeltaTable(self.path).version()
        return [self.at(version) for version in range(newest + 1)]

    def at(self, version: int | None = None) -> Rows:
        store, handle = LocalStore(self.lake, NotedFsync()), DeltaTable(self.path, version=version)
        found: Rows = read_files(handle, store, Layout("shop").reference(NAME)).to_pylist()
        return found

    def left(self) -> set[str]:
        """Files that no version names."""
        handle = DeltaTable(self.path)
        named = {
            path.rpartition("/")[2]
            for version in range(handle.version() + 1)
            for path in DeltaTable(self.path, version=version).file_uris()
        }
        return {p.name for p in self.path.glob("*.parquet")} - named


@pytest.fixture(params=["fake", "delta"])
def world(request: pytest.FixtureRequest, lake: Path) -> World:
    return FakeWorld() if request.param == "fake" else DeltaWorld(lake)


@pytest.fixture
def delta(lake: Path) -> DeltaWorld:
    return DeltaWorld(lake)


def rows(ids: range, tag: str = "row") -> Rows:
    return [{"id": i, "name": f"{tag} {i}"} for i in ids]


def by_id(found: Rows) -> Rows:
    return sorted(found, key=lambda r: r["id"])


async def given(found: Rows, schema: pa.Schema = SCHEMA) -> AsyncIterator[pa.RecordBatch]:
    yield pa.RecordBatch.from_pylist([], schema)
    for start in range(0, len(found), 100):
        await asyncio.sleep(0)
        yield pa.RecordBatch.from_pylist(found[start : start + 100], schema)


def changes(found: Rows) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"_cdc_op": "u", **row} for row in found], CHANGES)


async def loaded(world: World, found: Rows, position: int | None = 1) -> ReferenceSink:
    sink = world.sink()
    assert await sink.open() is None
    await sink.replace(given(found), position=position)
    return sink


async def test_an_empty_table_exists_with_its_columns(world: World) -> None:
    sink = world.sink()
    state = await sink.replace(given([]))
    assert (state.version, state.rows, state.is_new) == (0, 0, True)
    assert state.schema.names == ["id", "name"]
    assert world.versions() == [[]]
    await sink.close()


async def test_every_version_is_whole(world: World) -> None:
    sink = await loaded(world, rows(range(1000)))
    await sink.replace(given(rows(range(500, 2000), "new")), position=2)
    assert list(map(by_id, world.versions())) == [
        rows(range(1000)),
        rows(range(500, 2000), "new"),
    ]
    await sink.close()
    again = await world.sink().open()
    assert again is not None
    assert (again.version, again.rows, again.position) == (1, 1500, 2)


async def test_nothing_is_written_for_the_same_rows(world: World) -> None:
    found = rows(range(300))
    sink = await loaded(world, found, None)
    state = await sink.replace(given(list(reversed(found))))
    assert (state.version, state.is_new) == (0, False)
    state = await world.sink().replace(given(found))
    assert not state.is_new
    state = await sink.replace(given([*found, found[0]]))
    assert (state.version, state.is_new) == (1, True)
    await sink.close()


async def test_nothing_is_written_if_the_source_fails(world: World) -> None:
    sink = await loaded(world, rows(range(10)))

    async def failing() -> AsyncIterator[pa.RecordBatch]:
        async for batch in given(rows(range(1000))):
            yield batch
        raise TransientError("gone", reason="connection_lost")

    with pytest.raises(TransientError, match="gone"):
        await sink.replace(failing(), position=2)
    assert world.versions() == [rows(range(10))]
    assert not isinstance(world, DeltaWorld) or not world.left()


async def test_columns_change_with_the_rows(world: World) -> None:
    sink = await loaded(world, rows(range(3)), None)
    local = pa.schema([("id", pa.string()), ("at", TIMESTAMP_NTZ)])
    at = dt.datetime(2026, 1, 1)  # noqa: DTZ001 - has none
    state = await sink.replace(given([{"id": "a", "at": at}], local))
    assert state.schema.names == ["id", "at"]
    assert world.versions()[-1] == [{"id": "a", "at": at}]
    state = await sink.replace(given(rows(range(3))))
    assert state.is_new
    assert by_id(world.versions()[-1]) == rows(range(3))


async def test_columns_that_swap_their_names_are_each_their_own(world: World) -> None:
    """And back: in the source's order all is as before."""
    ordered = pa.schema([("id", pa.int64()), ("a", pa.string()), ("b", pa.string())])
    swapped = pa.schema([ordered.field(n) for n in ("id", "b", "a")])
    before, after = {"id": 1, "a": "x", "b": "y"}, {"id": 1, "b": "x", "a": "y"}
    sink = await loaded(world, [])
    for schema, row in ((ordered, before), (swapped, after), (ordered, before), (swapped, after)):
        state = await sink.replace(given([row], schema))
        assert state.is_new
        assert world.versions()[-1] == [row]
    state = await sink.replace(given([after], ordered))
    assert not state.is_new
    await sink.close()


async def test_struct_fields_with_swapped_names_keep_their_values(world: World) -> None:
    def schema(*names: str) -> pa.Schema:
        struct = pa.struct([(name, pa.string()) for name in names])
        return pa.schema([("id", pa.int64()), ("s", struct), ("l", pa.list_(struct))])

    def row(i: int, **fields: str) -> dict[str, Any]:
        return {"id": i, "s": fields, "l": [fields, None]}

    ordered, swapped = schema("a", "b"), schema("b", "a")
    before, after = row(1, a="x", b="y"), row(1, b="x", a="y")
    sink = await loaded(world, [])
    for own, found in ((ordered, before), (swapped, after), (ordered, before), (swapped, after)):
        state = await sink.replace(given([found], own), position=1)
        assert state.is_new
        assert world.versions()[-1] == [found]
    for own in (swapped, ordered):
        assert not (await sink.replace(given([after], own))).is_new
    for position, own, i in ((2, swapped, 2), (3, ordered, 1)):
        rest = {"_cdc_op": "u", "_cdc_unchanged": ["l"] if i == 1 else None}
        fields = [*own, *(CHANGES.field(name) for name in rest)]
        change = {**row(i, a="new", b="er"), **rest}
        batch = pa.RecordBatch.from_pylist([change], schema=pa.schema(fields))
        await sink.merge(batch, ["id"], position=position)
    kept = {**row(1, a="new", b="er"), "l": after["l"]}
    assert by_id(world.versions()[-1]) == [kept, row(2, a="new", b="er")]
    await sink.close()


async def test_changes_have_their_columns_in_any_order(world: World) -> None:
    sink = await loaded(world, rows(range(3)))
    found = changes([{"id": 1, "name": "new"}, {"id": 7, "name": "more"}])
    order = [*reversed(SCHEMA.names), *CHANGES.names[len(SCHEMA) :]]
    await sink.merge(found.select(order), ["id"], position=2)
    assert by_id(world.versions()[-1]) == [
        *({"id": 0, "name": "row 0"}, {"id": 1, "name": "new"}),
        *({"id": 2, "name": "row 2"}, {"id": 7, "name": "more"}),
    ]
    await sink.close()


async def test_changes_are_one_version(world: World) -> None:
    sink = await loaded(world, rows(range(1000)))
    state = await sink.merge(
        changes(
            [
                {"id": 5, "name": "five"},
                {"id": 6, "_cdc_op": "d"},
                {"id": 2000, "name": "new"},
                {"id": 3000, "_cdc_op": "d"},
            ]
        ),
        ["id"],
        position=2,
    )
    assert (state.rows, state.position, state.is_new) == (1000, 2, True)
    expected = {r["id"]: r for r in rows(range(1000))}
    expected |= {5: {"id": 5, "name": "five"}, 2000: {"id": 2000, "name": "new"}}
    del expected[6]
    assert by_id(world.versions()[-1]) == by_id(list(expected.values()))
    assert by_id(world.versions()[0]) == rows(range(1000))


async def test_exactly_once_by_the_position(world: World) -> None:
    sink = await loaded(world, rows(range(3)))
    await sink.merge(changes([{"id": 1, "name": "a"}]), ["id"], position=5)
    again = world.sink()
    await again.open()
    for position in (4, 5):
        state = await again.merge(changes([{"id": 1, "name": "b"}]), ["id"], position=position)
        assert not state.is_new
    assert by_id(world.versions()[-1])[1] == {"id": 1, "name": "a"}


async def test_values_that_stay_come_from_the_row_before(world: World) -> None:
    sink = await loaded(world, rows(range(10)))
    await sink.merge(
        changes(
            [
                {"id": 1, "_cdc_unchanged": ["name"]},
                {"id": 2, "_cdc_op": "d"},
                {"id": 20, "_cdc_unchanged": ["name"], "_cdc_before": {"id": 2}},
                {"id": 3, "_cdc_unchanged": ["name"], "_cdc_before": {"id": 4}},
                {"id": 4, "_cdc_unchanged": ["name"], "_cdc_before": {"id": 3}},
            ]
        ),
        ["id"],
        position=2,
    )
    found = {r["id"]: r["name"] for r in world.versions()[-1]}
    assert found == {
        **{i: f"row {i}" for i in range(10) if i != 2},
        20: "row 2",
        3: "row 4",
        4: "row 3",
    }


async def test_a_missing_row_is_reported(world: World) -> None:
    sink = await loaded(world, rows(range(3)))
    with pytest.raises(TransientError) as raised:
        await sink.merge(changes([{"id": 9, "_cdc_unchanged": ["name"]}]), ["id"], position=2)
    assert raised.value.reason == "row_missing"
    assert len(world.versions()) == 1


async def test_other_columns_are_refused(world: World) -> None:
    sink = await loaded(world, rows(range(3)))
    other = pa.RecordBatch.from_pylist(
        [{"id": 1, "_cdc_op": "u"}], pa.schema([("id", pa.int64()), ("_cdc_op", pa.string())])
    )
    with pytest.raises(ValueError, match="columns"):
        await sink.merge(other, ["id"], position=2)


# --- on Delta --------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["write", "commit", "committed"])
@pytest.mark.parametrize("call", ["load", "replace", "merge"])
async def test_a_kill_leaves_the_version_of_before_or_after(
    delta: DeltaWorld, call: str, step: str
) -> None:
    if call != "load":
        await loaded(delta, rows(range(500)))

    def kill(at: str) -> None:
        if at == step:
            raise OperatorError("killed")

    sink = delta.sink(kill)
    await sink.open()
    work = (
        sink.merge(changes([{"id": 7, "name": "x"}]), ["id"], position=2)
        if call == "merge"
        else sink.replace(given(rows(range(200), "new")), position=2)
    )
    with pytest.raises(OperatorError, match="killed"):
        await work
    is_done = step == "committed"
    state = await delta.sink().open()
    if call == "load" and not is_done:
        assert state is None
        return
    before = rows(range(500))
    after = rows(range(200), "new")
    if call == "merge":
        after = [{"id": 7, "name": "x"} if r["id"] == 7 else r for r in before]
    assert state is not None
    assert by_id(delta.at()) == (after if is_done else before)
    assert state.position == (2 if is_done else 1)


@pytest.mark.parametrize("step", ["write", "commit", "committed"])
async def test_a_cancelled_load_leaves_nothing_or_all(delta: DeltaWorld, step: str) -> None:
    loop = asyncio.get_running_loop()

    def cancel(at: str) -> None:
        if at == step:
            loop.call_soon_threadsafe(task.cancel)

    sink = delta.sink(cancel)
    await sink.open()
    task = asyncio.create_task(sink.replace(given(rows(range(5000)))))
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    await sink.close()
    state = await delta.sink().open()
    assert state is None or by_id(delta.at()) == rows(range(5000))


async def test_what_is_committed_is_durable(lake: Path) -> None:
    noted = NotedFsync()
    table = DeltaReferenceTable(str(lake), "shop", NAME, durability=noted)
    await table.replace(given(rows(range(100))), position=1)
    await table.merge(changes([{"id": 7, "name": "x"}]), ["id"], position=2)
    folder = lake / Layout("shop").reference(NAME)
    synced = {path.resolve() for path in noted.done}
    files = {*folder.glob("*.parquet"), *folder.glob("_delta_log/*.json")}
    assert {f.resolve() for f in files} <= synced


async def test_another_writer_is_refused(delta: DeltaWorld) -> None:
    sink = await loaded(delta, rows(range(100)))
    other = delta.sink()
    await other.open()
    await other.merge(changes([{"id": 1, "name": "other"}]), ["id"], position=2)
    with pytest.raises(OperatorError, match="another writer"):
        await sink.merge(changes([{"id": 2, "name": "mine"}]), ["id"], position=3)
    assert by_id(delta.at())[:3] == [
        {"id": 0, "name": "row 0"},
        {"id": 1, "name": "other"},
        {"id": 2, "name": "row 2"},
    ]


async def test_compaction_between_is_no_conflict(delta: DeltaWorld) -> None:
    sink = await loaded(delta, rows(range(1990)))
    for number in range(10):
        await sink.merge(
            changes(rows(range(1990 + number, 1991 + number))), ["id"], position=2 + number
        )
    DeltaTable(delta.path).optimize.compact()
    with pytest.raises(TransientError, match="meanwhile"):
        await sink.merge(changes([{"id": 2, "name": "mine"}]), ["id"], position=30)
    await sink.open()
    await sink.merge(changes([{"id": 2, "name": "mine"}]), ["id"], position=30)
    expected = rows(range(2000))
    expected[2]["name"] = "mine"
    assert by_id(delta.at()) == expected


async def test_small_files_are_joined(delta: DeltaWorld) -> None:
    sink = await loaded(delta, rows(range(5)))
    for number in range(40):
        await sink.merge(changes([{"id": 100 + number, "name": "n"}]), ["id"], position=number + 2)
    assert len(DeltaTable(delta.path).file_uris()) < 20
    assert len(delta.at()) == 45


@pytest.mark.parametrize("key", [["a"], ["a", "b"], ["b"]])
async def test_names_and_keys_of_any_kind(lake: Path, key: Sequence[str]) -> None:
    names = {"a": "Größe `x`.y", "b": "select"}
    schema = pa.schema(
        [(names["a"], pa.string()), (names["b"], pa.decimal128(10, 2)), ("v", pa.list_(pa.int32()))]
    )
    columns = [names[k] for k in key]
    table = DeltaReferenceTable(str(lake), "shop", NAME)
    found = [{names["a"]: f"k{i}", names["b"]: i, "v": [i, None]} for i in range(50)]
    await table.replace(given(found, schema), position=1)
    wanted = schema.append(pa.field("_cdc_op", pa.string()))
    batch = pa.RecordBatch.from_pylist(
        [{**found[3], "v": None, "_cdc_op": "u"}, {**found[4], "_cdc_op": "d"}], wanted
    )
    state = await table.merge(batch, columns, position=2)
    assert state.rows == 49
    after = {r[names["a"]]: r["v"] for r in DeltaWorld(lake).at()}
    assert after["k3"] is None
    assert "k4" not in after
    assert after["k5"] == [5, None]


async def test_old_files_are_removed_in_time(delta: DeltaWorld) -> None:
    sink = delta.sink(retention="interval 0 seconds", vacuum_interval_s=-1.0)
    assert await sink.open() is None
    await sink.replace(given(rows(range(300))), position=1)
    for number in range(3):
        await sink.replace(given(rows(range(300), f"v{number}")), position=2 + number)
        await sink.merge(changes([{"id": 300, "name": "x"}]), ["id"], position=2 + number)
    assert by_id(delta.at()) == rows(range(300), "v2")
    assert len(list(delta.path.glob("*.parquet"))) == len(DeltaTable(delta.path).file_uris())
    state = await delta.sink().open()
    assert state is not None
    assert state.position == 4
