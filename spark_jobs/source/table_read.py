"""A read of a table of a source: planned by the driver, and read in tasks.

`read_table` is for versions of Spark without `spark.read.format("ingestd")`, which reads the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import StructType

from ingestd.model.errors import ConfigError, OperatorError
from ingestd.model.predicates import Predicate
from ingestd.ports import Connector, PageSource, Split
from spark_jobs.delta_log.tables import is_connect
from spark_jobs.lake.types import arrow_schema
from spark_jobs.source.keeper_process import keeper_of, listening_host
from spark_jobs.source.keeper_protocol import KeeperAddress
from spark_jobs.source.lease import leased, register
from spark_jobs.source.options import SourceOptions, parse_options
from spark_jobs.source.read_plan import ReadPlan
from spark_jobs.source.schema import as_spark_takes, chosen, spark_schema
from spark_jobs.source.split_batches import batches_of
from spark_jobs.source.table import SourceTable, find_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_EXECUTION = ("spark.sql.execution.root.id", "spark.sql.execution.id")
"""Local properties of a task: the outermost execution that it belongs to, and its own."""


def read_table(session: SparkSession, **options: object) -> DataFrame:
    """Return a table of a source, by the options of `format("ingestd")` (but not `pushdown`).

    For Spark 3.5, which has no Python data sources; it needs pandas on the driver. All tasks of an
    action read one snapshot, even of several tables; the next action reads a new one. Raises
    IngestdError.
    """
    if is_connect(session):
        raise OperatorError(
            "read_table can't run on a Spark Connect server: a process beside the driver holds the"
            " snapshot",
            remedy='spark.read.format("ingestd"), from Spark 4.1 on',
        )
    given = parse_options({name: _text(value) for name, value in options.items()})
    if given.pushdown:
        raise ConfigError("option pushdown: read_table can't have it", remedy="use `where`")
    with ThreadPoolExecutor(1) as one:  # (a notebook's own thread may have a loop already)
        source = one.submit(lambda: asyncio.run(find_table(given))).result()
    schema = spark_schema(source.table, given.columns, raw=given.raw)
    read = PlannedRead(given, source, schema, uuid4().hex)
    tasks = read.tasks(os.getpid())

    def read_all(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from read.batches(tasks[number])

    return session.range(0, len(tasks), 1, len(tasks)).mapInArrow(read_all, schema)


def _text(value: object) -> str:
    if isinstance(value, bool | list | tuple):
        return json.dumps(value)
    return str(value)


@dataclass(frozen=True, slots=True)
class ReadTask:
    """The work of one task: its number in the plan that the keeper holds."""

    keeper: KeeperAddress
    plan_id: str
    number: int


@dataclass(frozen=True, slots=True, repr=False)
class PlannedRead:
    """What tasks need to read a table. Picklable; contains the DSN, so `repr` hides it.

    `load`: identifies the DataFrame that was loaded.
    """

    options: SourceOptions
    source: SourceTable
    schema: StructType
    load: str
    predicates: tuple[Predicate, ...] = ()

    def tasks(self, driver_pid: int) -> list[ReadTask]:
        """Register the plan and return its tasks. Raises IngestdError.

        The plan holds nothing open in the database. `driver_pid`: the process whose end ends the
        keeper.
        """
        options = self.options
        dsn = self.source.settings.dsn.get_secret_value()  # type: ignore[attr-defined] # all kinds
        keeper = keeper_of(driver_pid, options.keeper_host or listening_host(dsn))
        plan = ReadPlan(
            self.source,
            partitions=options.partitions if options.limit is None else 1,
            split_bytes=options.split_bytes,
            resumable=options.resumable,
            idle_s=options.snapshot_idle,
            limit_s=options.snapshot_limit,
            load=self.load,
            filters=self._filters,
        )
        plan_id, count = register(keeper, plan)
        return [ReadTask(keeper, plan_id, number) for number in range(count)]

    def batches(self, task: ReadTask) -> Iterator[pa.RecordBatch]:
        """Read a task's splits. Raises IngestdError."""
        if self.options.limit == 0:
            return
        target = arrow_schema(self.schema)
        left = self.options.limit
        with leased(task.keeper, task.plan_id, _execution(), task.number) as lease:
            connector = self.source.connector()
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

    def __repr__(self) -> str:
        return f"PlannedRead({self.source!r})"

    @property
    def _filters(self) -> str:
        """An identifier of the predicates that does not contain their values."""
        if not self.predicates:
            return ""
        return hashlib.sha256(repr(list(self.predicates)).encode()).hexdigest()

    def _page_source(self, connector: Connector, split: Split) -> PageSource:
        # The split came through the keeper without its table, which this reader already has.
        split = replace(split, table=self.source.table)
        columns, _ = chosen(self.schema, self.source.table)
        names = [column.name for column in columns]
        return connector.page_source(split, names, list(self.predicates))


def _execution() -> str | None:
    context = TaskContext.get()
    if context is None:
        return None
    return next((found for name in _EXECUTION if (found := context.getLocalProperty(name))), None)
