"""Keeps one Delta table per source table equal to the source, all of them in step.

One streaming query over `_epochs` moves every changed mirror to the same epoch, then adds a row to
`<target>/_mirror`: a transactionally consistent cut over all tables (`spark_jobs.epochs`).

    python -m spark_jobs.mirror --lake ./lake --source shop --target ./mirror --once
    spark-submit ... spark_jobs/mirror.py --lake s3a://lake --source shop --target s3a://mirror
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


def parser() -> argparse.ArgumentParser:
    """Give the command line's parser."""
    found = job_parser("mirror", __doc__ or "")
    add_lake(found)
    found.add_argument("--target", required=True, metavar="URI", help="where the mirrors are")
    add_tables(found)
    found.add_argument("--once", action="store_true", help="take what there is, and end")
    found.add_argument(
        "--interval", type=positive(float), default=1.0, metavar="S", help="seconds between batches"
    )
    found.add_argument(
        "--soft-deletes", action="store_true", help="keep deleted rows, with _cdc_deleted_at"
    )
    found.add_argument(
        "--parallel", type=positive(int), default=4, metavar="N", help="tables at once"
    )
    found.add_argument(
        "--rebuild",
        nargs="+",
        default=[],
        metavar="TABLE",
        help="make these mirrors anew from the lake first",
    )
    found.add_argument(
        "--checkpoint", metavar="URI", help="the query's; <target>/_mirror_checkpoint without it"
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
        f"ingestd mirror {chosen.source}", remote=chosen.remote, needs_driver=True
    )
    # What follows imports pyspark, of which job_session has seen that it is there.
    from spark_jobs.lake import SourceLake  # noqa: PLC0415
    from spark_jobs.mirroring import MERGE_SETTINGS, Mirroring  # noqa: PLC0415
    from spark_jobs.stream import EpochStream  # noqa: PLC0415
    from spark_jobs.targets import MIRRORS  # noqa: PLC0415

    stream = EpochStream(
        lake=SourceLake(session, lake, chosen.source),
        target=target,
        log_name=MIRRORS,
        job=Mirroring(soft_deletes=chosen.soft_deletes),
        patterns=chosen.tables,
        parallel=chosen.parallel,
        rebuild=set(chosen.rebuild),
        settings=MERGE_SETTINGS,
        after_commit=after_commit,
    )
    stream.run(
        chosen.checkpoint or f"{target}/{MIRRORS}_checkpoint",
        once=chosen.once,
        interval_s=chosen.interval,
        stop=stop or threading.Event(),
    )
    for error in stream.stopped.values():
        sys.stderr.write(f"{error}\n")
    return EXIT_OPERATOR if stream.stopped else EXIT_DONE


if __name__ == "__main__":
    run_until_stopped(lambda arguments, stop: main(arguments, stop=stop))
