"""The positions of mirrors: the epoch that a version of a mirror holds, and the wait for one.

`_mirror` records the Delta version at which a mirror holds its table at an epoch. A reconciliation
compares what users query, the newest version: someone may have changed the mirror by hand, or the
job may be in the middle of a batch. The job's commits are signed with their epoch; others are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from ingestd.config import Config
from ingestd.model.errors import TransientError
from ingestd.model.lsn import Lsn
from spark_jobs.lake.lake_state import lake_position
from spark_jobs.lake.source_lake import SourceLake
from spark_jobs.lake.targets import MIRRORS
from spark_jobs.mirrors.table import DELETED_AT

T = TypeVar("T")
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class EpochsAround:
    """The epochs around a position L.

    `through`: all transactions below L are in this epoch or earlier ones. `below`: no transaction
    at or above L is in this epoch or earlier ones.
    """

    through: int
    below: int


def epochs_around(lake: SourceLake, lsn: Lsn) -> EpochsAround:
    """Return the epochs around L of a lake that has everything below L. Spark job."""
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
    """A row of `_mirror`: the versions of each mirror and of its columns, by table name."""

    epoch: int
    end_lsn: int
    versions: dict[str, int] = field(default_factory=dict)
    schemas: dict[str, int] = field(default_factory=dict)


def mirror_row(lake: SourceLake, target: str, epoch: int) -> MirrorRow | None:
    """Return the first row of `_mirror` at or above an epoch; None without one. Spark job."""
    try:
        rows = lake.checked.rows(lake.session, f"{target}/{MIRRORS}")
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
    """A mirror's newest version, and the epoch to which the job has brought it."""

    version: int
    epoch: int


def newest_version(lake: SourceLake, path: str, recorded: int, epoch: int) -> MirrorVersion:
    """Return a mirror's newest version. `recorded`: that of `_mirror` at `epoch`. Spark job."""
    commits = lake.checked.commits_above(lake.session, path, recorded).newer
    epochs = [c.signature.epoch for c in commits if c.signature is not None]
    return MirrorVersion(max([recorded, *(c.version for c in commits)]), max([epoch, *epochs]))


def mirror_rows(lake: SourceLake, path: str, version: int) -> DataFrame:
    """Return the rows of a mirror at a version, without soft-deleted ones."""
    rows = lake.checked.rows(lake.session, path, version)
    if DELETED_AT in rows.columns:
        rows = rows.where(f"{DELETED_AT} IS NULL")
    return rows


def _await_found(
    find: Callable[[], T | None],
    deadline: float,
    timeout_error: Callable[[], TransientError],
    *,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Return the first value of `find`; raise `timeout_error()` once `now` passes `deadline`."""
    while (found := find()) is None:
        if now() >= deadline:
            raise timeout_error()
        sleep(POLL_S)
    return found


def await_mirror(
    lake: SourceLake, config: Config, target: str, lsn: Lsn, wait_s: float
) -> tuple[EpochsAround, MirrorRow]:
    """Wait until the lake, then the mirror, has everything below `lsn`; return where that is.

    Raises TransientError after `wait_s`.
    """
    deadline = time.monotonic() + wait_s
    source = lake.source

    def lake_there() -> Lsn | None:
        position = lake_position(config, source)
        return position if position is not None and position >= lsn else None

    def lake_late() -> TransientError:
        position = lake_position(config, source)
        return TransientError(
            f"the lake of source {source} is at {position} and did not reach {lsn}"
            f" within {wait_s:g} s",
            reason="lake_behind",
            remedy="check with `ingestd status` that the daemon runs, or wait longer: --wait",
        )

    _await_found(lake_there, deadline, lake_late)
    around = epochs_around(lake, lsn)

    def mirror_late() -> TransientError:
        return TransientError(
            f"the mirror in {target} has not reached epoch {around.through} within {wait_s:g} s",
            reason="mirror_behind",
            remedy="check that the mirror job runs, or run it now: python -m spark_jobs.mirror"
            f" --source {source} --target {target} --once",
        )

    row = _await_found(lambda: mirror_row(lake, target, around.through), deadline, mirror_late)
    return around, row
