"""`spark.read.format("ingestd")`: tables of a source, read from Postgres at a consistent point.

::

    spark.dataSource.register(IngestdDataSource)
    orders = (
        spark.read.format("ingestd")
        .option("config", "ingestd.toml").option("source", "shop").option("table", "public.orders")
        .load()
    )

The rows have the lake's types, the column settings of the config, and `_cdc_raw` for values that
their columns can't represent. Tasks read with COPY, use the splits and the page source of the
daemon's snapshots, and return Arrow batches. All tasks of a query read one snapshot, even of
several tables: `spark_jobs.source.exported_snapshot` describes how, and when the snapshot ends.
docs/spark-datasource.md lists the options.

Spark 4.2 limits a Python data source as follows (read in its source code, and tested):

- No column pruning: every column of `load()` is read, unless the option `columns` (or a schema)
  selects some.
- No limit pushdown: use the option `limit`.
- Filter pushdown is not safe. Planning a filtered read stores its partitions in the *loaded*
  DataFrame (PythonDataSourceV2.setReadInfo), and every later read of that DataFrame uses them,
  even one without filters. In a self join of two filtered sides, both use the last one's. So
  filters are pushed down only with the option `pushdown`, for a `load()` that is read through one
  filter; a second, different filter is refused where it can be detected. The option `where` is
  safe.

The pickled reader contains the config's secrets; Spark sends it to executors like any function.
No option, plan or message contains them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from ingestd.model.predicates import Predicate
from ingestd.ports import Connector, PageSource, Split
from spark_jobs.lake.types import arrow_schema
from spark_jobs.source.filters import predicate_of
from spark_jobs.source.keeper_process import jvm_pid, keeper_of, listening_host
from spark_jobs.source.keeper_protocol import KeeperAddress
from spark_jobs.source.lease import Lease, leased, register
from spark_jobs.source.options import FORMAT, SourceOptions, parse_options
from spark_jobs.source.read_plan import ReadPlan
from spark_jobs.source.schema import as_spark_takes, chosen, spark_schema
from spark_jobs.source.split_batches import batches_of
from spark_jobs.source.table import SourceTable, find_table

_EXECUTION = ("spark.sql.execution.root.id", "spark.sql.execution.id")
"""Local properties of a task: the outermost execution that it belongs to, and its own."""


class IngestdDataSource(DataSource):
    """See the module. Spark creates one per `load()`, in a separate process on the driver."""

    _source: SourceTable | None = None

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._load = uuid4().hex

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return FORMAT

    def schema(self) -> StructType:
        """Return the table's columns, as config and options select them. Raises IngestdError.

        The catalog is read once per `load()`: all its reads use that definition, and fail if the
        table has changed.
        """
        options = parse_options(self.options)
        return spark_schema(self._found(options).table, options.columns, raw=options.raw)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of these columns. Raises IngestdError."""
        options = parse_options(self.options)
        kind = FilteredReader if options.pushdown and options.limit is None else SourceReader
        return kind(options, self._found(options), schema, self._load)

    def _found(self, options: SourceOptions) -> SourceTable:
        if self._source is None:
            self._source = asyncio.run(find_table(options))
        return self._source


@dataclass(frozen=True, slots=True)
class SourcePartition(InputPartition):
    """The work of one task: its number in the plan that the keeper holds."""

    keeper: KeeperAddress
    plan_id: str
    number: int


class SourceReader(DataSourceReader):
    """Plans on the driver and reads in tasks. Spark pickles it in between."""

    def __init__(
        self, options: SourceOptions, source: SourceTable, schema: StructType, load: str
    ) -> None:
        columns, _ = chosen(schema, source.table)
        self._options = options
        self._source = source
        self._columns = [column.name for column in columns]
        self._schema = schema
        self._load = load
        self._predicates: list[Predicate] = []

    def partitions(self) -> Sequence[InputPartition]:
        """Register the plan and return its partitions. Raises IngestdError.

        The plan holds nothing open in the database.
        """
        options = self._options
        dsn = self._source.settings.dsn.get_secret_value()  # type: ignore[attr-defined] # all kinds
        keeper = keeper_of(jvm_pid(), options.keeper_host or listening_host(dsn))
        plan = ReadPlan(
            self._source,
            partitions=options.partitions if options.limit is None else 1,
            split_bytes=options.split_bytes,
            resumable=options.resumable,
            idle_s=options.snapshot_idle,
            limit_s=options.snapshot_limit,
            load=self._load,
            filters=self._filters,
        )
        plan_id, count = register(keeper, plan)
        return [SourcePartition(keeper, plan_id, number) for number in range(count)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition's splits. Raises IngestdError."""
        assert isinstance(partition, SourcePartition)
        if self._options.limit == 0:
            return
        target = arrow_schema(self._schema)
        left = self._options.limit
        with _lease_of(partition) as lease:
            connector = self._source.connector()
            splits = lease.granted.splits
            with contextlib.closing(
                batches_of(lambda: (self._page_source(connector, split) for split in splits))
            ) as batches:
                for batch in batches:
                    rows = batch if left is None else batch.slice(0, left)
                    if rows.num_rows:
                        yield as_spark_takes(rows, target)
                    if left is not None:
                        left -= rows.num_rows
                        if left == 0:
                            break
            lease.confirm_complete()

    @property
    def _filters(self) -> str:
        """An identifier of the predicates that does not contain their values."""
        if not self._predicates:
            return ""
        return hashlib.sha256(repr(self._predicates).encode()).hexdigest()

    def _page_source(self, connector: Connector, split: Split) -> PageSource:
        # The split came through the keeper without its table, which this reader already has.
        split = replace(split, table=self._source.table)
        return connector.page_source(split, self._columns, self._predicates)


class FilteredReader(SourceReader):
    """A reader that accepts filters, for one plan only: see the module."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Accept the filters that Postgres applies exactly as Spark would; yield the others."""
        columns = {column.lake_name: column for column in self._source.table.columns}
        for found in filters:
            predicate = predicate_of(found, columns)
            if predicate is None:
                yield found
            else:
                self._predicates.append(predicate)


def _lease_of(partition: SourcePartition) -> AbstractContextManager[Lease]:
    return leased(partition.keeper, partition.plan_id, _execution(), partition.number)


def _execution() -> str | None:
    context = TaskContext.get()
    if context is None:
        return None
    return next((found for name in _EXECUTION if (found := context.getLocalProperty(name))), None)
