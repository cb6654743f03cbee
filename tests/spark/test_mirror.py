from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from ingestd.model.schema import Column, Table, TableId
from spark_jobs.epochs import latest, read_at
from spark_jobs.lake.targets import table_path
from spark_jobs.mirror import main
from spark_jobs.mirrors.job import MirrorJob
from spark_jobs.mirrors.policy import MirrorPolicy
from tests.harness.plain_delta import read_delta
from tests.harness.raw_lake import Change, RawLake

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql import SparkSession

    from spark_jobs.engine.table_mover import TableJob

pytestmark = pytest.mark.spark_matrix
Row = tuple[Any, ...]
COLUMNS = ("id", "note", "n")


def table(name: str, *more: Column, identity: str = "d", oid: int = 1) -> Table:
    keyless = identity == "f"
    columns = (
        Column("id", 20, -1, pa.int64(), "bigint", identity=True),
        Column("note", 25, -1, pa.string(), "text", identity=keyless),
        Column("n", 23, -1, pa.int32(), "integer", identity=keyless),
        *more,
    )
    before = tuple(c.name for c in columns) if keyless else ("id",)
    key = () if keyless else ("id",)
    return Table(TableId("public", name), oid, columns, identity, key, before)  # type: ignore[arg-type]


@pytest.fixture
def raw(lake: Path) -> RawLake:
    return RawLake(lake)


class Mirror:
    def __init__(self, spark: SparkSession, raw: RawLake, target: Path) -> None:
        self.spark = spark
        self.raw = raw
        self.target = str(target)

    def run(self, *more: str, job: TableJob | None = None) -> int:
        lake = ["--lake", str(self.raw.uri), "--source", self.raw.source, "--target", self.target]
        return main([*lake, "--once", *more], job=job)

    def rows(self, of: Table, *columns: str, texts: Sequence[str] = ()) -> list[Row]:
        """Return these columns (id, note, n without any) of the newest cut's rows, read by hand.

        `texts`: of these, what `_cdc_raw` has.
        """
        version = latest(self.spark, self.target).versions[str(of.id)]
        rows = read_delta(Path(table_path(self.target, str(of.id))), version)
        found = [
            (
                *(row[name] for name in columns or COLUMNS),
                *(dict(row["_cdc_raw"] or ()).get(name) for name in texts),
            )
            for row in rows
            if row.get("_cdc_deleted_at") is None
        ]
        return _sorted(found)

    def rows_by_spark(self, of: Table) -> list[Row]:
        found = latest(self.spark, self.target)[str(of.id)].select(*COLUMNS).collect()
        return _sorted(map(tuple, found))


def _sorted(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: [(value is None, value) for value in row])


@pytest.fixture
def mirror(spark: SparkSession, raw: RawLake, tmp_path: Path) -> Mirror:
    return Mirror(spark, raw, tmp_path / "mirror")


class Simulated:
    """A table as a source has it, and the change rows that a capture would give of it."""

    def __init__(self, of: Table, chance: random.Random) -> None:
        self.table = of
        self.rows: dict[int, Row] = {}
        self.chance = chance
        self.changes: list[Change] = []
        self.late: list[Change] = []
        self.held: list[Change] = []

    def transaction(self, lsn: int) -> None:
        for seq in range(1, self.chance.randint(1, 6) + 1):
            self._change({"_cdc_lsn": lsn, "_cdc_seq": seq})

    def _change(self, at: Change) -> None:
        op = self.chance.choice("ccuuuuukkd")
        if op == "c" or not self.rows:
            key = self.chance.randint(1, 30)
            if key not in self.rows:
                self.rows[key] = (f"inserted {at}", 0)
                self._say("c", key, at)
            return
        key = self.chance.choice(list(self.rows))
        note, n = self.rows[key]
        if op == "d":
            del self.rows[key]
            self.changes.append({"_cdc_op": "d", "id": key, **at})
        else:
            new = self.chance.randint(1, 30) if op == "k" else key
            is_sent = self.chance.random() < 0.4
            if new != key and new in self.rows:
                return
            del self.rows[key]
            self.rows[new] = (f"updated {at}" if is_sent else note, n + 1)
            self._say("u", new, at, unsent=not is_sent, old=key if new != key else None)

    def _say(
        self, op: str, key: int, at: Change, *, unsent: bool = False, old: int | None = None
    ) -> None:
        note, n = self.rows[key]
        self.changes.append(
            {
                "_cdc_op": op,
                "id": key,
                "note": None if unsent else note,
                "n": n,
                "_cdc_unchanged": ["note"] if unsent else None,
                "_cdc_before": None if old is None else {"id": old},
                **at,
            }
        )

    def truncate(self, lsn: int) -> None:
        self.rows.clear()
        self.changes.append({"_cdc_op": "t", "_cdc_lsn": lsn, "_cdc_seq": 1})

    def read(self, lsn: int) -> None:
        """Read some rows, as a chunk that is placed later."""
        for key in list(self.rows):
            if self.chance.random() < 0.5:
                note, n = self.rows[key]
                row = {"_cdc_op": "r", "id": key, "note": note, "n": n}
                self.held.append(row | {"_cdc_lsn": lsn, "_cdc_seq": 0})

    def take(self) -> list[Change]:
        found, self.changes = self.changes, []
        return found

    def expected(self) -> list[Row]:
        return sorted((key, *row) for key, row in self.rows.items())


WAYS = (
    MirrorPolicy(),  # all in the driver, files rewritten
    # folded in the driver, then a MERGE
    MirrorPolicy(read_file_bytes=-1, small_bytes=0, changed_share=0),
    MirrorPolicy(small_file_bytes=0),  # all in the driver, deletion vectors
    MirrorPolicy(few_rows=-1, driver_rows=-1, small_bytes=0, changed_share=0),  # all by Spark
    MirrorPolicy(read_file_bytes=-1),  # folded in the driver, then a plain write as one file
    MirrorPolicy(few_rows=-1),  # as many rows in the driver
    # by Spark, then a plain write
    MirrorPolicy(few_rows=-1, driver_rows=-1, changed_share=1 << 40),
)
"""How a batch is brought into the mirror."""


@pytest.mark.spark_few
@pytest.mark.parametrize(
    ("seed", "batches"),
    [
        (1, 3),
        pytest.param(4, 4, marks=pytest.mark.thorough),  # the other ways
        pytest.param(2, 14, marks=pytest.mark.long),
    ],
)
def test_mirror_equals_its_source_after_every_batch(
    mirror: Mirror, raw: RawLake, seed: int, batches: int
) -> None:
    """Updates with values not sent, key changes, deletes, truncates, chunks that come late.

    Batches are folded and applied in all WAYS, in turn.
    """
    chance = random.Random(seed)
    tables = [Simulated(table("a"), chance), Simulated(table("b", oid=2), chance)]
    for batch in range(batches):
        policy = WAYS[(batch + seed) % len(WAYS)]
        for _ in range(chance.randint(1, 3)):
            for one in tables:
                for _ in range(8):
                    one.transaction(raw.next_lsn())
            if batch == batches // 2:
                tables[0].truncate(raw.next_lsn())
            changes = {one.table: one.take() for one in tables}
            for one in tables:  # chunks are placed after changes of later positions
                changes[one.table] += one.late
                one.late, one.held = one.held, []
                one.read(raw.next_lsn())
            raw.commit(changes)
        raw.record("live", *[one.table for one in tables])
        assert mirror.run(job=MirrorJob(policy=policy)) == 0
        for one in tables:
            assert mirror.rows(one.table) == one.expected(), f"batch {batch}, {one.table.id}"
    for one in tables:
        assert mirror.rows_by_spark(one.table) == one.expected()
        path = table_path(mirror.target, str(one.table.id))
        [detail] = mirror.spark.sql(f"DESCRIBE DETAIL delta.`{path}`").collect()
        assert detail["clusteringColumns"] == ["id"]


@pytest.mark.thorough
def test_a_resnapshot_voids_rows_by_position_not_by_arrival(mirror: Mirror, raw: RawLake) -> None:
    t = table("a")
    raw.commit({t: [change("c", i, f"old {i}", raw.lsn, i) for i in range(1, 7)]})
    raw.record("live", t)
    assert mirror.run() == 0
    begun = raw.next_lsn()
    raw.record("snapshotting", t, progress="again|", at_lsn=begun)
    raw.commit({t: [change("r", i, f"read {i}", raw.next_lsn(), 0) for i in (1, 2)]})
    assert mirror.run() == 0
    assert [row[0] for row in mirror.rows(t)] == [1, 2, 3, 4, 5, 6]
    changed = change("u", 3, "changed", raw.next_lsn(), 1)
    raw.commit({t: [changed, change("r", 4, "read 4", raw.next_lsn(), 0)]})
    raw.commit({t: [{"_cdc_op": "t", "_cdc_lsn": begun, "_cdc_seq": -1}]})
    raw.record("live", t)
    assert mirror.run() == 0
    assert mirror.rows(t, "id", "note") == [
        (1, "read 1"),
        (2, "read 2"),
        (3, "changed"),
        (4, "read 4"),
    ]


def change(op: str, key: int, note: str | None, lsn: int, seq: int, **more: Any) -> Change:
    return {"_cdc_op": op, "id": key, "note": note, "n": 1, "_cdc_lsn": lsn, "_cdc_seq": seq} | more


@pytest.mark.thorough
def test_an_incomplete_table_is_in_no_cut_and_stays_as_it_was(mirror: Mirror, raw: RawLake) -> None:
    a, b = table("a"), table("b", oid=2)
    raw.record("snapshotting", a, b)
    raw.commit({a: [change("r", 1, "a", raw.lsn, 0)], b: [change("r", 1, "b", raw.lsn, 0)]})
    raw.record("live", a)
    assert mirror.run() == 0
    assert list(latest(mirror.spark, mirror.target)) == ["public.a"]
    raw.record("live", b)  # nothing else happens: that is news as well
    assert mirror.run() == 0
    cut = latest(mirror.spark, mirror.target)
    assert (list(cut), cut.epoch) == (["public.a", "public.b"], 1)
    raw.record("snapshotting", b, reason="the slot was lost")
    lsn = raw.next_lsn()
    raw.commit({b: [change("r", 2, "read after a gap", lsn, 0)], a: [change("d", 1, None, lsn, 2)]})
    assert mirror.run() == 0
    assert list(latest(mirror.spark, mirror.target)) == ["public.a"]
    raw.next_lsn()
    raw.commit({b: [{"_cdc_op": "t", "_cdc_lsn": lsn, "_cdc_seq": -1}]})
    raw.record("live", b)
    assert mirror.run() == 0
    assert mirror.rows(b) == [(2, "read after a gap", 1)]
    assert mirror.rows(a) == []
    assert list(read_at(mirror.spark, mirror.target, 2)) == ["public.a"]


@pytest.mark.thorough
def test_rows_without_a_key_are_counted(mirror: Mirror, raw: RawLake) -> None:
    t = table("a", identity="f")

    def whole(op: str, seq: int, new: Row | None, old: Row | None = None) -> Change:
        shown = new or old
        assert shown is not None
        row = dict(zip(("id", "note", "n"), shown, strict=True))
        before = (
            None if old is None or new is None else dict(zip(("id", "note", "n"), old, strict=True))
        )
        return row | {"_cdc_op": op, "_cdc_before": before, "_cdc_lsn": raw.lsn, "_cdc_seq": seq}

    x, y, z = (1, "x", None), (None, None, 2), (1, None, None)
    raw.commit({t: [whole("r", 0, x)] * 3 + [whole("r", 0, y)] * 2})
    raw.record("live", t)
    assert mirror.run() == 0
    raw.next_lsn()
    raw.commit({t: [whole("c", 1, z), whole("d", 2, None, x), whole("u", 3, z, y)]})
    assert mirror.run() == 0
    found = sorted(map(str, mirror.rows(t)))
    assert found == sorted(map(str, [x, x, y, z, z]))
