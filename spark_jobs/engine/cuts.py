"""The log of a job's cuts: which version of each table belongs to which epoch.

All tables of a cut show the source as it was at the end of the cut's epoch. A cut contains a table
if the table is complete there: its snapshot is complete, no change is missing, and it is neither
stopped nor dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import functions as f

from ingestd.model.errors import OperatorError
from ingestd.process.clock import utc_now
from spark_jobs.delta_log.commits import CHECKPOINTS
from spark_jobs.delta_log.statements import create, run
from spark_jobs.lake.exchange import from_arrow, to_rows
from spark_jobs.lake.source_lake import utc

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_jobs.delta_log.acceleration import Accelerator
    from spark_jobs.lake.source_lake import SourceLake

_COLUMNS = {
    "epoch": "long",
    "end_lsn": "long",
    "last_commit_ts": "timestamp",
    "mirrored_at": "timestamp",
    "tables": "array<struct<`table`: string, version: long, schema_version: int>>",
}
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
"""_COLUMNS as an Arrow schema."""
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
    def from_row(cls, row: Mapping[str, Any]) -> EpochCut:
        """Return the cut in a row of the log."""
        tables = {t["table"]: t["version"] for t in row["tables"]}
        schemas = {t["table"]: t["schema_version"] for t in row["tables"]}
        return cls(row["epoch"], row["end_lsn"], utc(row["last_commit_ts"]), tables, schemas)


class CutLog:
    """The Delta table at `path`. `name`: the job's, for messages.

    With an accelerator, cuts are added without a Spark job as long as no other writer commits.
    (Maintenance does.)
    """

    def __init__(
        self,
        session: SparkSession,
        path: str,
        name: str,
        accelerator: Accelerator,
    ) -> None:
        self._session = session
        self._name = name
        self._accelerator = accelerator
        self._writer = accelerator.row_writer(session, path, _app_id(name))
        self.path = path

    def open(self, lake: SourceLake, epochs_id: str) -> bool:
        """Create the log, or check that it is of this lake; return whether it was created.

        `epochs_id`: the id of the lake's `_epochs`. Raises OperatorError for a log of another lake.
        """
        wanted = {_SOURCE: lake.source, _EPOCHS: epochs_id}
        there = lake.checked.state(self._session, self.path)
        if there is None:
            run(self._session, create(self.path, _COLUMNS, {**wanted, **CHECKPOINTS}))
            self._writer.look()
            self._writer.follow(None)
            return True
        if any(there.properties.get(name) != value for name, value in wanted.items()):
            raise self.of_another_lake(lake, there.properties.get(_SOURCE))
        return False

    def of_another_lake(self, lake: SourceLake, source: str | None) -> OperatorError:
        """Return the error for a log that belongs to `source` of another lake."""
        return OperatorError(
            f"{self.path} belongs to source {source} of another or earlier lake,"
            f" not to {lake.source} at {lake.epochs_path}",
            remedy=f"give this {self._name} a separate --target",
        )

    def last(self) -> EpochCut | None:
        """Return the newest cut; None without one. Spark job, unless the log has it."""
        self._writer.look()
        found = newest_cut(self._session, self.path, self._name, self._accelerator)
        self._writer.follow(None if found is None else found.epoch)
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
            "last_commit_ts": cut.last_commit_ts,
            "mirrored_at": utc_now(),
            "tables": tables,
        }
        # From an Arrow table: Python rows would make Spark start a worker process.
        rows = pa.Table.from_pylist([row], _ARROW_SCHEMA)
        if not self._writer.put(rows, cut.epoch, replace=replace):
            self._written(rows, cut.epoch, replace=replace)

    def _written(self, rows: pa.Table, epoch: int, *, replace: bool) -> None:
        writer = from_arrow(self._session, rows).coalesce(1).write.format("delta")
        if replace:
            self._accelerator.tables.ensure(self._session, self.path)
            writer = writer.mode("overwrite").option("replaceWhere", f"epoch = {epoch}")
        else:
            writer = (
                writer.mode("append")
                .option("txnAppId", _app_id(self._name))
                .option("txnVersion", str(epoch))
            )
        writer.save(self.path)
        if self._writer.look():
            newest = newest_cut(self._session, self.path, self._name, self._accelerator)
            if newest is not None and newest.epoch == epoch:
                self._writer.follow(epoch)
            # else another run is ahead: leave it to Spark to add no cut twice


def _app_id(name: str) -> str:
    return f"ingestd-{name}/cuts"


def newest_cut(
    session: SparkSession, path: str, name: str, accelerator: Accelerator
) -> EpochCut | None:
    """Return the newest cut; None without one. Raises OperatorError if the log does not exist.

    `name`: of the job that adds them. Spark job, unless the log's newest entries have the cut.
    """
    newest = accelerator.newest(session, path).last_rows(_app_id(name))
    # (with column mapping, files have other column names)
    if newest is None or not set(_ARROW_SCHEMA.names).issubset(newest.column_names):
        return find_cut(session, path, accelerator)
    row = max(newest.to_pylist(), key=lambda row: row["epoch"])
    return EpochCut.from_row(row)


def find_cut(
    session: SparkSession, path: str, accelerator: Accelerator, epoch: int | None = None
) -> EpochCut | None:
    """Return the newest cut (at or below `epoch`), read by Spark. Raises as `newest_cut`."""
    try:
        rows = accelerator.tables.rows(session, path)
        rows.columns  # noqa: B018 - Connect resolves the table only now
    except AnalysisException as error:
        raise OperatorError(
            f"{path} does not exist: nothing was mirrored there",
            remedy="check the target; `python -m spark_jobs.mirror` creates it",
        ) from error
    if epoch is not None:
        rows = rows.where(f.col("epoch") <= epoch)
    newest = to_rows(rows.orderBy(f.desc("epoch")).limit(1))
    return EpochCut.from_row(newest[0]) if newest else None
