"""Compares mirrors with their source, row by row, at the same position.

    python -m spark_jobs.reconcile --config ingestd.toml --source shop --target ./mirror

Spark's executors read the source at an exact position L. The lake's changes from L on bring these
rows to the position of the mirror, and the result is compared with the mirror: first hashes of
ranges, then the keys of ranges that differ. docs/reconcile.md explains why a difference is never
one of timing.

Exit codes: 0 all equal; 1 something differs or must be fixed; 2 wrong usage or config;
75 could not be compared now.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeVar

from ingestd.config.units import seconds, size_bytes
from ingestd.model.errors import ConfigError
from spark_jobs.catalog.schema_name import add_catalog
from spark_jobs.cli.arguments import ensure_same_everywhere, job_parser, require_config, run_job
from spark_jobs.delta_log.tables import is_connect
from spark_jobs.session import job_session

T = TypeVar("T")
MAX_RANGES = 1 << 16


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    found = job_parser("reconcile", __doc__ or "")
    found.add_argument(
        "tables", nargs="*", metavar="TABLE", help="schema.table or a pattern (default: all)"
    )
    found.add_argument("--target", required=True, metavar="URI", help="where the mirrors are")
    found.add_argument("--report", metavar="URI", help="append the results to Delta tables here")
    add_catalog(found, "tables of --report")
    found.add_argument(
        "--ranges", type=_ranges, default=1024, metavar="N", help="ranges of key hashes (1024)"
    )
    found.add_argument(
        "--wait",
        type=_readable(seconds),
        default=300.0,
        metavar="TIME",
        help="how long to wait for the lake and the mirror to catch up with the source (5m)",
    )
    found.add_argument(
        "--split-bytes",
        type=_readable(size_bytes),
        default=64_000_000,
        metavar="SIZE",
        help="how much of a table a task reads (64MB)",
    )
    found.add_argument("--values", action="store_true", help="include values in the report")
    found.add_argument(
        "--show", type=int, default=10, metavar="N", help="differences to print per table (10)"
    )
    return found


def main(arguments: Sequence[str]) -> int:
    """Compare, print the results, and return the exit code. Raises IngestdError."""
    chosen = parser().parse_args(arguments)
    config = require_config(chosen)
    if chosen.catalog is not None and chosen.report is None:
        raise ConfigError(
            "--catalog names the tables of the report, and there is no --report",
            remedy="add --report URI; the mirrors are named by `python -m spark_jobs.mirror`",
        )
    given = job_session(
        f"ingestd reconcile {chosen.source}",
        remote=chosen.remote,
        needs_delta=True,
        settings=None if chosen.catalog is None else chosen.catalog.session_settings,
    )
    if is_connect(given):
        ensure_same_everywhere(chosen)
    # Imported here because it needs pyspark, which job_session has found installed.
    from spark_jobs.own_session import session_of_job  # noqa: PLC0415
    from spark_jobs.reconciling.run import reconcile  # noqa: PLC0415

    with session_of_job(given) as session:
        return reconcile(session, config, chosen)


def _ranges(text: str) -> int:
    """Return the number of ranges in a text, rounded up to a power of two."""
    if not text.isdecimal() or not 1 <= int(text) <= MAX_RANGES:
        raise argparse.ArgumentTypeError(f"1 to {MAX_RANGES}, not {text!r}")
    return 1 << (int(text) - 1).bit_length()


def _readable(read: Callable[[object], T]) -> Callable[[str], T]:
    """Return an argument type that reports the error text of `read`."""

    def reader(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return reader


def run() -> None:
    """Run the command line, as a console script, a wheel task or by spark-submit."""
    run_job(main)


if __name__ == "__main__":
    run()
