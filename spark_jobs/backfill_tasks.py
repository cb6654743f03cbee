"""Runs the tasks of a backfill by Spark: one for each split."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import PySparkException

from ingestd.errors import OperatorError, TransientError
from ingestd.schema import TableId
from spark_jobs.backfill_record import Note
from spark_jobs.backfill_splits import Failure, Order, SplitReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_RESULT = "number long, outcome string"
_SCHEMA = pa.schema([("number", pa.int64()), ("outcome", pa.string())])


class SparkTasks:
    """See `spark_jobs.backfill_driver.SplitRunner`. With Spark Connect too: no RDD is used.

    What tasks need, the source's secrets included, goes with the pickled function: it is in no
    plan that Spark shows.
    """

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._tag = f"ingestd-backfill-{uuid.uuid4().hex}"

    def run(self, reader: SplitReader, orders: Sequence[Order]) -> list[Note | Failure]:
        """Read splits, each in a task of its own."""
        waiting = list(orders)

        def read_splits(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    outcome = to_text(reader.read(waiting[number]))
                    yield pa.RecordBatch.from_pylist(
                        [{"number": number, "outcome": outcome}], _SCHEMA
                    )

        count = len(waiting)
        self._session.addTag(self._tag)
        try:
            tasks = self._session.range(0, count, 1, count).mapInArrow(read_splits, _RESULT)
            found = {row["number"]: of_text(row["outcome"]) for row in tasks.collect()}
        except PySparkException as error:
            raise _failed(error) from error
        finally:
            self._session.removeTag(self._tag)
        return [found[number] for number in range(count)]

    def cancel(self) -> None:
        """Interrupt the tasks."""
        self._session.interruptTag(self._tag)


def to_text(outcome: Note | Failure) -> str:
    """Write what a task came to."""
    if isinstance(outcome, Note):
        return json.dumps({"note": outcome.to_json()})
    found: dict[str, Any] = asdict(outcome)
    table = outcome.table
    return json.dumps({"failure": found | {"table": None if table is None else str(table)}})


def of_text(text: str) -> Note | Failure:
    """Read what `to_text` wrote."""
    found = json.loads(text)
    if "note" in found:
        return Note.from_json(found["note"])
    failure = found["failure"]
    table = failure["table"]
    return Failure(**failure | {"table": None if table is None else TableId.parse(table)})


def _failed(error: PySparkException) -> OperatorError | TransientError:
    """Say what became of the tasks, by the last line of what Python said in one of them."""
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    if any("ModuleNotFoundError" in line for line in said):
        [line] = [line for line in said if "ModuleNotFoundError" in line][:1]
        return OperatorError(
            f"an executor can't run the tasks: {line}",
            remedy="executors need this package: pip install 'ingestd[spark]' in their Python, or"
            " spark-submit --archives",
        )
    what = said[0] if said else type(error).__name__
    return TransientError(
        f"Spark gave up a task: {what}",
        reason="spark",
        remedy="run this again: splits that were read are not read again",
    )
