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
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from uuid import uuid4

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from spark_jobs.source.filters import predicate_of
from spark_jobs.source.keeper_process import jvm_pid
from spark_jobs.source.options import FORMAT, SourceOptions, parse_options
from spark_jobs.source.schema import chosen, spark_schema
from spark_jobs.source.table import SourceTable, find_table
from spark_jobs.source.table_read import PlannedRead, ReadTask


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
        return spark_schema(
            self._find_source_table(options).table, options.columns, raw=options.raw
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of these columns. Raises IngestdError."""
        options = parse_options(self.options)
        kind = FilteredReader if options.pushdown and options.limit is None else SourceReader
        return kind(PlannedRead(options, self._find_source_table(options), schema, self._load))

    def _find_source_table(self, options: SourceOptions) -> SourceTable:
        if self._source is None:
            self._source = asyncio.run(find_table(options))
        return self._source


class SourcePartition(InputPartition):
    """The work of one task."""

    def __init__(self, task: ReadTask) -> None:
        super().__init__(task.number)
        self.task = task


class SourceReader(DataSourceReader):
    """Plans on the driver and reads in tasks. Spark pickles it in between."""

    def __init__(self, read: PlannedRead) -> None:
        chosen(read.schema, read.source.table)  # which refuses columns that are not the table's
        self._read = read

    def partitions(self) -> Sequence[InputPartition]:
        """Register the plan and return its partitions. Raises IngestdError."""
        return [SourcePartition(task) for task in self._read.tasks(jvm_pid())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a partition's splits. Raises IngestdError."""
        assert isinstance(partition, SourcePartition)
        yield from self._read.batches(partition.task)


class FilteredReader(SourceReader):
    """A reader that accepts filters, for one plan only: see the module."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Accept the filters that Postgres applies exactly as Spark would; yield the others."""
        columns = {column.lake_name: column for column in self._read.source.table.columns}
        for found in filters:
            predicate = predicate_of(found, columns)
            if predicate is None:
                yield found
            else:
                accepted = (*self._read.predicates, predicate)
                self._read = replace(self._read, predicates=accepted)
