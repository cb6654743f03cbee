"""Backfill: the snapshot of very large tables, read by Spark executors (docs/backfill.md).

The daemon must not run on the source meanwhile. When it starts again, it continues from the point
at which the rows were read. If a run was killed, the same command resumes it. Tables that are
already live are left as they are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from ingestd.config import Config
from ingestd.config.units import size_bytes
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.store.local_store import LocalStore
from ingestd.model.errors import ConfigError, TransientError
from ingestd.model.schema import TableId
from spark_jobs.backfills.driver import Backfill, BackfillOutcome
from spark_jobs.backfills.reading import BackfillPolicy, SplitRunner
from spark_jobs.backfills.task import BackfillReader
from spark_jobs.cli.arguments import (
    EXIT_DONE,
    EXIT_OPERATOR,
    EXIT_TRANSIENT,
    job_parser,
    print_error,
    require_config,
    run_coroutine,
    run_job,
)
from spark_jobs.session import job_session, running_session

SPLIT_BYTES = "64MB"


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code. Raises IngestdError."""
    chosen = parser().parse_args(arguments)
    config = require_config(chosen)
    tables = [_table_id(text) for text in chosen.tables]
    is_given = not chosen.remote and running_session() is not None
    session = job_session(f"ingestd backfill {chosen.source}", remote=chosen.remote)
    from spark_jobs.backfills.runner import SparkTasks  # noqa: PLC0415 - needs pyspark

    runner = SparkTasks(session)
    size, again = chosen.split_bytes, chosen.again
    backfill = build(config, chosen.source, runner, split_bytes=size, again=again)
    try:
        return report(run_coroutine(backfill.run(tables)))
    finally:
        if not is_given:
            session.stop()


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    assert __doc__ is not None
    found = job_parser("backfill", __doc__)
    found.add_argument("tables", nargs="+", metavar="TABLE", help="schema.table, as in the source")
    found.add_argument(
        "--split-bytes",
        type=_size,
        default=size_bytes(SPLIT_BYTES),
        metavar="SIZE",
        help=f"about how much of a table a task reads (default {SPLIT_BYTES})",
    )
    found.add_argument(
        "--again", action="store_true", help="read tables that are live already, too"
    )
    return found


def _size(text: str) -> int:
    try:
        return size_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _table_id(text: str) -> TableId:
    try:
        return TableId.parse(text)
    except ValueError as error:
        raise ConfigError(f"TABLE: {error}") from error


def build(
    config: Config,
    source: str,
    runner: SplitRunner,
    *,
    split_bytes: int,
    again: bool = False,
    print_line: Callable[[str], None] | None = None,
    reached: Callable[[str], None] = lambda _: None,
) -> Backfill:
    """Return a backfill of one source of the config."""
    settings = config.sources[source]
    options = {k: v.get_secret_value() for k, v in config.lake.storage_options.items()} or None
    memory_bytes = config.limits.memory // 4
    lake = DeltaLake(config.lake.uri, source, storage_options=options, buffer_bytes=memory_bytes)
    # Tasks have another working directory.
    uri = str(lake.store.root) if isinstance(lake.store, LocalStore) else config.lake.uri
    reader = BackfillReader(source, settings, uri, options, memory_bytes)
    policy = BackfillPolicy(
        split_bytes,
        resumes=getattr(settings, "snapshot", "initial") == "initial",
        again=again,
        resnapshot_rewritten=getattr(settings, "on_rewrite", "resnapshot") == "resnapshot",
    )
    return Backfill(
        reader.connector(),
        lake,
        reader,
        runner,
        policy,
        print_line=print_line or _print_line,
        reached=reached,
    )


def report(outcome: BackfillOutcome) -> int:
    """Print the outcome for each table and return the exit code."""
    for name in outcome.present:
        sys.stdout.write(f"{name}: already live, nothing to do (--again re-reads it)\n")
    for filled in outcome.filled:
        then = "" if filled.is_live else ", `ingestd run` completes it"
        sys.stdout.write(f"{filled.table}: {filled.rows:,} rows at {filled.point}{then}\n")
    if outcome.filled and not outcome.is_listed:
        sys.stdout.write("the first epoch of `ingestd run` will show them\n")
    for error in outcome.failed:
        print_error(error)
    if not outcome.failed:
        return EXIT_DONE
    can_wait = all(isinstance(error, TransientError) for error in outcome.failed)
    return EXIT_TRANSIENT if can_wait else EXIT_OPERATOR


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run() -> None:
    """Run the command line, as a console script, a wheel task or by spark-submit."""
    run_job(main)


if __name__ == "__main__":
    run()
