"""A change feed, applied by a plain consumer, is the source at the end of every epoch."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from ingestd.model.schema import Column
from tests.harness.feeds import Feeds, apply_changes
from tests.harness.raw_lake import RawLake
from tests.harness.simulated_table import KEYED, NAME, SimulatedTable, as_texts
from tests.spark.test_mirror import Simulated, change, table
from tests.spark.test_mirror_faults import remove_files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from ingestd.model.schema import Table
    from tests.harness.feeds import Row
    from tests.harness.raw_lake import Change

pytestmark = pytest.mark.spark_matrix


@pytest.fixture
def feeds(spark: SparkSession, lake: Path, tmp_path: Path) -> Feeds:
    del spark  # (so that a session exists)
    return Feeds(lake, tmp_path / "feeds")


def texts_of(rows: Sequence[Row], source: SimulatedTable, until: int | None = None) -> Any:
    schema = pa.schema([(c.name, c.type) for c in source.table.columns])
    return as_texts(apply_changes(rows, source.table.key, until), schema)


STAGES = (
    ("change", "change"),
    ("change", "change", "change"),
    ("add_column", "change", "change"),
    ("begin_reread", "x", "change", "change"),
    ("y", "change", "change", "end_reread"),
)
"""The job runs after each. `x`, `y`: the chunks of a snapshot."""


async def take(source: SimulatedTable, step: str) -> None:
    if step in {"add_column", "begin_reread", "end_reread"}:
        await source.commit_epoch()
        await getattr(source, step)()
    elif step == "change":
        source.change()
    else:
        source.read_chunk(step)


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(2, 8))]
)
async def test_a_feed_is_the_source_at_each_epoch(feeds: Feeds, lake: Path, seed: int) -> None:
    """Unsent values, key changes, truncates, texts, a column with a default, a re-snapshot."""
    choices = random.Random(seed)
    source = SimulatedTable(lake, KEYED, choices)
    await source.begin()
    first = 0
    for number, stage in enumerate(STAGES):
        for step in stage:
            await take(source, step)
            if choices.random() < 0.5:
                await source.commit_epoch()
        await source.commit_epoch()
        assert feeds.run() == 0
        rows = feeds.rows(str(NAME))
        assert texts_of(rows, source) == source.cuts[-1], stage
        if number == 1:  # each change is in the epoch that committed it
            for epoch in range(first, len(source.cuts) + 1):
                assert texts_of(rows, source, until=epoch) == source.cuts[epoch - 1]
        first = len(source.cuts)
    await source.close()


class Recorded(Simulated):
    """A simulated table of which `known` has each change as a feed has it, in order.

    A change: operation, id, note, n, and position. `at`: the rows at the end of each epoch.
    """

    def __init__(self, of: Table, chance: random.Random) -> None:
        super().__init__(of, chance)
        self.known: list[tuple[Any, ...]] = []
        self.at: dict[int, list[tuple[Any, ...]]] = {}

    def _change(self, at: Change) -> None:
        before = dict(self.rows)
        super()._change(at)
        self._record(before, at)

    def _record(self, before: dict[int, Any], at: Change) -> None:
        place = (at["_cdc_lsn"], at["_cdc_seq"])
        gone = sorted(before.keys() - self.rows.keys())
        self.known += [("DELETE", key, None, None, *place) for key in gone]
        for key, row in self.rows.items():
            if before.get(key) != row:
                operation = "UPDATE" if key in before else "INSERT"
                self.known.append((operation, key, *row, *place))

    def swap(self, lsn: int) -> None:
        """Give two rows each other's key, by way of a third, without sending their notes."""
        one, other = list(self.rows)[:2]
        for seq, (old, new) in enumerate([(one, 99), (other, one), (99, other)], 1):
            at = {"_cdc_lsn": lsn, "_cdc_seq": seq}
            before = dict(self.rows)
            note, n = self.rows.pop(old)
            self.rows[new] = (note, n + 1)
            self._say("u", new, at, unsent=True, old=old)
            self._record(before, at)

    def truncate(self, lsn: int) -> None:
        before = dict(self.rows)
        super().truncate(lsn)
        self._record(before, {"_cdc_lsn": lsn, "_cdc_seq": 1})


class KilledError(Exception):
    pass


def kill(_: str) -> None:
    raise KilledError


def current(rows: Sequence[Row], until: int) -> list[tuple[Any, ...]]:
    found = apply_changes(rows, ["id"], until)
    return sorted((row["id"], row["note"], row["n"]) for row in found)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_every_change_is_in_the_feed_once(feeds: Feeds, lake: Path, seed: int) -> None:
    """Chunks that come late add no row; keys are swapped; a job is killed, a batch repeated."""
    raw, chance = RawLake(lake), random.Random(seed)
    of, bare = table("a"), table("bare", identity="f", oid=2)
    source = Recorded(of, chance)
    for batch in range(3):
        for _ in range(2):
            for _ in range(6):
                source.transaction(raw.next_lsn())
            if batch:
                source.swap(raw.next_lsn())
            if batch == 2:
                source.truncate(raw.next_lsn())
                source.transaction(raw.next_lsn())
            row = {"_cdc_op": "c", "id": 1, "_cdc_lsn": raw.lsn, "_cdc_seq": 99}
            changes = {of: source.take() + source.late, bare: [row]}
            source.late, source.held = source.held, []
            source.read(raw.next_lsn())
            source.at[raw.commit(changes)] = source.expected()
        raw.record("live", of, bare)
        if batch == 0:
            source.known.clear()  # the feed begins with the rows, not with their changes
        with pytest.raises(KilledError):
            feeds.run(after_commit=kill)
        if batch == 1:  # the feed itself says how far it is
            shutil.rmtree(feeds.target / "_feed")
        assert feeds.run() == 0
        rows = feeds.rows(str(of.id))
        for epoch in range(2, raw.epoch + 1):
            assert current(rows, epoch) == source.at[epoch], f"epoch {epoch}"
    names = ["_cdc_operation", "id", "note", "n", "_cdc_lsn", "_cdc_seq"]
    later = [tuple(row[n] for n in names) for row in rows if row["_cdc_epoch"] > 2]
    assert sorted(later, key=repr) == sorted(source.known, key=repr)
    assert not feeds.path(str(bare.id)).exists()


def test_a_default_that_no_epoch_follows_is_in_the_feed(feeds: Feeds, lake: Path) -> None:
    """Columns have names that a job could take for its own."""
    raw = RawLake(lake)
    kinds = (("lsn", 23, pa.int32()), ("is_read", 16, pa.bool_()), ("operation", 25, pa.string()))
    of = table("a", *(Column(name, oid, -1, kind) for name, oid, kind in kinds))
    own = {"lsn": 7, "is_read": True, "operation": "o"}
    raw.commit({of: [change("c", n, "old", raw.lsn, n) | own for n in (1, 2)]})
    raw.record("live", of)
    assert feeds.run() == 0
    raw.commit({of: [change("u", 1, "new", raw.next_lsn(), 1) | own]})
    assert feeds.run() == 0
    wide = replace(of, columns=(*of.columns, Column("more", 23, -1, pa.int32(), missing="5")))
    raw.record("live", wide, at_lsn=raw.next_lsn())
    for _ in range(2):
        assert feeds.run() == 0
        rows = apply_changes(feeds.rows(str(of.id)), ["id"])
        found = [tuple(row[n] for n in ("id", "note", "more", *own)) for row in rows]
        assert sorted(found) == [(1, "new", 5, *own.values()), (2, "old", 5, *own.values())]


@pytest.mark.thorough
def test_what_stops_a_feed_and_what_continues_it(
    feeds: Feeds, lake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another writer, raw rows that are missing, another key."""
    raw, of = RawLake(lake), table("a")
    raw.commit({of: [change("c", n, "old", raw.lsn, n) for n in (1, 2, 3)]})
    raw.record("live", of)
    assert feeds.run() == 0
    rows = feeds.rows(str(of.id))
    lost = [row for row in rows if row["id"] == 2]
    lost[0] |= {"_cdc_operation": "DELETE", "note": None, "n": None}
    lost[0]["_cdc_sequence"] = rows[0]["_cdc_sequence"][:-3] + "2-0"
    path = str(feeds.path(str(of.id)))
    write_deltalake(
        path,
        pa.Table.from_pylist(lost, pa.schema(DeltaTable(path).schema().to_arrow())),
        mode="append",
    )
    assert feeds.run() == 1
    assert f"changed by another writer (version 2, WRITE)\n  remedy: --rebuild {of.id}" in (
        capsys.readouterr().err
    )
    assert feeds.run("--rebuild", str(of.id)) == 0
    assert [row[0] for row in current(feeds.rows(str(of.id)), 1)] == [1, 2, 3]
    lsn = raw.next_lsn()
    raw.commit({of: [change("u", 1, "lost", lsn, 1), change("d", 3, None, lsn, 2)]})
    remove_files(raw.uri / "shop" / "public" / "a")
    assert feeds.run() == 1
    assert "rows of epochs 1 to 2 are missing" in capsys.readouterr().err
    begun = raw.next_lsn()
    raw.record("snapshotting", of, progress="again|", at_lsn=begun)
    lsn = raw.next_lsn()
    raw.commit({of: [change("r", 1, "read", lsn, 0), change("r", 2, "old", lsn, 0)]})
    raw.commit({of: [{"_cdc_op": "t", "_cdc_lsn": begun, "_cdc_seq": -1}]})
    raw.record("live", of)
    assert feeds.run() == 0
    assert current(feeds.rows(str(of.id)), 4) == [(1, "read", 1), (2, "old", 1)]
    columns = tuple(replace(c, identity=c.name != "n") for c in of.columns)
    other = replace(of, columns=columns, key=("id", "note"), before=("id", "note"))
    raw.record("live", other)
    assert feeds.run() == 1
    assert "its key changed from (id) to (id, note)" in capsys.readouterr().err
