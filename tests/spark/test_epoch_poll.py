"""New epochs are found once, in order, and from one lake; a stop in between loses none."""

from __future__ import annotations

import shutil
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable as RustTable

from ingestd.model.errors import OperatorError
from spark_jobs.accelerator.choice import accelerator_of
from spark_jobs.engine.cuts import EpochCut
from spark_jobs.engine.epoch_poll import EpochPoll
from spark_jobs.epochs import latest
from spark_jobs.lake.source_lake import SourceLake
from spark_jobs.lake.targets import MIRRORS, table_path
from spark_jobs.mirror import main
from tests.harness.raw_lake import RawLake
from tests.spark.test_mirror import Mirror, change, mirror, raw, table

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

__all__ = ["mirror", "raw"]
pytestmark = pytest.mark.spark_matrix
T, U = table("a"), table("b", oid=2)


@pytest.fixture
def filled(spark: SparkSession, raw: RawLake) -> SourceLake:
    """A lake with the epochs 1 to 3, which end at 115, 125 and 135."""
    for _ in range(3):
        commit(raw)
    return SourceLake(spark, str(raw.uri), raw.source, accelerator=accelerator_of(spark))


@pytest.fixture
def lake_path(raw: RawLake) -> Path:
    return raw.uri / raw.source


def commit(raw: RawLake) -> None:
    lsn = raw.next_lsn()
    raw.commit({t: [change("c", raw.epoch, "x", lsn, 1)] for t in (T, U)})


def cut(number: int, end_lsn: int) -> EpochCut:
    return EpochCut(number, end_lsn, datetime(2026, 1, 2, tzinfo=UTC), {}, {})


def numbers(poll: EpochPoll, last: EpochCut | None) -> list[int] | None:
    found = poll.look(last)
    return None if found is None else [epoch.number for epoch in found]


@pytest.fixture
def poll(filled: SourceLake) -> EpochPoll:
    return EpochPoll(filled, filled.require().table_id)


def test_each_epoch_is_found_once_and_in_order(raw: RawLake, poll: EpochPoll) -> None:
    assert numbers(poll, None) == [1, 2, 3]
    assert numbers(poll, cut(3, 135)) is None
    commit(raw)
    commit(raw)
    assert numbers(poll, cut(3, 135)) == [3, 4, 5]
    assert numbers(poll, cut(5, 155)) is None
    assert numbers(EpochPoll(poll.lake, poll.lake_id), cut(5, 155)) == [5]


def remove(path: Path, *numbers: int) -> None:
    RustTable(str(path / "_epochs")).delete(f"epoch IN ({', '.join(map(str, numbers))})")


def change_end(path: Path) -> None:
    RustTable(str(path / "_epochs")).update(new_values={"end_lsn": 7}, predicate="epoch = 2")


def put_another(path: Path) -> None:
    other = RawLake(path.parent.parent / "other")
    for _ in range(3):
        commit(other)
    shutil.rmtree(path / "_epochs")
    shutil.copytree(other.uri / "shop" / "_epochs", path / "_epochs")


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (lambda path: remove(path, 3), None),  # as where it has not been committed yet
        (lambda path: remove(path, 2), "epoch 2 is missing, the next one is 3; nothing was skip"),
        (lambda path: remove(path, 2, 3), "epoch 2 is missing, the lake ends befo"),
        (change_end, "epoch 2 ends at 7, and ended at 125 when it was applied; nothing was skip"),
        (put_another, "is of another or earlier lake than it was when this job started"),
        (lambda path: shutil.rmtree(path / "_epochs"), "source shop has no epochs in this lake"),
    ],
)
def test_a_lake_that_does_not_continue_the_cut_is_refused(
    poll: EpochPoll, lake_path: Path, do: Callable[[Path], object], said: str | None
) -> None:
    last = cut(2, 125)
    assert numbers(poll, last) == [2, 3]
    do(lake_path)
    for again in (poll, EpochPoll(poll.lake, poll.lake_id)):
        if said is None:
            assert numbers(again, last) == [2]
            continue
        with pytest.raises(OperatorError, match=said) as found:
            again.look(last)
        assert found.value.remedy


def arguments(mirror: Mirror, *more: str) -> list[str]:
    lake = ["--lake", str(mirror.raw.uri), "--source", mirror.raw.source]
    return [*lake, "--target", mirror.target, "--parallel", "1", "--interval", "0.1", *more]


def test_a_stop_between_two_tables_repeats_and_skips_none(
    filled: SourceLake, mirror: Mirror, raw: RawLake
) -> None:
    assert [epoch.number for epoch in filled.epochs()] == [1, 2, 3]
    raw.record("live", T, U)
    stop, moved = threading.Event(), list[str]()

    def after(name: str) -> None:
        moved.append(name)
        stop.set()

    assert main(arguments(mirror), stop=stop, after_commit=after) == 0
    assert moved == ["public.a"]
    assert not Path(table_path(mirror.target, "public.b")).exists()
    commit(raw)
    moved.clear()
    stop.clear()
    assert main(arguments(mirror, "--once"), stop=stop, after_commit=after) == 0
    assert moved == ["public.a"]
    assert main(arguments(mirror, "--once"), after_commit=moved.append) == 0
    assert moved == ["public.a", "public.b", MIRRORS]
    for t in (T, U):
        assert [row[0] for row in mirror.rows(t)] == [0, 1, 2, 3]
    assert latest(mirror.spark, mirror.target).epoch == 4


def test_a_running_job_takes_epochs_and_new_tables_as_they_come(
    filled: SourceLake, mirror: Mirror, raw: RawLake
) -> None:
    """It takes up what no epoch announces: that a table is complete. --checkpoint is ignored."""
    raw.record("live", T)
    stop, cuts = threading.Event(), list[int]()

    def after(name: str) -> None:
        if name != MIRRORS:
            return
        cuts.append(len(latest(mirror.spark, mirror.target)))
        if len(cuts) == 1:
            raw.record("live", U)
        elif len(cuts) == 2:
            commit(raw)
        else:
            stop.set()

    folder = f"{mirror.target}/checkpoint"
    assert main(arguments(mirror, "--checkpoint", folder), stop=stop, after_commit=after) == 0
    assert cuts == [1, 2, 2]
    assert not Path(folder).exists()
    assert [row[0] for row in mirror.rows(U)] == [0, 1, 2, 3]
    assert latest(mirror.spark, mirror.target).end_lsn == filled.epochs()[-1].end_lsn
