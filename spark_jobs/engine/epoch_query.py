"""The streaming query that delivers new epochs, and the errors that it ends with."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import functions as f

from ingestd.model.errors import OperatorError
from spark_jobs.delta_log.checked_tables import ensure_read_within
from spark_jobs.lake.source_lake import EPOCH_COLUMNS, Epoch
from spark_jobs.spark_errors import meaning_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from spark_jobs.lake.source_lake import SourceLake

_EVERY_FILE = str(1 << 30)
"""A batch takes all new epochs: fewer, larger batches need fewer merges."""
_POLL_S = 1
_FILE = "_file"
"""Column with the file that a row was read from, to check that it is the table's own."""
_ROWS_CHANGED = ("DELTA_SOURCE_IGNORE_DELETE", "DELTA_SOURCE_TABLE_IGNORE_CHANGES")
_LOG_GONE = ("DELTA_LOG_FILE_NOT_FOUND", "DELTA_VERSIONS_NOT_CONTIGUOUS", "DELTA_FILE_NOT_FOUND")


@dataclass(slots=True)
class EpochQuery:
    """Calls `take` with the epochs of each micro-batch, unordered, on a thread of the query."""

    lake: SourceLake
    name: str
    checkpoint: str
    take: Callable[[list[Epoch]], None]
    _fault: Exception | None = field(default=None, init=False)

    def run(
        self,
        *,
        once: bool,
        interval_s: float,
        stop: threading.Event,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Process the available epochs (`once`), or continue until `stop` is set.

        `meanwhile` is called regularly on the caller's thread. Raises what `take` and `meanwhile`
        raise, and OperatorError for a checkpoint that can't be continued.
        """
        query = self._start(once=once, interval_s=interval_s)
        try:
            while not query.awaitTermination(_POLL_S):
                if not stop.is_set():
                    meanwhile()
                if stop.is_set():
                    query.stop()
        except StreamingQueryException as error:
            if not stop.is_set():
                raise self._cause(error) from error
        finally:
            _end(query)

    def _start(self, *, once: bool, interval_s: float) -> StreamingQuery:
        epochs = (
            self.lake.session.readStream.format("delta")
            .option("maxFilesPerTrigger", _EVERY_FILE)
            .load(self.lake.epochs_path)
            .select(*EPOCH_COLUMNS, f.input_file_name().alias(_FILE))
        )
        writer = (
            epochs.writeStream.queryName(self.name)
            .foreachBatch(self._batch)
            .option("checkpointLocation", self.checkpoint)
        )
        if once:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{interval_s} seconds").start()

    def _batch(self, rows: DataFrame, _: int) -> None:
        try:
            found = rows.collect()
            ensure_read_within(
                self.lake.session, self.lake.epochs_path, {row[_FILE] for row in found}
            )
            self.take([Epoch.from_row(row) for row in found])
        except Exception as error:  # noqa: BLE001 - `run` raises it
            self._fault = error
            # Without its text: Spark matches it with a regular expression that overflows the stack.
            raise RuntimeError(type(error).__name__) from None

    def _cause(self, error: StreamingQueryException) -> BaseException:
        """Return the error that ended a query: our own, or the meaning of Spark's."""
        if self._fault is not None and not isinstance(self._fault, (PySparkException, Py4JError)):
            return self._fault
        text = str(self._fault or error)
        if "DIFFERENT_DELTA_TABLE_READ_BY_STREAMING_SOURCE" in text:
            return OperatorError(
                f"the checkpoint {self.checkpoint} does not belong to {self.lake.epochs_path}",
                remedy="use a separate --checkpoint; the tables store their own positions",
            )
        if any(sign in text for sign in _ROWS_CHANGED):
            return OperatorError(
                f"rows of {self.lake.epochs_path} were changed or removed; nothing was skipped",
                remedy="restore `_epochs` to the version before, or start over in a new --target",
            )
        if any(sign in text for sign in _LOG_GONE):
            return OperatorError(
                f"the log of {self.lake.epochs_path} was cleaned up past the checkpoint",
                remedy=f"remove {self.checkpoint}: nothing will be applied twice or skipped",
            )
        if "sources in the checkpoint" in text:
            return OperatorError(
                f"the checkpoint {self.checkpoint} was written by another version of ingestd",
                remedy=f"remove {self.checkpoint}: nothing will be applied twice or skipped",
            )
        return meaning_of(self._fault or error)


def _end(query: StreamingQuery) -> None:
    """Stop a query that is still running. Its own faults would hide the error that ended it."""
    with suppress(PySparkException, Py4JError, ConnectionError, EOFError):
        if query.isActive:
            query.stop()
