"""Keeps a change feed of each table with a key: every change with all of its values, append-only.

It looks for new rows in `_epochs`, appends all changes up to the same epoch, then adds a row to
`<target>/_feed`. docs/change-feeds.md describes the feeds and their consumers.

    python -m spark_jobs.feed --lake ./lake --source shop --target ./feeds --once
    spark-submit ... spark_jobs/feed.py --lake s3a://lake --source shop --target s3a://feeds
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from spark_jobs.cli.arguments import run_until_stopped
from spark_jobs.cli.table_job import run_table_job, table_job_parser
from spark_jobs.lake.targets import FEEDS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from spark_jobs.engine.table_mover import TableJob


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    return table_job_parser("feed", __doc__ or "", "feeds")


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

    def make() -> tuple[TableJob, Mapping[str, str]]:
        from spark_jobs.feeds.job import FEED_SETTINGS, FeedJob  # noqa: PLC0415 - imports pyspark

        return FeedJob(), FEED_SETTINGS

    return run_table_job(
        chosen,
        make,
        name="feed",
        log_name=FEEDS,
        stop=stop,
        after_commit=after_commit,
        needs_key=True,
    )


def run() -> None:
    """Run the command line, as a console script, a wheel task or by spark-submit."""
    run_until_stopped(lambda arguments, stop: main(arguments, stop=stop))


if __name__ == "__main__":
    run()
