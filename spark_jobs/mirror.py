"""Keeps one Delta table per source table equal to the source, all at the same epoch.

It looks for new rows in `_epochs`, moves every changed mirror to the same epoch, then adds a row to
`<target>/_mirror`: a transactionally consistent cut over all tables (`spark_jobs.epochs`).

    python -m spark_jobs.mirror --lake ./lake --source shop --target ./mirror --once
    spark-submit ... spark_jobs/mirror.py --lake s3a://lake --source shop --target s3a://mirror
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from spark_jobs.cli.arguments import add_variant, run_until_stopped
from spark_jobs.cli.table_job import run_table_job, table_job_parser
from spark_jobs.lake.targets import MIRRORS
from spark_jobs.session import ensure_session_has_variant

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from spark_jobs.delta_log.acceleration import Accelerator
    from spark_jobs.engine.table_mover import TableJob


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    found = table_job_parser("mirror", __doc__ or "", "mirrors")
    found.add_argument(
        "--soft-deletes", action="store_true", help="keep deleted rows, with _cdc_deleted_at"
    )
    add_variant(found)
    return found


def main(
    arguments: Sequence[str],
    *,
    stop: threading.Event | None = None,
    after_commit: Callable[[str], None] = lambda _: None,
    job: TableJob | None = None,
    accelerator: Accelerator | None = None,
) -> int:
    """Run the job and return its exit code: 1 if a table stopped.

    `stop` ends a continuous run. For tests: `after_commit` is called after every commit, `job`
    moves the tables, and `accelerator` helps, instead of what the arguments say.
    """
    chosen = parser().parse_args(arguments)
    if chosen.variant:
        ensure_session_has_variant()

    def make() -> tuple[TableJob, Mapping[str, str]]:
        from spark_jobs.delta_log.commits import MERGE_SETTINGS  # noqa: PLC0415 - imports pyspark
        from spark_jobs.mirrors.job import MirrorJob  # noqa: PLC0415 - imports pyspark

        own = MirrorJob(soft_deletes=chosen.soft_deletes, variant=chosen.variant)
        return job or own, MERGE_SETTINGS

    return run_table_job(
        chosen,
        make,
        name="mirror",
        log_name=MIRRORS,
        stop=stop,
        after_commit=after_commit,
        accelerator=accelerator,
    )


def run() -> None:
    """Run the command line, as a console script, a wheel task or by spark-submit."""
    run_until_stopped(lambda arguments, stop: main(arguments, stop=stop))


if __name__ == "__main__":
    run()
