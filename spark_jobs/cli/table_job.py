"""The command line of the jobs that move one table per source table from epoch to epoch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from spark_jobs.catalog.schema_name import add_catalog
from spark_jobs.cli.arguments import (
    EXIT_DONE,
    EXIT_OPERATOR,
    add_accelerator,
    add_lake,
    add_tables,
    exit_code,
    job_parser,
    lake_uri,
    positive,
    print_error,
    spark_uri,
)
from spark_jobs.session import job_session, session_of_job

if TYPE_CHECKING:
    import argparse

    from spark_jobs.delta_log.acceleration import Accelerator
    from spark_jobs.engine.table_mover import TableJob


def table_job_parser(name: str, description: str, tables: str) -> argparse.ArgumentParser:
    """Return the parser of the job `name`. `tables`: what its tables are called, in the plural."""
    found = job_parser(name, description)
    add_lake(found)
    found.add_argument("--target", required=True, metavar="URI", help=f"where the {tables} are")
    add_tables(found)
    found.add_argument("--once", action="store_true", help="process what is committed, then exit")
    found.add_argument(
        "--interval", type=positive(float), default=1.0, metavar="S", help="seconds between looks"
    )
    found.add_argument(
        "--parallel", type=positive(int), default=4, metavar="N", help="tables in parallel"
    )
    found.add_argument(
        "--rebuild",
        nargs="+",
        default=[],
        metavar="TABLE",
        help=f"first re-create these {tables} from the lake",
    )
    add_catalog(found, tables)
    found.add_argument(
        "--checkpoint", metavar="URI", help="has no effect: the tables record their positions"
    )
    add_accelerator(found)
    return found


def run_table_job(
    chosen: argparse.Namespace,
    make: Callable[[], tuple[TableJob, Mapping[str, str]]],
    *,
    name: str,
    log_name: str,
    stop: threading.Event | None,
    after_commit: Callable[[str], None],
    accelerator: Accelerator | None = None,
    needs_key: bool = False,
) -> int:
    """Run the job that `make` returns, and return its exit code: 1 if a table stopped.

    `make` also returns the settings of the job's sessions. It is called once a session exists, so
    it may import pyspark. `log_name`: of the log of the job's cuts; `stop` ends a continuous run;
    `needs_key`: the job ignores tables without a key. `after_commit` is called after every commit,
    and `accelerator` takes the place of the session's: both for tests.
    """
    lake, target = lake_uri(chosen), spark_uri(chosen.target)
    given = job_session(
        f"ingestd {name} {chosen.source}",
        remote=chosen.remote,
        needs_driver=True,
        settings=None if chosen.catalog is None else chosen.catalog.session_settings,
    )
    from spark_jobs.accelerator.by_driver import accelerator_of  # noqa: PLC0415 - imports pyspark
    from spark_jobs.catalog.table_names import names_in  # noqa: PLC0415
    from spark_jobs.engine.epoch_run import EpochRun  # noqa: PLC0415
    from spark_jobs.lake.source_lake import SourceLake  # noqa: PLC0415 - imports pyspark

    with session_of_job(given) as session:
        job, settings = make()
        run = EpochRun(
            lake=SourceLake(
                session,
                lake,
                chosen.source,
                accelerator=accelerator or accelerator_of(session, is_wanted=chosen.accelerator),
            ),
            target=target,
            log_name=log_name,
            job=job,
            patterns=chosen.tables,
            parallel=chosen.parallel,
            rebuild=set(chosen.rebuild),
            settings=settings,
            after_commit=after_commit,
            names=names_in(session, chosen.catalog, chosen.source, name),
            needs_key=needs_key,
        )
        run.run(once=chosen.once, interval_s=chosen.interval, stop=stop or threading.Event())
    for error in run.stopped.values():
        print_error(error)
    fault = run.names.fault
    if fault is not None:
        print_error(fault)
    if run.stopped:
        return EXIT_OPERATOR
    return EXIT_DONE if fault is None else exit_code(fault)
