"""Runs the tasks of a backfill on Spark, one per split."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pyspark.sql.functions import udf

from ingestd.model.errors import OperatorError, TransientError
from ingestd.model.recorded import Recorded
from ingestd.model.schema import TableId
from spark_jobs.backfills.record import Note
from spark_jobs.backfills.task import BackfillReader, Failure, SplitOrder
from spark_jobs.delta_log.faults import SPARK_ERRORS
from spark_jobs.delta_log.tables import is_connect
from spark_jobs.spark_errors import meaning_of

AT_ONCE = 2_000
"""Orders per Spark job. Every task of a job receives all of them."""

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkTasks:
    """See `spark_jobs.backfills.reading.SplitRunner`. Uses no RDD, so Spark Connect works, too.

    The pickled function carries everything that tasks need, including the source's secrets. No
    plan that Spark shows contains them.
    """

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        # A classic session of Spark 3.5 can't add tags; a Connect session has no context.
        context = None if is_connect(session) else session.sparkContext
        self._add_tag = session.addTag if context is None else context.addJobTag
        self._remove_tag = session.removeTag if context is None else context.removeJobTag
        self._cancel_tag = session.interruptTag if context is None else context.cancelJobsWithTag
        self._tag = f"ingestd-backfill-{uuid.uuid4().hex}"

    def run(self, reader: BackfillReader, orders: Sequence[SplitOrder]) -> list[Note | Failure]:
        """Read splits, each in a separate task."""
        self._add_tag(self._tag)
        try:
            return [
                outcome
                for first in range(0, len(orders), AT_ONCE)
                for outcome in self._run(reader, orders[first : first + AT_ONCE])
            ]
        except SPARK_ERRORS as error:
            raise _failed(error) from error
        finally:
            self._remove_tag(self._tag)

    def _run(self, reader: BackfillReader, orders: Sequence[SplitOrder]) -> list[Note | Failure]:
        waiting = list(orders)

        def read_split(number: int) -> str:
            return to_text(reader.read(waiting[number]))

        # A row-at-a-time function: Arrow functions need pandas, which nothing else here needs.
        read = udf(read_split, "string", useArrow=False).asNondeterministic()
        count = len(waiting)
        tasks = self._session.range(0, count, 1, count).select("id", read("id").alias("outcome"))
        found = {row["id"]: of_text(row["outcome"]) for row in tasks.collect()}
        return [found[number] for number in range(count)]

    def cancel(self) -> None:
        """Interrupt the tasks."""
        self._cancel_tag(self._tag)


def to_text(outcome: Note | Failure) -> str:
    """Return a task's outcome as JSON."""
    if isinstance(outcome, Note):
        return json.dumps({"note": outcome.to_json()})
    found: dict[str, Any] = asdict(outcome)
    table = outcome.table
    return json.dumps({"failure": found | {"table": None if table is None else str(table)}})


def of_text(text: str) -> Note | Failure:
    """Return the outcome that `to_text` wrote."""
    found = json.loads(text)
    if "note" in found:
        return Note.parse(Recorded(found["note"]))
    failure = found["failure"]
    table = failure["table"]
    return Failure(**failure | {"table": None if table is None else TableId.parse(table)})


def _failed(error: Exception) -> OperatorError | TransientError:
    """Return an error that says why the tasks failed, without Spark's long text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lacking = next((line for line in lines if "ModuleNotFoundError" in line), None)
    if lacking is not None:
        return OperatorError(
            f"an executor can't run the tasks: {lacking}",
            remedy="install this package on the executors: pip install 'ingestd[spark]', or"
            " spark-submit --archives",
        )
    return TransientError(
        f"Spark gave up a task: {meaning_of(error).what}",
        reason="spark",
        remedy="run this again: it skips the splits that are already read",
    )
