"""The mirror job against the plain one (`benchmarks.spark.mirror_baseline`), on the same changes.

The mirror job runs with the accelerator and without it (`public`). Each has a separate lake,
written with the same seed. Times of a running job are from the commit of the epoch to the commit of
the mirror (or of the last of the mirrors). The jobs take turns, batch by batch; the others are
suspended meanwhile. So what else the machine does slows all of them down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.spark.mirror_lake import COLUMNS, UNSENT, Changes, MadeLake, MadeTable
from benchmarks.spark.spark_process import CommitLog, SparkProcess

ROWS, UPDATES, FEW = 1_000_000, 500_000, 1_000
FEW_ROUNDS, WARM_UP, MANY_ROUNDS = 7, 3, 3
TABLES, TABLE_ROWS, TABLE_CHANGES = 50, 1_000, 100
UNSENT_SHARE = 0.25
SEED, SOURCE = 20261121, "bench"
_LOOKS = ["--interval", "0.1"]
_ARGUMENTS: Mapping[str, Sequence[str]] = {
    "mirror": _LOOKS,
    "public": [*_LOOKS, "--no-accelerator"],
    "baseline": [],
}
SIDES = tuple(_ARGUMENTS)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the jobs, with a separate folder. `name`: one of SIDES."""

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
        where += _ARGUMENTS[self.name]
        log = self.folder / "job.log"
        if self.name != "baseline":
            return SparkProcess("spark_jobs.mirror", [*where, *more], log)
        names = [str(made.table.id) for made in tables]
        arguments = [*where, "--key", "id", *more, *names]
        return SparkProcess("benchmarks.spark.mirror_baseline", arguments, log)

    def path(self, made: MadeTable) -> Path:
        """Return the path of a table's mirror."""
        return self.target / made.table.id.schema / made.name

    def logs(self, tables: Sequence[MadeTable]) -> list[CommitLog]:
        """Return the logs whose commits show that an epoch was applied."""
        if self.name != "baseline":
            return [CommitLog(self.target / "_mirror")]
        return [CommitLog(self.path(made)) for made in tables]


@dataclass(frozen=True, slots=True)
class Taken:
    """What a batch took: seconds, and CPU seconds of the job and its JVM."""

    s: float
    cpu_s: float


def measure_one_table(
    folder: Path, rows: int = ROWS, sides: Sequence[str] = SIDES, many_rounds: int = MANY_ROUNDS
) -> dict[str, dict[str, float]]:
    """Return figures by side.

    `load_s`: of the process; `few_s`, `few_cpu_s`, `many_s`, `many_cpu_s`: medians of batches of a
    running job; `wrong`: rows that differ from the expected ones; `lost`: values of UNSENT that
    became null.
    """
    with ExitStack() as stack:
        turns = [_Turns.begun(_side(folder, f"{name}-large", name), rows, stack) for name in sides]
        for number in range(WARM_UP + FEW_ROUNDS):
            for each in turns if number % 2 else reversed(turns):
                each.few()
        for number in range(many_rounds):
            for each in turns if number % 2 else reversed(turns):
                each.many()
    return {each.side.name: each.figures() for each in turns}


@dataclass(slots=True)
class _Turns:
    """One side's large table, and what its batches took. Suspended between two batches."""

    side: Side
    made: MadeTable
    job: SparkProcess
    changes: _MirroredChanges
    load_s: float
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(SEED))
    taken_few: list[Taken] = field(default_factory=list)
    taken_many: list[Taken] = field(default_factory=list)

    @classmethod
    def begun(cls, side: Side, rows: int, stack: ExitStack) -> _Turns:
        """Load a table, start the job, and suspend it. `stack` ends it."""
        made, lake = MadeTable("load", rows, UPDATES), MadeLake(side.lake, SOURCE)
        lake.load([made])
        load_s = side.job([made]).timed("--once")
        job = stack.enter_context(side.job([made]))
        found = cls(side, made, job, _MirroredChanges(side, lake, job, side.logs([made])), load_s)
        job.suspend()
        return found

    def few(self) -> None:
        """Apply FEW changes."""
        self.taken_few.append(self._take(self.made.mixed(self.rng, FEW, UNSENT_SHARE)))

    def many(self) -> None:
        """Apply UPDATES updates."""
        self.taken_many.append(self._take(self.made.updates(self.rng, UPDATES, UNSENT_SHARE)))

    def _take(self, changes: Changes) -> Taken:
        self.job.resume()
        try:
            return self.changes.timed([(self.made, changes)])
        finally:
            self.job.suspend()

    def figures(self) -> dict[str, float]:
        """Return the figures of `measure_one_table`. The job has ended."""
        expected = self.side.folder / "expected.parquet"
        self.made.write_expected(expected)
        wrong, lost = _faults(expected, self.side.path(self.made))
        found = {"load_s": self.load_s, "wrong": wrong, "lost": lost}
        for name, taken in (("few", self.taken_few[WARM_UP:]), ("many", self.taken_many)):
            if taken:
                found[f"{name}_s"] = median(each.s for each in taken)
                found[f"{name}_cpu_s"] = median(each.cpu_s for each in taken)
        return found


def measure_many_tables(folder: Path) -> dict[str, float]:
    """Return the seconds that each side takes for one epoch with changes in all TABLES, warm."""
    names = ("mirror", "baseline")
    return {name: _many_tables(_side(folder, f"{name}-many", name)) for name in names}


def _many_tables(side: Side) -> float:
    rng = np.random.default_rng(SEED)
    tables = [MadeTable(f"t{n:02}", TABLE_ROWS, TABLE_ROWS) for n in range(TABLES)]
    lake = MadeLake(side.lake, SOURCE)
    lake.load(tables)
    # On two cores, fifty concurrent queries take longer still than one after another.
    more = [] if side.name == "mirror" else ["--in-turn"]
    logs = side.logs(tables)
    with side.job(tables, *more) as job:
        job.await_commits(logs)
        changes = _MirroredChanges(side, lake, job, logs)

        def epoch() -> list[tuple[MadeTable, Changes]]:
            return [(made, made.mixed(rng, TABLE_CHANGES, UNSENT_SHARE)) for made in tables]

        changes.timed(epoch())
        return changes.timed(epoch()).s


@dataclass(frozen=True, slots=True)
class _MirroredChanges:
    """Epochs committed while a job runs; each is awaited."""

    side: Side
    lake: MadeLake
    job: SparkProcess
    logs: list[CommitLog]

    def timed(self, changes: Sequence[tuple[MadeTable, Changes]]) -> Taken:
        """Commit an epoch; return what it took until the job has committed it."""
        epochs = CommitLog(self.side.lake / SOURCE / "_epochs")
        before_s = self.job.cpu_s()
        self.lake.change(changes)
        return Taken(self.job.await_commits(self.logs) - epochs.take(), self.job.cpu_s() - before_s)


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
