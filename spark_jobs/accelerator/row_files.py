"""Rows of a table that has one row for each epoch, each added as a file: no Spark job."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from ingestd.lake.delta.commit import statistics_of
from spark_jobs.accelerator.driver_commit import (
    AppTransaction,
    commit,
    is_plain,
    new_file,
    removed,
)
from spark_jobs.accelerator.switch import Switch
from spark_jobs.delta_log.commits import current_version, log_entries, snapshot_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from spark_jobs.accelerator.file_cache import Action


@dataclass(slots=True)
class RowFiles:
    """Implements `spark_jobs.delta_log.acceleration.RowWriter`."""

    session: SparkSession
    path: str
    app_id: str
    switch: Switch = field(default_factory=Switch)
    _seen: int = field(default=-1, init=False)
    _version: int | None = field(default=None, init=False)  # while the newest row is the caller's
    _newest: tuple[int, Action] | None = field(default=None, init=False)

    def look(self) -> None:
        """See `RowWriter`."""
        self._seen = current_version(self.session, self.path)
        self._version = self._newest = None

    def follow(self, epoch: int | None) -> None:
        """See `RowWriter`."""
        self._version = self._seen
        self._newest = None if epoch is None else self._added(epoch, self._seen)

    def put(self, rows: pa.Table, epoch: int, *, replace: bool) -> bool:
        """See `RowWriter`."""
        known, self._version = self._version, None
        before, self._newest = self._newest, None
        snapshot = snapshot_of(self.session, self.path)
        if known is None or snapshot.version() != known or not is_plain(snapshot):
            return False
        actions: list[Action] = []
        if replace:
            if before is None or before[0] != epoch:
                return False
            actions.append(removed(before[1], time.time_ns() // 1_000_000))
        try:
            added = new_file(self.session, self.path, rows, indexed=["epoch"])
            transaction = AppTransaction(self.app_id, epoch, "Update" if replace else "Append")
            is_committed = self._commit([*actions, added], transaction, known)
        except OSError:
            return False  # Spark reports the cause
        except (Py4JError, PySparkException) as error:
            self.switch.stays_on(self.session, error)
            return False
        if is_committed:
            self._version, self._newest = known + 1, (epoch, added["add"])
        return is_committed

    def _commit(
        self, actions: Sequence[Action], transaction: AppTransaction, of_version: int
    ) -> bool:
        return commit(self.session, self.path, actions, transaction, of_version=of_version)

    def _added(self, epoch: int, version: int) -> tuple[int, Action] | None:
        """Return the newest row's add action, if the commit of that version added nothing else."""
        entries = log_entries(self.session, self.path, version) or []
        adds = [e["add"] for e in entries if "add" in e and e["add"]["dataChange"]]
        if len(adds) != 1:
            return None
        statistics = statistics_of(adds[0].get("stats"))
        bounds = [statistics.get(name, {}).get("epoch") for name in ("minValues", "maxValues")]
        is_it = statistics.get("numRecords") == 1 and bounds == [epoch, epoch]
        return (epoch, adds[0]) if is_it else None
