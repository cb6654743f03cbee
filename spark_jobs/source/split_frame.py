"""A table's rows in a snapshot held by the driver, as a DataFrame; executors read its splits.

Each table is a separate Python data source, because Spark Connect has no RDDs and its Arrow
functions need pandas. Spark 3.5 has no such sources, so there it is an Arrow function. The splits,
with the DSN and the keys of masks, are in what Spark pickles: no option, plan or message contains
them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
from pydantic import BaseModel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from ingestd.app.connectors import FACTORIES
from ingestd.model.errors import (
    IngestdError,
    OperatorError,
    TableChangedError,
    TableError,
    TransientError,
)
from ingestd.model.schema import Table, TableId
from ingestd.ports import Split
from spark_jobs.lake.types import arrow_schema
from spark_jobs.source.schema import as_spark_takes, spark_schema
from spark_jobs.source.split_batches import batches_of
from spark_jobs.source.table import READER_BYTES

_HAS_SOURCES = importlib.util.find_spec("pyspark.sql.datasource") is not None
_MARK = "ingestd-fault:"
_FAULT = re.compile(re.escape(_MARK) + r"(\{.*?\})(?:$|\n|\\n)", re.MULTILINE)


@dataclass(frozen=True, slots=True, repr=False)
class SnapshotRows:
    """What executors need to read a table. Picklable; contains the DSN, so `repr` hides it.

    `columns`: by the source's names. The splits have no table: use `table`.
    """

    source: str
    kind: str
    settings: BaseModel
    table: Table
    columns: tuple[str, ...]
    splits: tuple[Split, ...]

    @classmethod
    def from_splits(
        cls, source: str, settings: BaseModel, kind: str, table: Table, splits: Sequence[Split]
    ) -> SnapshotRows:
        """Return all columns of the rows in these splits."""
        names = tuple(c.name for c in table.columns)
        bare = replace(table, columns=(), key=(), before=())
        parts = tuple(replace(split, table=bare) for split in splits)
        return cls(source, kind, settings, table, names, parts)

    @property
    def schema(self) -> StructType:
        """The columns by their lake names, and `_cdc_raw`."""
        lake_names = [self.table.column(name).lake_name for name in self.columns]
        return spark_schema(self.table, lake_names, raw=True)

    def __repr__(self) -> str:
        return f"SnapshotRows({self.source}, {self.table.id}, {len(self.splits)} splits)"


def snapshot_frame(session: SparkSession, rows: SnapshotRows) -> DataFrame:
    """Return the rows. Every action reads them again, as long as the snapshot is held.

    Errors in tasks come as Spark's own: `task_fault` returns the original error.
    """
    return _by_source(session, rows) if _HAS_SOURCES else _by_function(session, rows)


def _by_source(session: SparkSession, rows: SnapshotRows) -> DataFrame:
    from pyspark.sql.datasource import (  # noqa: PLC0415 - from Spark 4.0 on
        DataSource,
        DataSourceReader,
        InputPartition,
    )

    name = f"ingestd_snapshot_{rows.table.oid}"

    class SplitReader(DataSourceReader):  # pickled by value, `rows` with it
        def partitions(self) -> Sequence[InputPartition]:
            return [InputPartition(number) for number in range(len(rows.splits))]

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            yield from read_split(rows, partition.value)

    class SnapshotSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return name

        def schema(self) -> StructType:
            return rows.schema

        def reader(self, schema: StructType) -> DataSourceReader:
            del schema
            return SplitReader()

    session.dataSource.register(SnapshotSource)
    frame: DataFrame = session.read.format(name).load()
    return frame


def _by_function(session: SparkSession, rows: SnapshotRows) -> DataFrame:
    """Do the same on Spark 3.5, which needs pandas: a task has one row, its split's number."""

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from read_split(rows, number)

    count = len(rows.splits)
    return session.range(0, count, 1, max(count, 1)).mapInArrow(read, rows.schema)


def read_split(rows: SnapshotRows, number: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a split by COPY, in Arrow batches. Raises TaskFaultError."""
    connector = FACTORIES[rows.kind].create(rows.source, rows.settings, memory_bytes=READER_BYTES)
    split = replace(rows.splits[number], table=rows.table)
    target = arrow_schema(rows.schema)
    try:
        with contextlib.closing(
            batches_of(lambda: iter([connector.page_source(split, rows.columns)]))
        ) as batches:
            for batch in batches:
                if batch.num_rows:
                    yield as_spark_takes(batch, target)
    except IngestdError as error:
        raise TaskFaultError(error) from error


class TaskFaultError(Exception):
    """An IngestdError in a task, in a form that the driver finds in Spark's text."""

    def __init__(self, error: IngestdError) -> None:
        fields = {
            "kind": next(kind.__name__ for kind in _KINDS if isinstance(error, kind)),
            "what": error.what,
            "remedy": error.remedy,
            "reason": getattr(error, "reason", None),
            "table": str(error.table) if isinstance(error, TableError) else None,
        }
        super().__init__(_MARK + json.dumps(fields))


_KINDS = (TransientError, TableChangedError, TableError, OperatorError, IngestdError)
"""From specific to general."""


def task_fault(error: BaseException) -> IngestdError | None:
    """Return the IngestdError that made a Spark task fail; None for any other error."""
    found = _FAULT.search(str(error))
    if found is None:
        return None
    fields = json.loads(found[1])
    kind, what, remedy = fields["kind"], fields["what"], fields["remedy"]
    if kind == TransientError.__name__:
        return TransientError(what, reason=fields["reason"], remedy=remedy)
    if fields["table"] is None:
        return OperatorError(what, remedy=remedy)
    raised = TableChangedError if kind == TableChangedError.__name__ else TableError
    return raised(TableId.parse(fields["table"]), fields["reason"], remedy=remedy)
