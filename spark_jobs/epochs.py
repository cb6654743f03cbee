"""Mirrors read together: a transactionally consistent cut over all tables.

>>> cut = latest(spark, "s3a://lake/mirror")
>>> cut["public.orders"].join(cut["public.customers"], "customer_id")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ingestd.model.errors import OperatorError
from spark_jobs.accelerator.choice import accelerator_of
from spark_jobs.cli.arguments import spark_uri
from spark_jobs.engine.cuts import EpochCut, find_cut, newest_cut
from spark_jobs.lake.targets import MIRRORS, table_path
from spark_jobs.mirrors.table import DELETED_AT

if TYPE_CHECKING:
    from datetime import datetime

    from pyspark.sql import DataFrame, SparkSession


class MirrorCut(Mapping[str, "DataFrame"]):
    """All mirrors at the end of one epoch, by table ("schema.table").

    All of them contain the same transactions, whatever the mirror job does meanwhile, for as long
    as Delta keeps the versions (`delta.deletedFileRetentionDuration`). Rows marked as deleted
    (--soft-deletes) are left out. A table that is incomplete at the epoch is missing (KeyError).
    """

    def __init__(self, session: SparkSession, target: str, cut: EpochCut) -> None:
        self._session = session
        self._target = target
        self._cut = cut
        self._tables = accelerator_of(session).tables

    @property
    def epoch(self) -> int:
        """The epoch's number."""
        return self._cut.epoch

    @property
    def end_lsn(self) -> int:
        """The cut contains everything that committed below this position."""
        return self._cut.end_lsn

    @property
    def last_commit_ts(self) -> datetime:
        """Commit time of the newest transaction in the cut."""
        return self._cut.last_commit_ts

    @property
    def versions(self) -> Mapping[str, int]:
        """The Delta version of each mirror."""
        return self._cut.tables

    def __getitem__(self, table: str) -> DataFrame:
        if table not in self._cut.tables:
            there = ", ".join(sorted(self._cut.tables)) or "none"
            msg = f"{table} is not in the cut of epoch {self.epoch}; it has: {there}"
            raise KeyError(msg)
        path = table_path(self._target, table)
        rows = self._tables.rows(self._session, path, self._cut.tables[table])
        return (
            rows.where(f"{DELETED_AT} IS NULL").drop(DELETED_AT)
            if (DELETED_AT in rows.columns)
            else rows
        )

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._cut.tables))

    def __len__(self) -> int:
        return len(self._cut.tables)


def read_at(spark: SparkSession, target: str, epoch: int) -> MirrorCut:
    """Return the newest cut at or below an epoch: one step may cover several epochs.

    Raises OperatorError if none exists.
    """
    return _cut(spark, target, epoch)


def latest(spark: SparkSession, target: str) -> MirrorCut:
    """Return the newest cut. Raises OperatorError if none exists."""
    return _cut(spark, target, None)


def _cut(spark: SparkSession, target: str, epoch: int | None) -> MirrorCut:
    uri = spark_uri(target)
    path = f"{uri}/{MIRRORS}"
    if epoch is None:
        found = newest_cut(spark, path, "mirror", accelerator_of(spark))
    else:
        found = find_cut(spark, path, accelerator_of(spark), epoch)
    if found is None:
        at = "" if epoch is None else f" at or below epoch {epoch}"
        raise OperatorError(
            f"{uri} has no cut{at}", remedy="run the mirror job, or choose a later epoch"
        )
    return MirrorCut(spark, uri, found)
