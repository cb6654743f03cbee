"""Keeps every version of every row: one Delta table per source table (SCD type 2).

It looks for new rows in `_epochs`, moves every changed history to the same epoch, then adds a row
to `<target>/_history`. docs/history.md describes the tables and the meaning of a time.

    python -m spark_jobs.history --lake ./lake --source shop --target ./history --once
    spark-submit ... spark_jobs/history.py --lake s3a://lake --source shop --target s3a://history
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from spark_jobs.cli.arguments import add_variant, run_until_stopped
from spark_jobs.cli.table_job import run_table_job, table_job_parser
from spark_jobs.lake.targets import HISTORIES
from spark_jobs.session import ensure_session_has_variant

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from pyspark.sql import DataFrame, SparkSession

    from spark_jobs.engine.table_mover import TableJob


def as_of(spark: SparkSession, target: str, table: str, at: datetime) -> DataFrame:
    """Return a table's rows as they were at a time. See `spark_jobs.histories.views.as_of`."""
    from spark_jobs.histories import views as history_views  # noqa: PLC0415 - pyspark only where it is used

    return history_views.as_of(spark, target, table, at)


def as_of_lsn(spark: SparkSession, target: str, table: str, lsn: int | str) -> DataFrame:
    """Return a table's rows as of a position. See `spark_jobs.histories.views.as_of_lsn`."""
    from spark_jobs.histories import views as history_views  # noqa: PLC0415 - pyspark only where it is used

    return history_views.as_of_lsn(spark, target, table, lsn)


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    found = table_job_parser("history", __doc__ or "", "histories")
    add_variant(found)
    return found


def main(
    arguments: Sequence[str],
    *,
    stop: threading.Event | None = None,
    after_commit: Callable[[str], None] = lambda _: None,
) -> int:
    """Run the job and return its exit code: 1 if a table stopped.

    `stop` ends a continuous run; `after_commit` is called after every commit, for tests.
    """
    chosen = parser().parse_args(arguments)
    if chosen.variant:
        ensure_session_has_variant()

    def make() -> tuple[TableJob, Mapping[str, str]]:
        from spark_jobs.delta_log.commits import MERGE_SETTINGS  # noqa: PLC0415 - imports pyspark
        from spark_jobs.histories.job import HistoryJob  # noqa: PLC0415 - imports pyspark

        return HistoryJob(variant=chosen.variant), MERGE_SETTINGS

    return run_table_job(
        chosen, make, name="history", log_name=HISTORIES, stop=stop, after_commit=after_commit
    )


def run() -> None:
    """Run the command line, as a console script, a wheel task or by spark-submit."""
    run_until_stopped(lambda arguments, stop: main(arguments, stop=stop))


if __name__ == "__main__":
    run()
