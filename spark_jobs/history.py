"""Keeps every version of every row: one Delta table per source table (SCD type 2).

One streaming query over `_epochs` moves every changed history to the same epoch, then adds a row to
`<target>/_history`. docs/history.md says what the tables have and how a time is to be understood.

    python -m spark_jobs.history --lake ./lake --source shop --target ./history --once
    spark-submit ... spark_jobs/history.py --lake s3a://lake --source shop --target s3a://history
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from spark_jobs.command import (
    EXIT_DONE,
    EXIT_OPERATOR,
    add_lake,
    add_tables,
    job_parser,
    lake_uri,
    positive,
    run_until_stopped,
    spark_uri,
)
from spark_jobs.session import job_session

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from pyspark.sql import DataFrame, SparkSession


def as_of(spark: SparkSession, target: str, table: str, at: datetime) -> DataFrame:
    """Give a table's rows as they were at a time. See `spark_jobs.history_views.as_of`."""
    from spark_jobs import history_views  # noqa: PLC0415 - pyspark only where it is used

    return history_views.as_of(spark, target, table, at)


def as_of_lsn(spark: SparkSession, target: str, table: str, lsn: int | str) -> DataFrame:
    """Give a table's rows as of a position. See `spark_jobs.history_views.as_of_lsn`."""
    from spark_jobs import history_views  # noqa: PLC0415 - pyspark only where it is used

    return history_views.as_of_lsn(spark, target, table, lsn)


def parser() -> argparse.ArgumentParser:
    """Give the command line's parser."""
    found = job_parser("history", __doc__ or "")
    add_lake(found)
    found.add_argument("--target", required=True, metavar="URI", help="where the histories are")
    add_tables(found)
    found.add_argument("--once", action="store_true", help="take what there is, and end")
    found.add_argument(
        "--interval", type=positive(float), default=1.0, metavar="S", help="seconds between batches"
    )
    found.add_argument(
        "--parallel", type=positive(int), default=4, metavar="N", help="tables at once"
    )
    found.add_argument(
        "--rebuild",
        nargs="+",
        default=[],
        metavar="TABLE",
        help="make these histories anew from the lake first",
    )
    found.add_argument(
        "--checkpoint", metavar="URI", help="the query's; <target>/_history_checkpoint without it"
    )
    return found


def main(
    arguments: Sequence[str],
    *,
    stop: threading.Event | None = None,
    after_commit: Callable[[str], None] = lambda _: None,
) -> int:
    """Run the job; give its exit code: 1 if a table stopped.

    `stop` ends a continuous run; `after_commit` is called after every commit, for tests.
    """
    chosen = parser().parse_args(arguments)
    lake, target = lake_uri(chosen), spark_uri(chosen.target)
    session = job_session(
        f"ingestd history {chosen.source}", remote=chosen.remote, needs_driver=True
    )
    # What follows imports pyspark, of which job_session has seen that it is there.
    from spark_jobs.history_moving import SETTINGS, Histories  # noqa: PLC0415
    from spark_jobs.lake import SourceLake  # noqa: PLC0415
    from spark_jobs.stream import EpochStream  # noqa: PLC0415
    from spark_jobs.targets import HISTORIES  # noqa: PLC0415

    stream = EpochStream(
        lake=SourceLake(session, lake, chosen.source),
        target=target,
        log_name=HISTORIES,
        job=Histories(),
        patterns=chosen.tables,
        parallel=chosen.parallel,
        rebuild=set(chosen.rebuild),
        settings=SETTINGS,
        after_commit=after_commit,
    )
    stream.run(
        chosen.checkpoint or f"{target}/{HISTORIES}_checkpoint",
        once=chosen.once,
        interval_s=chosen.interval,
        stop=stop or threading.Event(),
    )
    for error in stream.stopped.values():
        sys.stderr.write(f"{error}\n")
    return EXIT_OPERATOR if stream.stopped else EXIT_DONE


if __name__ == "__main__":
    run_until_stopped(lambda arguments, stop: main(arguments, stop=stop))
