"""What every Sink must do (ports.Sink, ports.EpochWriter), on the fake and on Delta."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from ingestd.lake.delta.read import read_raw
from ingestd.lake.delta_lake import DeltaLake
from ingestd.model.changes import TableBatch, marker_batch
from ingestd.model.errors import OperatorError, TableError, TransientError
from ingestd.model.lake_state import TableEvent, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Column, Table, TableId
from ingestd.ports import Sink
from ingestd.postgres.polling.keys.key_set import KeySet
from ingestd.testing.fakes.sink import MemoryDisk, MemoryLake
from tests.unit.lake.rows import AT, inserts, make_batch, make_table, summary

A = make_table("a", oid=1)
B = make_table("b", oid=2)
STEPS = ("public.a", "public.b", "_epochs")


class KilledError(Exception):
    """The process dies here."""


class Lake(Protocol):
    """One source's lake, opened by any number of sinks."""

    def sink(self, before_commit: Callable[[str], None] = ...) -> Sink: ...

    def rows(self, table: TableId) -> list[dict[str, Any]]: ...

    def epochs(self) -> list[dict[str, Any]]: ...

    def files(self) -> set[str]: ...

    def displace(self, table: TableId) -> None: ...

    def garble(self, table: TableId) -> None: ...

    def put_right(self, table: TableId) -> None: ...


@dataclass
class MemoryKind:
    disk: MemoryDisk

    def sink(self, before_commit: Callable[[str], None] = lambda _: None) -> Sink:
        return MemoryLake(self.disk, before_commit=before_commit)

    def rows(self, table: TableId) -> list[dict[str, Any]]:
        return list(self.disk.tables[table].rows().to_pylist())

    def epochs(self) -> list[dict[str, Any]]:
        return [
            {
                "epoch": e.epoch,
                "end_lsn": e.summary.end_lsn,
                "rows": sum(t.rows for t in e.tables),
                "tables": [(str(t.table), t.version, t.rows) for t in e.tables],
            }
            for e in self.disk.epochs
        ]

    def files(self) -> set[str]:
        return {str(t) for t in self.disk.tables}

    def displace(self, table: TableId) -> None:
        self.disk.damage.add(table)

    def garble(self, table: TableId) -> None:
        self.disk.damage.add(table)

    def put_right(self, table: TableId) -> None:
        self.disk.damage.discard(table)


@dataclass
class DeltaKind:
    root: Path

    def sink(self, before_commit: Callable[[str], None] = lambda _: None) -> Sink:
        return DeltaLake(str(self.root), "shop", before_commit=before_commit)

    def rows(self, table: TableId) -> list[dict[str, Any]]:
        return list(read_raw(str(self.root), "shop", table).to_pylist())

    def epochs(self) -> list[dict[str, Any]]:
        rows = sorted(_read(self.root / "shop" / "_epochs"), key=lambda r: r["epoch"])
        return [
            {
                "epoch": r["epoch"],
                "end_lsn": r["end_lsn"],
                "rows": r["rows"],
                "tables": [(t["table"], t["version"], t["rows"]) for t in r["tables"]],
            }
            for r in rows
        ]

    def files(self) -> set[str]:
        return {str(p) for p in self.root.rglob("*.parquet")}

    def _folder(self, table: TableId) -> Path:
        return self.root / "shop" / table.schema / table.name

    def displace(self, table: TableId) -> None:
        self._folder(table).rename(self.root / f"away_{table.name}")
        self._folder(table).write_text("a file in place of the folder")

    def garble(self, table: TableId) -> None:
        shutil.copytree(self._folder(table), self.root / f"away_{table.name}")
        for commit in (self._folder(table) / "_delta_log").glob("*.json"):
            commit.write_text("}{")

    def put_right(self, table: TableId) -> None:
        if self._folder(table).is_file():
            self._folder(table).unlink()
        else:
            shutil.rmtree(self._folder(table))
        (self.root / f"away_{table.name}").rename(self._folder(table))


def _read(folder: Path) -> list[dict[str, Any]]:
    parts = [pq.read_table(uri) for uri in DeltaTable(folder).file_uris()]
    return [row for part in parts for row in part.to_pylist()]


@pytest.fixture(params=["memory", "delta"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    return MemoryKind(MemoryDisk()) if request.param == "memory" else DeltaKind(tmp_path / "lake")


async def opened(lake: Lake, before_commit: Callable[[str], None] = lambda _: None) -> Sink:
    sink = lake.sink(before_commit)
    await sink.open()
    await sink.adopt("system-1")
    return sink


async def commit(sink: Sink, lsn: int, **ids: tuple[int, ...]) -> Any:
    writer = sink.begin_epoch()
    for name, values in ids.items():
        await writer.append_batch(inserts(make_table(name), lsn, *values))
    return await writer.commit(summary(lsn, lsn + 5))


def ids(lake: Lake, table: Table) -> list[int]:
    return sorted(row["id"] for row in lake.rows(table.id))


async def test_open_of_an_empty_lake_creates_nothing(lake: Lake) -> None:
    sink = lake.sink()
    committed = await sink.open()
    assert (committed.epoch, committed.position, committed.server_id) == (0, None, None)
    assert not committed.watermarks
    assert committed.floor is None
    assert not lake.files()
    await sink.close()
    await sink.close()


async def test_adopt_is_idempotent_and_can_change(lake: Lake) -> None:
    sink = await opened(lake)
    await sink.adopt("system-1")
    assert (await sink.open()).server_id == "system-1"
    await sink.adopt("system-2")
    committed = await sink.open()
    assert committed.server_id == "system-2"
    assert committed.position is None


async def test_epochs_have_no_gaps_and_list_versions_and_rows(lake: Lake) -> None:
    sink = await opened(lake)
    await commit(sink, 100, a=(1, 2), b=(1,))
    await commit(sink, 200, b=(2,))
    done = await commit(sink, 300, a=(3,))
    assert done.epoch == 3
    assert lake.epochs() == [
        {
            "epoch": 1,
            "end_lsn": 105,
            "rows": 3,
            "tables": [("public.a", 1, 2), ("public.b", 1, 1)],
        },
        {"epoch": 2, "end_lsn": 205, "rows": 1, "tables": [("public.b", 2, 1)]},
        {"epoch": 3, "end_lsn": 305, "rows": 1, "tables": [("public.a", 2, 1)]},
    ]
    assert [(r["id"], r["_cdc_epoch"]) for r in sorted(lake.rows(A.id), key=lambda r: r["id"])] == [
        (1, 1),
        (2, 1),
        (3, 3),
    ]
    committed = await lake.sink().open()
    assert committed.epoch == 3
    assert committed.position == 305
    assert committed.watermarks == {A.id: 305, B.id: 205}
    assert committed.floor == 305


async def test_the_next_epoch_fills_while_the_last_commits(lake: Lake) -> None:
    sink = await opened(lake)
    first = sink.begin_epoch()
    await first.append_batch(inserts(A, 100, 1))
    committing = asyncio.ensure_future(first.commit(summary(100, 105)))
    await asyncio.sleep(0)
    second = sink.begin_epoch()
    assert second.number == 2
    await second.append_batch(inserts(A, 200, 2))
    await second.commit(summary(200, 205))
    assert committing.done()
    assert [e["epoch"] for e in lake.epochs()] == [1, 2]


async def test_only_one_epoch_is_filled_at_a_time(lake: Lake) -> None:
    sink = await opened(lake)
    writer = sink.begin_epoch()
    with pytest.raises(RuntimeError):
        sink.begin_epoch()
    await writer.abort()
    assert sink.begin_epoch().number == 1


async def test_an_epoch_without_rows_is_not_committed(lake: Lake) -> None:
    sink = await opened(lake)
    with pytest.raises(ValueError, match="advance"):
        await sink.begin_epoch().commit(summary(100, 105))
    assert lake.epochs() == []


@pytest.mark.parametrize("step", STEPS)
async def test_exactly_once_after_a_kill_between_commits(lake: Lake, step: str) -> None:
    def die(at: str) -> None:
        if at == step:
            raise KilledError

    sink = await opened(lake)
    await commit(sink, 100, a=(1,), b=(1,))
    await sink.close()

    sink = await opened(lake, die)
    with pytest.raises(KilledError):
        await commit(sink, 200, a=(2, 3), b=(2,))
    await sink.close()

    sink = lake.sink()
    committed = await sink.open()
    assert committed.epoch == 1
    assert committed.position == 105
    above = {str(t) for t, mark in committed.watermarks.items() if mark > 105}
    assert above <= set(STEPS) - {step}
    if step == "_epochs":
        assert above == {"public.a", "public.b"}
    # The source sends the same again and, closing later this time, one transaction more.
    writer = sink.begin_epoch()
    assert writer.number == 2
    await writer.append_batch(inserts(A, 200, 2, 3))
    await writer.append_batch(inserts(B, 200, 2))
    await writer.append_batch(inserts(A, 300, 4))
    assert writer.rows == 4
    await writer.commit(summary(200, 305))
    assert ids(lake, A) == [1, 2, 3, 4]
    assert ids(lake, B) == [1, 2]
    last = lake.epochs()[-1]
    assert (last["epoch"], last["rows"]) == (2, 4)
    assert [(name, rows) for name, _, rows in last["tables"]] == [("public.a", 3), ("public.b", 1)]
    assert all(row["_cdc_epoch"] == 2 for row in lake.rows(A.id) if row["id"] > 1)


async def test_exactly_once_lists_a_table_that_the_lake_held_before(lake: Lake) -> None:
    def die(at: str) -> None:
        if at == "_epochs":
            raise KilledError

    sink = await opened(lake, die)
    with pytest.raises(KilledError):
        await commit(sink, 100, a=(1, 2))
    await sink.close()
    sink = lake.sink()
    committed = await sink.open()
    assert committed.position is None
    assert committed.watermarks == {A.id: 105}
    await commit(sink, 100, a=(1, 2))
    assert lake.epochs() == [
        {"epoch": 1, "end_lsn": 105, "rows": 2, "tables": [("public.a", 1, 2)]}
    ]
    assert ids(lake, A) == [1, 2]


@pytest.mark.parametrize(("end", "refused"), [(105, {A.id, B.id}), (205, {B.id}), (300, set())])
async def test_isolated_tables_beyond_the_servers_end_are_refused(
    lake: Lake, end: int, refused: set[TableId]
) -> None:
    """B has a row above its watermark. What is refused is not listed and accepts nothing."""
    c = make_table("c", oid=3)

    def die(at: str) -> None:
        if at == "_epochs":
            raise KilledError

    sink = await opened(lake)
    await commit(sink, 100, a=(1,), b=(1,))
    await sink.close()
    sink = await opened(lake, die)
    writer = sink.begin_epoch()
    await writer.append_batch(inserts(A, 200, 2))
    await writer.append_batch(inserts(B, 300, 2), from_snapshot=True)
    with pytest.raises(KilledError):
        await writer.commit(summary(200, 205))
    await sink.close()
    sink = lake.sink()
    committed = await sink.open()
    errors = sink.refuse_beyond(Lsn(end))
    found = committed.without(errors)
    assert errors.keys() == found.damaged.keys() == refused
    assert found.watermarks.keys() == found.unlisted.keys() == {A.id, B.id} - refused
    assert (found.floor or 0) <= end
    await sink.fence()
    writer = sink.begin_epoch()
    for table in (A, B):
        if table.id in refused:
            with pytest.raises(TableError):
                await writer.append_batch(inserts(table, 400, 3))
        else:
            await writer.append_batch(inserts(table, 400, 3))
    await writer.append_batch(inserts(c, 400, 1))
    await writer.commit(summary(400, 405))
    listed = [row[0] for row in lake.epochs()[-1]["tables"]]
    assert listed == sorted(str(table.id) for table in (A, B, c) if table.id not in refused)


async def test_first_epoch_covers_unlisted_rows_without_more_rows(
    lake: Lake,
) -> None:
    def die(at: str) -> None:
        if at == "_epochs":
            raise KilledError

    sink = await opened(lake)
    await commit(sink, 100, a=(1,))
    assert (await lake.sink().open()).unlisted == {}
    await sink.close()
    sink = await opened(lake, die)
    writer = sink.begin_epoch()
    await writer.append_batch(
        inserts(A, 300, 2, 3), from_snapshot=True
    )  # beyond the watermark to be
    with pytest.raises(KilledError):
        await writer.commit(summary(100, 205))
    await sink.close()
    sink = lake.sink()
    committed = await sink.open()
    assert committed.watermarks == {A.id: 205}
    assert committed.unlisted.keys() == {A.id}
    rows = committed.unlisted[A.id]
    assert (rows.first, rows.reach) == (300, 300)
    assert timedelta(0) <= rows.at - AT < timedelta(milliseconds=1)
    assert committed.floor == 300
    await sink.begin_epoch().commit(summary(300, 305))
    assert [(e["epoch"], e["tables"]) for e in lake.epochs()] == [
        (1, [("public.a", 1, 1)]),
        (2, [("public.a", 2, 2)]),
    ]
    assert (await lake.sink().open()).unlisted == {}


async def test_exactly_once_skips_below_the_watermark_alone(lake: Lake) -> None:
    def die(at: str) -> None:
        if at == "_epochs":
            raise KilledError

    sink = await opened(lake, die)
    with pytest.raises(KilledError):
        await commit(sink, 100, a=(1,))
    sink = lake.sink()
    await sink.open()
    # 105 is the watermark: a transaction may begin there.
    await commit(sink, 105, a=(9,))
    assert ids(lake, A) == [1, 9]


async def test_advance_is_durable_and_never_goes_back(lake: Lake) -> None:
    sink = await opened(lake)
    await sink.advance(Lsn(50))
    assert (await lake.sink().open()).position == 50
    await commit(sink, 100, a=(1,))
    assert (await lake.sink().open()).position == 105
    await sink.advance(Lsn(500))
    await sink.advance(Lsn(400))
    committed = await lake.sink().open()
    assert (committed.epoch, committed.position) == (1, 500)
    assert len(lake.epochs()) == 1


async def test_record_gives_the_last_state_and_counts_schema_versions(lake: Lake) -> None:
    sink = await opened(lake)
    wider = replace(A, columns=(*A.columns, Column("price", 701, -1, pa.float64())))
    point = Lsn(90)
    await sink.record(
        [
            TableEvent(A, TableState.SNAPSHOTTING, AT, Lsn(80)),
            TableEvent(A, TableState.LIVE, AT, point, point),
            TableEvent(B, TableState.STOPPED, AT, point, reason="no key"),
        ]
    )
    await sink.record([TableEvent(wider, TableState.LIVE, AT, Lsn(200), point)])
    committed = await lake.sink().open()
    assert committed.is_live(A.id)
    assert not committed.is_live(B.id)
    assert committed.tables[A.id].schema_version == 2
    assert committed.tables[A.id].snapshot_lsn == point
    assert committed.tables[B.id].schema_version == 1
    assert committed.tables[B.id].reason == "no key"


async def test_one_writer_the_loser_raises(lake: Lake) -> None:
    first, second = await opened(lake), lake.sink()
    await commit(first, 100, a=(1,))
    await second.open()
    await commit(first, 200, a=(2,))
    with pytest.raises(OperatorError, match="another writer"):
        await commit(second, 200, a=(2,))
    assert ids(lake, A) == [1, 2]


async def test_one_writer_the_loser_adds_no_rows_to_a_new_table(
    lake: Lake,
) -> None:
    first, second = await opened(lake), lake.sink()
    await second.open()
    await commit(first, 100, a=(1,))
    with pytest.raises((OperatorError, TransientError), match="another writer"):
        await commit(second, 100, a=(1,))
    assert ids(lake, A) == [1]


async def test_one_writer_the_loser_can_not_advance(lake: Lake) -> None:
    first = await opened(lake)
    second = lake.sink()
    await second.open()
    await first.advance(Lsn(100))
    with pytest.raises(OperatorError, match="another writer"):
        await second.advance(Lsn(200))


async def test_one_writer_opened_before_a_fence_commits_nothing_more(lake: Lake) -> None:
    first = await opened(lake)
    await commit(first, 100, a=(1,))
    second = lake.sink()
    await second.open()
    await second.fence()
    event = TableEvent(A, TableState.LIVE, AT, Lsn(105))
    for late in (commit(first, 200, a=(2,)), first.advance(Lsn(300)), first.record([event])):
        with pytest.raises(TransientError, match="another ingestd has taken over") as caught:
            await late
        assert caught.value.reason == "claimed"
    await commit(second, 200, a=(2,))
    assert ids(lake, A) == [1, 2]
    assert len(lake.epochs()) == 2


async def test_one_writer_a_fence_is_refused_after_anothers_commit(
    lake: Lake,
) -> None:
    """But it holds: however fast the other commits, the lake can be read again in peace."""
    first, second = await opened(lake), lake.sink()
    await second.open()
    await commit(first, 100, a=(1,))
    for refused in (second.fence, lambda: commit(first, 200, a=(2,))):
        with pytest.raises(TransientError) as caught:
            await refused()
        assert caught.value.reason == "claimed"
    await second.open()
    await second.fence()
    await commit(second, 200, a=(2,))
    assert ids(lake, A) == [1, 2]
    assert len(lake.epochs()) == 2


async def test_abort_leaves_nothing(lake: Lake) -> None:
    sink = await opened(lake)
    before = lake.files()
    writer = sink.begin_epoch()
    await writer.append_batch(inserts(A, 100, 1))
    await writer.abort()
    await writer.abort()
    assert lake.files() == before
    assert (await commit(sink, 100, b=(1,))).epoch == 1


async def test_isolated_discard_forgets_one_table(lake: Lake) -> None:
    sink = await opened(lake)
    writer = sink.begin_epoch()
    await writer.append_batch(inserts(A, 100, 1, 2))
    await writer.append_batch(inserts(B, 100, 1))
    await writer.discard(A.id)
    assert writer.rows == 1
    await writer.commit(summary(100, 105))
    assert lake.epochs()[0]["tables"] == [("public.b", 1, 1)]


async def test_isolated_an_uncommittable_table_stops_before_the_epoch(
    lake: Lake,
) -> None:
    sink = await opened(lake)
    await commit(sink, 100, a=(1,), b=(1,))
    writer = sink.begin_epoch()
    for table in (A, B):
        await writer.append_batch(inserts(table, 200, 2))
    lake.displace(A.id)
    told: list[tuple[TableId, int]] = []

    async def stop(errors: Sequence[TableError]) -> None:
        told.extend((error.table, len(lake.epochs())) for error in errors)

    epoch = await writer.commit(summary(200, 205), stop)
    assert told == [(A.id, 1)]
    assert [t.table for t in epoch.tables] == [B.id]
    await commit(sink, 300, b=(3,))
    assert ids(lake, B) == [1, 2, 3]

    writer = sink.begin_epoch()
    with pytest.raises(TableError) as refused:
        await writer.append_batch(inserts(A, 400, 4))
    assert refused.value.table == A.id
    assert refused.value.remedy
    await writer.discard(A.id)
    lake.put_right(A.id)
    await writer.append_batch(inserts(A, 400, 5))
    await writer.commit(summary(400, 405))
    assert ids(lake, A) == [1, 5]
    await sink.close()


async def test_isolated_without_stop_a_damaged_table_is_raised(lake: Lake) -> None:
    sink = await opened(lake)
    await commit(sink, 100, a=(1,), b=(1,))
    writer = sink.begin_epoch()
    await writer.append_batch(inserts(A, 200, 2))
    lake.displace(A.id)
    with pytest.raises(TableError):
        await writer.commit(summary(200, 205))
    assert len(lake.epochs()) == 1
    await sink.close()


async def test_isolated_a_damaged_table_is_found_at_the_opening(lake: Lake) -> None:
    sink = await opened(lake)
    await commit(sink, 100, a=(1,), b=(1,))
    await sink.close()
    lake.garble(A.id)
    sink = lake.sink()
    committed = await sink.open()
    assert set(committed.damaged) == {A.id}
    assert set(committed.watermarks) == {B.id}
    assert await sink.fence() == {}
    for ask in (sink.unsent, sink.has_marker):
        with pytest.raises(TableError):
            await ask(A, Lsn(0))
    await commit(sink, 200, b=(2,))
    lake.put_right(A.id)
    assert not any(await asyncio.gather(*(sink.has_marker(A, Lsn(0)) for _ in range(3))))
    await commit(sink, 300, a=(3,), b=(3,))
    assert (ids(lake, A), ids(lake, B)) == ([1, 3], [1, 2, 3])
    await sink.close()


async def test_isolated_another_type_is_refused_for_its_table(lake: Lake) -> None:
    sink = await opened(lake)
    await commit(sink, 100, a=(1,))
    other = replace(A, columns=(A.columns[0], replace(A.columns[1], type=pa.binary())))
    writer = sink.begin_epoch()
    batch = inserts(B, 200, 1)
    await writer.append_batch(batch)
    with pytest.raises(TableError, match="note"):
        await writer.append_batch(_binary_note(other))
    await writer.discard(A.id)
    await writer.commit(summary(200, 205))
    assert ids(lake, B) == [1]


def _binary_note(table: Table) -> Any:
    return make_batch(table, [{"id": 1, "note": b"x", "_cdc_lsn": 200, "_cdc_seq": 1}])


async def test_columns_come_and_go(lake: Lake) -> None:
    wider = replace(
        A, columns=(*A.columns, Column("at", 1114, -1, pa.timestamp("us"))), before=("id", "note")
    )
    narrow = replace(A, columns=A.columns[:1])
    sink = await opened(lake)
    await commit(sink, 100, a=(1,))
    writer = sink.begin_epoch()
    row = {"id": 2, "note": "n", "_cdc_before": {"id": 1, "note": "o"}}
    await writer.append_batch(make_batch(wider, [{**row, "_cdc_lsn": 200, "_cdc_seq": 1}]))
    await writer.append_batch(make_batch(narrow, [{"id": 3, "_cdc_lsn": 200, "_cdc_seq": 2}]))
    await writer.commit(summary(200, 205))
    await commit(sink, 300, a=(4,))
    rows = {row["id"]: row for row in lake.rows(A.id)}
    assert rows[1]["at"] is None
    assert rows[2]["_cdc_before"] == {"id": 1, "note": "o"}
    assert rows[3]["note"] is None
    assert rows[4]["note"] == "note 4"


@pytest.mark.parametrize("schema", [" ", "_x", ".", "_epochs", "_ref", "*"])
async def test_exactly_once_tables_of_any_schema_are_found_again(lake: Lake, schema: str) -> None:
    def die(at: str) -> None:
        if at == "_epochs":
            raise KilledError

    table = replace(make_table("t"), id=TableId(schema, "t"))
    sink = await opened(lake, die)
    writer = sink.begin_epoch()
    await writer.append_batch(inserts(table, 100, 1))
    with pytest.raises(KilledError):
        await writer.commit(summary(100, 105))
    await sink.close()
    sink = lake.sink()
    assert (await sink.open()).watermarks == {table.id: 105}
    writer = sink.begin_epoch()
    await writer.append_batch(inserts(table, 100, 1))
    await writer.commit(summary(100, 105))
    await sink.close()
    assert ids(lake, table) == [1]


# --- snapshots in chunks ----------------------------------------------------------------------


def unsent(table: Table, lsn: int, *ids: int) -> TableBatch:
    """Updates without the note's value."""
    rows = [
        {"id": i, "_cdc_op": "u", "_cdc_lsn": lsn, "_cdc_seq": seq, "_cdc_unchanged": ["note"]}
        for seq, i in enumerate(ids, 1)
    ]
    return make_batch(table, rows)


async def unsent_ids(sink: Sink, since: int) -> list[int]:
    found = await sink.unsent(A, Lsn(since))
    assert all(rows.column("_cdc_unchanged").null_count == 0 for rows in found)
    return sorted(i for rows in found for i in rows.column("id").to_pylist())


async def test_snapshot_boundary_snapshot_rows_pass_the_watermark(
    lake: Lake,
) -> None:
    """No replay brings them: the closing marker of a resumed snapshot lies far below."""
    sink = await opened(lake)
    await commit(sink, 100, a=(1,))
    await sink.close()
    sink = await opened(lake)
    writer = sink.begin_epoch()
    await writer.append_batch(inserts(A, 90, 2))
    await writer.append_batch(marker_batch(A, Lsn(50), AT), from_snapshot=True)
    await writer.commit(summary(200, 205))
    found = {(row["_cdc_op"], row["_cdc_lsn"]) for row in lake.rows(A.id)}
    assert found == {("c", 100), ("t", 50)}


async def test_snapshot_boundary_unsent_values_are_found_once_durable(lake: Lake) -> None:
    sink = await opened(lake)
    assert await unsent_ids(sink, 0) == []
    first = sink.begin_epoch()
    await first.append_batch(unsent(A, 100, 1))
    await first.append_batch(inserts(A, 100, 2))
    await first.commit(summary(100, 105))
    second = sink.begin_epoch()
    await second.append_batch(unsent(A, 200, 3, 4))
    assert await unsent_ids(sink, 0) == [1]
    await second.commit(summary(200, 205))
    await sink.close()
    sink = await opened(lake)
    assert await unsent_ids(sink, 0) == [1, 3, 4]
    assert await unsent_ids(sink, 100) == [1, 3, 4]
    assert await unsent_ids(sink, 101) == [3, 4]
    assert await unsent_ids(sink, 201) == []


async def test_snapshot_boundary_a_marker_is_found_once_durable(lake: Lake) -> None:
    sink = await opened(lake)
    assert not await sink.has_marker(A, Lsn(50))
    writer = sink.begin_epoch()
    await writer.append_batch(inserts(A, 100, 1))
    await writer.append_batch(marker_batch(A, Lsn(50), AT), from_snapshot=True)
    assert not await sink.has_marker(A, Lsn(50))
    await writer.commit(summary(100, 105))
    await sink.close()
    sink = await opened(lake)
    found = {at: await sink.has_marker(A, Lsn(at)) for at in (49, 50, 51, 100)}
    assert found == {49: False, 50: True, 51: False, 100: False}
    assert not await sink.has_marker(B, Lsn(50))


async def test_snapshot_progress_is_kept_until_it_is_replaced(lake: Lake) -> None:
    sink = await opened(lake)
    reading = TableEvent(A, TableState.SNAPSHOTTING, AT, Lsn(10), Lsn(5), progress="blocks")
    await sink.record([reading])
    assert (await lake.sink().open()).tables[A.id].progress == "blocks"
    await sink.record([replace(reading, state=TableState.LIVE, progress="")])
    assert (await lake.sink().open()).tables[A.id].progress == ""


# --- where captures resume --------------------------------------------------------------------


def resuming(batch: TableBatch, resume: str | None) -> TableBatch:
    return replace(batch, resume=resume)


async def live(lake: Lake, before_commit: Callable[[str], None] = lambda _: None) -> Sink:
    """A sink of a lake whose tables are both registered."""
    sink = await opened(lake, before_commit)
    if not (await sink.open()).tables:
        await sink.record([TableEvent(t, TableState.LIVE, AT, Lsn(0)) for t in (A, B)])
    return sink


async def resumes(lake: Lake) -> dict[str, str]:
    sink = lake.sink()
    committed = await sink.open()
    await sink.close()
    return {table.name: entry.resume for table, entry in committed.tables.items()}


def listed(lake: Lake) -> list[list[tuple[str, int]]]:
    """Tables and rows of each epoch."""
    return [[(name, rows) for name, _, rows in e["tables"]] for e in lake.epochs()]


async def test_the_newest_resume_is_read_back(lake: Lake) -> None:
    sink = await live(lake)
    writer = sink.begin_epoch()
    await writer.append_batch(resuming(inserts(A, 100, 1), "a1"))
    await writer.append_batch(resuming(inserts(A, 100, 2), 'a2 "ä\n'))
    await writer.append_batch(inserts(A, 100, 3))
    await writer.append_batch(inserts(B, 100, 1))
    await writer.commit(summary(100, 105))
    assert await resumes(lake) == {"a": 'a2 "ä\n', "b": ""}


async def test_a_resume_stays_until_there_is_another(lake: Lake) -> None:
    sink = await live(lake)
    writer = sink.begin_epoch()
    await writer.append_batch(resuming(inserts(A, 100, 1), "a1"))
    await writer.commit(summary(100, 105))
    await commit(sink, 200, a=(2,))
    assert await resumes(lake) == {"a": "a1", "b": ""}
    await sink.close()
    sink = await live(lake)
    await commit(sink, 300, a=(3,))
    assert await resumes(lake) == {"a": "a1", "b": ""}
    writer = sink.begin_epoch()
    await writer.append_batch(resuming(inserts(A, 400, 4), "a4"))
    await writer.commit(summary(400, 405))
    assert await resumes(lake) == {"a": "a4", "b": ""}


async def test_a_resume_without_rows_is_kept_and_its_table_not_listed(lake: Lake) -> None:
    sink = await live(lake)
    await commit(sink, 100, a=(1,))
    for number, lsn in enumerate((200, 300), 1):
        writer = sink.begin_epoch()
        await writer.append_batch(resuming(inserts(A, lsn), f"a{number}"))
        await writer.append_batch(inserts(B, lsn, number))
        await writer.commit(summary(lsn, lsn + 5))
    assert await resumes(lake) == {"a": "a2", "b": ""}
    await commit(sink, 400, a=(2,))
    assert listed(lake) == [
        [("public.a", 1)],
        [("public.b", 1)],
        [("public.b", 1)],
        [("public.a", 1)],
    ]
    assert ids(lake, A) == [1, 2]


async def test_a_resume_of_a_table_that_never_had_a_row_is_kept(lake: Lake) -> None:
    sink = await live(lake)
    writer = sink.begin_epoch()
    await writer.append_batch(resuming(inserts(A, 100), "a1"))
    await writer.append_batch(inserts(B, 100, 1))
    await writer.commit(summary(100, 105))
    assert await resumes(lake) == {"a": "a1", "b": ""}
    assert listed(lake) == [[("public.b", 1)]]
    await commit(sink, 200, a=(1,))
    assert ids(lake, A) == [1]


async def test_isolated_the_resume_of_a_discarded_table_is_forgotten(lake: Lake) -> None:
    sink = await live(lake)
    writer = sink.begin_epoch()
    await writer.append_batch(resuming(inserts(A, 100, 1), "a1"))
    await writer.append_batch(resuming(inserts(B, 100, 1), "b1"))
    await writer.discard(A.id)
    await writer.append_batch(inserts(A, 100, 2))
    await writer.commit(summary(100, 105))
    assert await resumes(lake) == {"a": "", "b": "b1"}


@pytest.mark.parametrize("step", STEPS)
async def test_exactly_once_the_resume_matches_the_rows_after_a_kill(lake: Lake, step: str) -> None:
    def die(at: str) -> None:
        if at == step:
            raise KilledError

    async def bring(sink: Sink, lsn: int, number: int) -> None:
        writer = sink.begin_epoch()
        for table in (A, B):
            await writer.append_batch(resuming(inserts(table, lsn, number), f"up to {number}"))
        await writer.commit(summary(lsn, lsn + 5))

    sink = await live(lake)
    await bring(sink, 100, 1)
    await sink.close()
    sink = await live(lake, die)
    with pytest.raises(KilledError):
        await bring(sink, 200, 2)
    await sink.close()
    for table in (A, B):
        assert (await resumes(lake))[table.id.name] == f"up to {max(ids(lake, table))}"
    sink = await live(lake)
    await bring(sink, 300, 3)
    assert set((await resumes(lake)).values()) == {"up to 3"}


# --- looking back -----------------------------------------------------------------------------


async def changes(sink: Sink, table: Table, *columns: str) -> list[dict[str, Any]]:
    found = []
    async for rows in sink.changes(table.id, columns):
        found += rows.to_pylist()
    return found


async def test_changes_returns_durable_rows_without_missing_columns(lake: Lake) -> None:
    sink = await opened(lake)
    assert await changes(sink, A, "id") == []
    await commit(sink, 100, a=(1, 2))
    await commit(sink, 200, a=(3,))
    writer = sink.begin_epoch()
    await writer.append_batch(inserts(A, 300, 4))
    found = await changes(sink, A, "id", "_cdc_op", "none", "_cdc_epoch")
    assert sorted(found, key=lambda row: row["id"]) == [
        {"id": 1, "_cdc_op": "c", "_cdc_epoch": 1},
        {"id": 2, "_cdc_op": "c", "_cdc_epoch": 1},
        {"id": 3, "_cdc_op": "c", "_cdc_epoch": 2},
    ]
    await writer.commit(summary(300, 305))
    assert len(await changes(sink, A, "_cdc_raw")) == 4


async def test_changes_of_a_column_that_came_later_are_null_before(lake: Lake) -> None:
    wider = replace(A, columns=(*A.columns, Column("more", 20, -1, pa.int64())))
    sink = await opened(lake)
    await commit(sink, 100, a=(1,))
    writer = sink.begin_epoch()
    await writer.append_batch(
        make_batch(wider, [{"id": 2, "more": 5, "_cdc_lsn": 200, "_cdc_seq": 1}])
    )
    await writer.commit(summary(200, 205))
    found = await changes(sink, A, "id", "more")
    assert sorted(found, key=lambda row: row["id"]) == [
        {"id": 1, "more": None},
        {"id": 2, "more": 5},
    ]


async def test_the_keys_that_are_held_are_found_in_the_changes(lake: Lake) -> None:
    sink = await opened(lake)
    await commit(sink, 100, a=(1, 2, 3))
    writer = sink.begin_epoch()
    gone = {"id": 2, "_cdc_op": "d", "_cdc_lsn": 200, "_cdc_seq": 1}
    await writer.append_batch(make_batch(A, [gone]))
    await writer.commit(summary(200, 205))
    keys = await KeySet.load(sink, A, limit_bytes=1 << 20)
    assert keys is not None
    assert keys.contains(inserts(A, 300, 1, 2, 3, 4)).tolist() == [True, False, True, False]


async def test_changes_can_be_left_at_any_time(lake: Lake) -> None:
    sink = await opened(lake)
    await commit(sink, 100, a=(1, 2))
    await commit(sink, 200, a=(3,))
    reading = sink.changes(A.id, ["id"])
    await anext(reading)
    await reading.aclose()
    await commit(sink, 300, a=(4,))
    assert len(await changes(sink, A, "id")) == 4
    await sink.close()
