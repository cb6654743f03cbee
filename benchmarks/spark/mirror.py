"""The mirror job against the plain one (`benchmarks.spark.mirror_baseline`), on the same changes.

Each has a separate lake, written with the same seed. Times of a running job are from the commit of
the epoch to the commit of the mirror (or of the last of the mirrors).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.spark.mirror_lake import COLUMNS, UNSENT, Changes, MadeLake, MadeTable
from benchmarks.spark.spark_process import CommitLog, SparkProcess

ROWS, UPDATES, FEW = 1_000_000, 500_000, 1_000
ROUNDS, WARM_UP = 7, 3
TABLES, TABLE_ROWS, TABLE_CHANGES = 50, 1_000, 100
UNSENT_SHARE = 0.25
SEED, SOURCE = 20261121, "bench"


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two jobs, with a separate folder."""

    name: str
    folder: Path

    @property
    def lake(self) -> Path:
        """The path of its lake."""
        return self.folder / "lake"

    @property
    def target(self) -> Path:
        """The path of its target."""
        return self.folder / "target"

    def job(self, tables: Sequence[MadeTable], *more: str) -> SparkProcess:
        """Return the job on these tables, not started."""
        where = ["--lake", str(self.lake), "--source", SOURCE, "--target", str(self.target)]
        log = self.folder / "job.log"
        if self.name == "mirror":
            return SparkProcess("spark_jobs.mirror", [*where, *more], log)
        names = [str(made.table.id) for made in tables]
        arguments = [*where, "--key", "id", *more, *names]
        return SparkProcess("benchmarks.spark.mirror_baseline", arguments, log)

    def path(self, made: MadeTable) -> Path:
        """Return the path of a table's mirror."""
        return self.target / made.table.id.schema / made.name

    def logs(self, tables: Sequence[MadeTable]) -> list[CommitLog]:
        """Return the logs whose commits show that an epoch was applied."""
        if self.name == "mirror":
            return [CommitLog(self.target / "_mirror")]
        return [CommitLog(self.path(made)) for made in tables]


SIDES = ("mirror", "baseline")


def measure_one_table(folder: Path) -> dict[str, dict[str, float]]:
    """Return, by side: `load_s` (the process), `few_s` and `many_s` (running), `wrong`, `lost`.

    `wrong`: rows that differ from the expected ones; `lost`: values of UNSENT that became null.
    """
    found = {}
    for name in SIDES:
        side = _side(folder, f"{name}-large", name)
        found[name] = _one_table(side)
    return found


def _one_table(side: Side) -> dict[str, float]:
    rng = np.random.default_rng(SEED)
    made = MadeTable("load", ROWS, UPDATES)
    lake = MadeLake(side.lake, SOURCE)
    lake.load([made])
    load_s = side.job([made]).timed("--once")
    running = _running(side)
    with side.job([made], *running) as job:
        changes = _MirroredChanges(side, lake, job, side.logs([made]))
        few = [
            changes.timed([(made, made.mixed(rng, FEW, UNSENT_SHARE))])
            for _ in range(WARM_UP + ROUNDS)
        ][WARM_UP:]
        many_s = changes.timed([(made, made.updates(rng, UPDATES, UNSENT_SHARE))])
    expected = side.folder / "expected.parquet"
    made.write_expected(expected)
    wrong, lost = _faults(expected, side.path(made))
    return {"load_s": load_s, "few_s": median(few), "many_s": many_s, "wrong": wrong, "lost": lost}


def measure_many_tables(folder: Path) -> dict[str, float]:
    """Return the seconds that each side takes for one epoch with changes in all TABLES, warm."""
    return {name: _many_tables(_side(folder, f"{name}-many", name)) for name in SIDES}


def _many_tables(side: Side) -> float:
    rng = np.random.default_rng(SEED)
    tables = [MadeTable(f"t{n:02}", TABLE_ROWS, TABLE_ROWS) for n in range(TABLES)]
    lake = MadeLake(side.lake, SOURCE)
    lake.load(tables)
    # On two cores, fifty concurrent queries take longer still than one after another.
    more = _running(side) if side.name == "mirror" else ["--in-turn"]
    logs = side.logs(tables)
    with side.job(tables, *more) as job:
        job.await_commits(logs)
        changes = _MirroredChanges(side, lake, job, logs)

        def epoch() -> list[tuple[MadeTable, Changes]]:
            return [(made, made.mixed(rng, TABLE_CHANGES, UNSENT_SHARE)) for made in tables]

        changes.timed(epoch())
        return changes.timed(epoch())


@dataclass(frozen=True, slots=True)
class _MirroredChanges:
    """Epochs committed while a job runs; each is awaited."""

    side: Side
    lake: MadeLake
    job: SparkProcess
    logs: list[CommitLog]

    def timed(self, changes: Sequence[tuple[MadeTable, Changes]]) -> float:
        """Commit an epoch; return the seconds until the job has committed it."""
        epochs = CommitLog(self.side.lake / SOURCE / "_epochs")
        self.lake.change(changes)
        return self.job.await_commits(self.logs) - epochs.take()


def _running(side: Side) -> list[str]:
    return ["--interval", "0.1"] if side.name == "mirror" else []


def _side(folder: Path, own: str, name: str) -> Side:
    side = Side(name, folder / own)
    side.folder.mkdir(parents=True)
    return side


def _faults(expected: Path, mirror: Path) -> tuple[int, int]:
    """Return the number of rows that differ, and of values of UNSENT that are null incorrectly."""
    from pyspark.sql import functions as f  # noqa: PLC0415 - other benchmarks don't need it

    from spark_jobs.session import local_session  # noqa: PLC0415

    session = local_session("check")
    try:
        right = session.read.parquet(str(expected)).alias("e")
        there = session.read.format("delta").load(str(mirror)).alias("m")
        both = right.join(there, f.col("e.id") == f.col("m.id"), "full_outer")
        equal = f.lit(True)  # noqa: FBT003
        for name in COLUMNS:
            equal &= f.col(f"e.{name}").eqNullSafe(f.col(f"m.{name}"))
        is_lost = f.col(f"e.{UNSENT}").isNotNull() & f.col(f"m.{UNSENT}").isNull()
        [row] = both.agg(
            f.count_if(~equal).alias("wrong"),
            f.count_if(is_lost & f.col("m.id").isNotNull()).alias("lost"),
        ).collect()
        return row["wrong"], row["lost"]
    finally:
        session.stop()
