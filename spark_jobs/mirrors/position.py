"""How far mirrors are, and which version of a mirror holds what.

`_mirror` says at which Delta version a mirror holds its table at an epoch. Reconciling wants what
people query, the newest version: someone may have changed the mirror by hand since, and the job
may be in the middle of a batch. Commits of the job are signed with their epoch; others are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from ingestd.model.errors import TransientError
from ingestd.model.lsn import Lsn
from spark_jobs.delta_log.checked_tables import CheckedTables
from spark_jobs.delta_log.commits import commits_above
from spark_jobs.lake.source_lake import SourceLake
from spark_jobs.lake.targets import MIRRORS
from spark_jobs.mirrors.table import DELETED_AT

T = TypeVar("T")
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class EpochsAround:
    """Where L lies among the epochs.

    `through`: every transaction below L is in it or an epoch before. `below`: no transaction at or
    above L is in it or an epoch before.
    """

    through: int
    below: int


def epochs_around(lake: SourceLake, lsn: Lsn) -> EpochsAround:
    """Find L among the epochs of a lake that has everything below L. Spark job."""
    epochs = lake.checked.rows(lake.session, lake.epochs_path)
    above = f.col("end_lsn") > int(lsn)
    [row] = epochs.agg(
        f.max(f.when(~above, f.col("epoch"))).alias("below"),
        f.max(f.when(f.col("first_lsn") < int(lsn), f.col("epoch"))).alias("through"),
    ).collect()
    below = row["below"] or 0
    return EpochsAround(through=max(row["through"] or 0, below), below=below)


@dataclass(frozen=True, slots=True)
class MirrorRow:
    """A row of `_mirror`: by its table's text, the version of each mirror and of its columns."""

    epoch: int
    end_lsn: int
    versions: dict[str, int] = field(default_factory=dict)
    schemas: dict[str, int] = field(default_factory=dict)


def mirror_row(session: SparkSession, target: str, epoch: int) -> MirrorRow | None:
    """Return the first row of `_mirror` at or above an epoch; None if there is none. Spark job."""
    try:
        rows = CheckedTables().rows(session, f"{target}/{MIRRORS}")
    except AnalysisException:
        return None
    found = rows.where(f.col("epoch") >= epoch).orderBy("epoch").limit(1).collect()
    if not found:
        return None
    versions = {t["table"]: t["version"] for t in found[0]["tables"]}
    schemas = {t["table"]: t["schema_version"] for t in found[0]["tables"]}
    return MirrorRow(found[0]["epoch"], found[0]["end_lsn"], versions, schemas)


@dataclass(frozen=True, slots=True)
class MirrorVersion:
    """A mirror's newest version, and the epoch up to which the job has brought it."""

    version: int
    epoch: int


def newest_version(session: SparkSession, path: str, recorded: int, epoch: int) -> MirrorVersion:
    """Say what a mirror has now, given the version that `_mirror` has for an epoch. Spark job."""
    commits = commits_above(session, path, recorded)
    epochs = [c.signature.epoch for c in commits if c.signature is not None]
    return MirrorVersion(max([recorded, *(c.version for c in commits)]), max([epoch, *epochs]))


def mirror_rows(session: SparkSession, path: str, version: int) -> DataFrame:
    """Return the rows of a mirror at a version that count: not those that were deleted softly."""
    rows = CheckedTables().rows(session, path, version)
    if DELETED_AT in rows.columns:
        rows = rows.where(f"{DELETED_AT} IS NULL")
    return rows


def await_found(
    look: Callable[[], T | None],
    deadline: float,
    late: Callable[[], TransientError],
    *,
    now: Callable[[], float] = time.monotonic,
    rest: Callable[[float], None] = time.sleep,
) -> T:
    """Look until something is found; raise `late()` once `deadline` (of `now`) has passed."""
    while (found := look()) is None:
        if now() >= deadline:
            raise late()
        rest(POLL_S)
    return found
