"""The log of a job's cuts: which version of each table belongs to which epoch.

All tables of a cut show the source as it was at the end of the cut's epoch. A cut contains a table
if the table is complete there: its snapshot is complete, no change is missing, and it is neither
stopped nor dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from delta.tables import DeltaTable
from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException
from pyspark.sql import functions as f

from ingestd.lake.delta.commit import statistics_of
from ingestd.model.errors import OperatorError
from spark_jobs.delta_log.checked_tables import CheckedTables
from spark_jobs.delta_log.commits import (
    CHECKPOINTS,
    current_version,
    identity,
    log_entries,
    snapshot_of,
)
from spark_jobs.delta_log.driver_commit import AppTransaction, commit, is_plain, new_file, removed
from spark_jobs.delta_log.newest_files import NewestFiles
from spark_jobs.lake.exchange import from_arrow
from spark_jobs.lake.source_lake import as_spark_gives

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_jobs.delta_log.file_cache import Action
    from spark_jobs.lake.source_lake import SourceLake

SCHEMA = (
    "epoch long, end_lsn long, last_commit_ts timestamp, mirrored_at timestamp,"
    " tables array<struct<table: string, version: long, schema_version: int>>"
)
_TIME = pa.timestamp("us", "UTC")
_ARROW_SCHEMA = pa.schema(
    {
        "epoch": pa.int64(),
        "end_lsn": pa.int64(),
        "last_commit_ts": _TIME,
        "mirrored_at": _TIME,
        "tables": pa.list_(
            pa.struct({"table": pa.string(), "version": pa.int64(), "schema_version": pa.int32()})
        ),
    }
)
"""SCHEMA as an Arrow schema."""
_SOURCE, _EPOCHS = "ingestd.source", "ingestd.epochs"
"""Table properties: the source's name, and the id of the `_epochs` that it was read from."""


@dataclass(frozen=True, slots=True)
class EpochCut:
    """A row of the log.

    `tables`: the Delta version of each table, by name; `schemas`: the version of its schema in
    `_tables` that it was brought to.
    """

    epoch: int
    end_lsn: int
    last_commit_ts: datetime
    tables: Mapping[str, int]
    schemas: Mapping[str, int]

    @classmethod
    def from_row(cls, row: Any) -> EpochCut:  # noqa: ANN401 - a pyspark Row
        """Return the cut in a row of the log."""
        tables = {t["table"]: t["version"] for t in row["tables"]}
        schemas = {t["table"]: t["schema_version"] for t in row["tables"]}
        return cls(row["epoch"], row["end_lsn"], row["last_commit_ts"], tables, schemas)


class CutLog:
    """The Delta table at `path`. `name`: the job's, for messages.

    Cuts are added without a Spark job as long as no other writer commits. (Maintenance does.)
    `commit`: as `driver_commit.commit`.
    """

    def __init__(
        self,
        session: SparkSession,
        path: str,
        name: str,
        *,
        commit: Callable[..., bool] = commit,
    ) -> None:
        self._commit = commit
        self._session = session
        self._name = name
        self._version: int | None = None  # of the log, when its newest cut was the caller's
        self._newest: tuple[int, Action] | None = None  # its epoch and add action, if known
        self.path = path

    def open(self, lake: SourceLake) -> tuple[str, bool]:
        """Create the log, or check that it is this source's. Raises OperatorError if it is not.

        Returns the id of the lake's `_epochs`, and whether the log was created.
        """
        epochs_id, _ = identity(self._session, lake.epochs_path)
        wanted = {_SOURCE: lake.source, _EPOCHS: epochs_id}
        if not DeltaTable.isDeltaTable(self._session, self.path):
            empty = self._session.createDataFrame([], SCHEMA)
            table = DeltaTable.create(self._session).location(self.path).addColumns(empty.schema)
            for name, value in {**wanted, **CHECKPOINTS}.items():
                table = table.property(name, value)
            table.execute()
            self._version = 0
            return epochs_id, True
        _, found = identity(self._session, self.path)
        if any(found.get(name) != value for name, value in wanted.items()):
            raise OperatorError(
                f"{self.path} belongs to source {found.get(_SOURCE)} of another or earlier lake,"
                f" not to {lake.source} at {lake.epochs_path}",
                remedy=f"give this {self._name} a separate --target",
            )
        return epochs_id, False

    def last(self) -> EpochCut | None:
        """Return the newest cut; None without one. Spark job, unless the log has it."""
        self._version = current_version(self._session, self.path)
        found = newest_cut(self._session, self.path, self._name)
        self._newest = None if found is None else self._added(found.epoch, self._version)
        return found

    def append_cut(self, cut: EpochCut, *, replace: bool) -> None:
        """Add a cut unless it exists. `replace`: replace the cut of the same epoch."""
        tables = [
            {"table": name, "version": version, "schema_version": cut.schemas[name]}
            for name, version in sorted(cut.tables.items())
        ]
        row = {
            "epoch": cut.epoch,
            "end_lsn": cut.end_lsn,
            "last_commit_ts": cut.last_commit_ts.astimezone(UTC),  # Spark returns local time
            "mirrored_at": datetime.now(UTC),
            "tables": tables,
        }
        # From an Arrow table: Python rows would make Spark start a worker process.
        rows = pa.Table.from_pylist([row], _ARROW_SCHEMA)
        if not self._put(rows, cut.epoch, replace=replace):
            self._written(rows, cut.epoch, replace=replace)

    def _put(self, rows: pa.Table, epoch: int, *, replace: bool) -> bool:
        """Add a cut without Spark; return False if another writer may have committed."""
        known, self._version = self._version, None
        before, self._newest = self._newest, None
        snapshot = snapshot_of(self._session, self.path)
        if known is None or snapshot.version() != known or not is_plain(snapshot):
            return False
        actions: list[Action] = []
        if replace:
            if before is None or before[0] != epoch:
                return False
            actions.append(removed(before[1], time.time_ns() // 1_000_000))
        try:
            added = new_file(self._session, self.path, rows, indexed=["epoch"])
            transaction = AppTransaction(
                _app_id(self._name), epoch, "Update" if replace else "Append"
            )
            is_committed = self._commit(
                self._session, self.path, [*actions, added], transaction, of_version=known
            )
        except (Py4JError, OSError):
            return False  # Spark reports the cause
        if is_committed:
            self._version, self._newest = known + 1, (epoch, added["add"])
        return is_committed

    def _added(self, epoch: int, version: int) -> tuple[int, Action] | None:
        """Return the newest cut's add action, if the commit of that version added nothing else."""
        entries = log_entries(self._session, self.path, version) or []
        adds = [e["add"] for e in entries if "add" in e and e["add"]["dataChange"]]
        if len(adds) != 1:
            return None
        statistics = statistics_of(adds[0].get("stats"))
        bounds = [statistics.get(name, {}).get("epoch") for name in ("minValues", "maxValues")]
        is_it = statistics.get("numRecords") == 1 and bounds == [epoch, epoch]
        return (epoch, adds[0]) if is_it else None

    def _written(self, rows: pa.Table, epoch: int, *, replace: bool) -> None:
        writer = from_arrow(self._session, rows).coalesce(1).write.format("delta")
        if replace:
            CheckedTables().ensure(self._session, self.path)
            writer = writer.mode("overwrite").option("replaceWhere", f"epoch = {epoch}")
        else:
            writer = (
                writer.mode("append")
                .option("txnAppId", _app_id(self._name))
                .option("txnVersion", str(epoch))
            )
        writer.save(self.path)
        newest = self.last()
        if newest is None or newest.epoch != epoch:
            self._version = None  # another run is ahead: leave it to Spark to add no cut twice


def _app_id(name: str) -> str:
    return f"ingestd-{name}/cuts"


def newest_cut(session: SparkSession, path: str, name: str) -> EpochCut | None:
    """Return the newest cut; None without one. Raises OperatorError if the log does not exist.

    `name`: of the job that adds them. Spark job, unless the log's newest entries have the cut.
    """
    newest = NewestFiles(session, path).last_rows(_app_id(name))
    # (with column mapping, files have other column names)
    if newest is None or not set(_ARROW_SCHEMA.names).issubset(newest.column_names):
        return find_cut(session, path)
    row = max(newest.to_pylist(), key=lambda row: row["epoch"])
    return EpochCut.from_row(row | {"last_commit_ts": as_spark_gives(row["last_commit_ts"])})


def find_cut(session: SparkSession, path: str, epoch: int | None = None) -> EpochCut | None:
    """Return the newest cut (at or below `epoch`), read by Spark. Raises as `newest_cut`."""
    try:
        rows = CheckedTables().rows(session, path)
        rows.columns  # noqa: B018 - Connect resolves the table only now
    except AnalysisException as error:
        raise OperatorError(
            f"{path} does not exist: nothing was mirrored there",
            remedy="check the target; `python -m spark_jobs.mirror` creates it",
        ) from error
    if epoch is not None:
        rows = rows.where(f.col("epoch") <= epoch)
    newest = rows.orderBy(f.desc("epoch")).limit(1).collect()
    return EpochCut.from_row(newest[0]) if newest else None
