"""Rows of a table that has one row for each epoch, each added as a file: no Spark job."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from ingestd.lake.delta.commit import statistics_of
from spark_jobs.accelerator.class_log import current_version, log_entries, snapshot_of
from spark_jobs.accelerator.driver_commit import (
    AppTransaction,
    commit,
    is_plain,
    new_file,
    removed,
)
from spark_jobs.accelerator.switch import Switch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from spark_jobs.accelerator.file_cache import Action

T = TypeVar("T")


@dataclass(slots=True)
class RowFiles:
    """Implements `spark_jobs.delta_log.acceleration.RowWriter`."""

    session: SparkSession
    path: str
    app_id: str
    switch: Switch = field(default_factory=Switch)
    _seen: int | None = field(default=None, init=False)
    _version: int | None = field(default=None, init=False)  # while the newest row is the caller's
    _newest: tuple[int, Action] | None = field(default=None, init=False)

    def look(self) -> bool:
        """See `RowWriter`."""
        self._version = self._newest = None
        self._seen = self._by_classes(lambda: current_version(self.session, self.path))
        return self._seen is not None

    def follow(self, epoch: int | None) -> None:
        """See `RowWriter`."""
        self._version = seen = self._seen
        self._newest = None
        if epoch is not None and seen is not None:
            self._newest = self._by_classes(lambda: self._added(epoch, seen))

    def put(self, rows: pa.Table, epoch: int, *, replace: bool) -> bool:
        """See `RowWriter`."""
        known, self._version = self._version, None
        before, self._newest = self._newest, None
        if known is None or (replace and (before is None or before[0] != epoch)):
            return False
        gone = before[1] if replace and before is not None else None
        added = self._by_classes(lambda: self._put(rows, epoch, gone, known))
        if added is None:
            return False
        self._version, self._newest = known + 1, (epoch, added)
        return True

    def _by_classes(self, work: Callable[[], T | None]) -> T | None:
        """Return what `work` does; None once the accelerator is off, and where Spark must do it."""
        if self.switch.is_off:
            return None
        try:
            return work()
        except OSError:
            return None  # Spark reports the cause
        except (Py4JError, PySparkException) as error:
            self.switch.stays_on(self.session, error)
            return None

    def _put(self, rows: pa.Table, epoch: int, gone: Action | None, known: int) -> Action | None:
        """Add a row to version `known`, in place of the file `gone`; return its add action."""
        snapshot = snapshot_of(self.session, self.path)
        if snapshot.version() != known or not is_plain(snapshot):
            return None
        added = new_file(self.session, self.path, rows, indexed=["epoch"])
        actions = [added] if gone is None else [removed(gone, time.time_ns() // 1_000_000), added]
        transaction = AppTransaction(self.app_id, epoch, "Append" if gone is None else "Update")
        is_committed = self._commit(actions, transaction, known)
        return added["add"] if is_committed else None

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
