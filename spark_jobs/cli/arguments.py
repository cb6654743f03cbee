"""Arguments, exit codes and error output that all jobs share.

The exit codes are those of `ingestd`: 0 done, 1 an operator must fix a fault, 2 wrong usage or
config, 75 a transient fault that outlasted the retries.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ingestd.config import load_config
from ingestd.config.redaction import Redactor
from ingestd.model.errors import ConfigError, IngestdError, TransientError
from ingestd.model.schema import TableId
from ingestd.postgres.settings import SETTINGS
from spark_jobs.spark_errors import meaning_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from ingestd.config import Config

T = TypeVar("T")

EXIT_DONE, EXIT_OPERATOR, EXIT_USAGE, EXIT_TRANSIENT = 0, 1, 2, 75

_OBJECT_STORE = {"s3": "s3a"}
"""Schemes of deltalake that Hadoop names differently."""


def job_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments that every job accepts: --source, --config, --remote."""
    parser = argparse.ArgumentParser(
        prog=_program(name),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--source", required=True, help="the source's name, as in the config")
    parser.add_argument("--config", type=Path, metavar="FILE", help="ingestd's config file (TOML)")
    parser.add_argument(
        "--remote", metavar="URL", help="a Spark Connect server, sc://host:port (or SPARK_REMOTE)"
    )
    return parser


def _program(name: str) -> str:
    """Return how the job was called: by its console script, or as a module."""
    script = f"ingestd-{name}"
    return script if Path(sys.argv[0]).name == script else f"python -m spark_jobs.{name}"


def add_lake(parser: argparse.ArgumentParser) -> None:
    """Add --lake, for a job that needs only the lake and can run without the config."""
    parser.add_argument("--lake", metavar="URI", help="the lake (default: that of --config)")


def add_tables(parser: argparse.ArgumentParser) -> None:
    """Add --tables."""
    parser.add_argument(
        "--tables",
        nargs="+",
        type=_pattern,
        default=["*.*"],
        metavar="PATTERN",
        help="tables to include, as `tables` in the config: public.* '!public.audit_*'",
    )


def add_accelerator(parser: argparse.ArgumentParser) -> None:
    """Add --no-accelerator."""
    parser.add_argument(
        "--no-accelerator",
        action="store_false",
        dest="accelerator",
        help="do everything by Spark's public calls, slower (or INGESTD_SPARK_ACCELERATOR=off)",
    )


def add_variant(parser: argparse.ArgumentParser) -> None:
    """Add --variant."""
    parser.add_argument(
        "--variant", action="store_true", help="jsonb as VARIANT instead of text (Spark 4)"
    )


def _pattern(text: str) -> str:
    try:
        TableId.parse(text.removeprefix("!"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def lake_uri(arguments: argparse.Namespace) -> str:
    """Return the lake's URI for Spark. Raises ConfigError without --lake and --config."""
    return spark_uri(_given_lake(arguments))


def _given_lake(arguments: argparse.Namespace) -> str:
    given = getattr(arguments, "lake", None)
    if given is not None:
        return str(given)
    if arguments.config is None:
        raise ConfigError("--lake or --config is needed", remedy="name the lake: --lake URI")
    return require_config(arguments).lake.uri


def ensure_same_everywhere(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a lake or target whose path depends on where this process runs.

    A Connect server, which reads and writes the tables, has another working folder, and mostly
    another disk.
    """
    for name, uri in (("--lake", _given_lake(arguments)), ("--target", arguments.target)):
        if "://" not in uri and not Path(uri).is_absolute():
            raise ConfigError(
                f"{name} {uri}: a relative path has no meaning on a Spark Connect server",
                remedy=f"{name} {spark_uri(uri)}  # if the server has it; or an object store",
            )


def require_config(arguments: argparse.Namespace) -> Config:
    """Return the config of --config, which must have the source. Raises ConfigError."""
    if arguments.config is None:
        raise ConfigError("--config is needed", remedy="--config ingestd.toml")
    config = load_config(arguments.config, SETTINGS, os.environ)
    if arguments.source not in config.sources:
        known = ", ".join(sorted(config.sources))
        raise ConfigError(
            f"--source {arguments.source}: {arguments.config} has no such source",
            remedy=f"one of: {known}",
        )
    return config


def positive(kind: type[int | float]) -> Callable[[str], float]:
    """Return an argument type that accepts numbers above 0."""

    def parse(text: str) -> float:
        found = kind(text)
        if not found > 0:
            raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
        return found

    parse.__name__ = kind.__name__  # argparse names it in its error
    return parse


def spark_uri(uri: str) -> str:
    """Return the URI of a lake or target in the form that Spark accepts: s3:// becomes s3a://.

    Local paths become absolute and lose `..`, as in the file names that Hadoop reports.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return os.path.normpath(Path(uri).expanduser().absolute())
    if scheme == "file":
        return os.path.normpath("/" + rest.lstrip("/"))
    return f"{_OBJECT_STORE.get(scheme, scheme)}://{rest}".rstrip("/")


def run_job(job: Callable[[Sequence[str]], int], arguments: Sequence[str] | None = None) -> None:
    """Run a job's `main`, and exit with its exit code if that is not 0.

    A notebook or a wheel task reports any exit as a failure, even one with code 0. Errors are
    printed in one to three lines.
    """
    try:
        code = job(sys.argv[1:] if arguments is None else arguments)
    except IngestdError as error:
        print_error(error)
        code = exit_code(error)
    except Exception as error:
        if not _is_sparks(error):
            raise
        meaning = meaning_of(error)
        print_error(meaning)
        code = exit_code(meaning)
    except KeyboardInterrupt:
        code = 130
    sys.stdout.flush()
    if code != EXIT_DONE:
        sys.exit(code)


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns, also in a notebook, whose thread runs an event loop."""
    with ThreadPoolExecutor(1, thread_name_prefix="ingestd-job") as threads:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(work)
        return threads.submit(asyncio.run, work).result()


def print_error(error: IngestdError) -> None:
    """Write an error to stderr, with secrets redacted."""
    sys.stderr.write(Redactor().text(f"{error}\n"))


def _is_sparks(error: Exception) -> bool:
    """Return whether the error came from Spark or from the connection to its JVM."""
    is_of_it = type(error).__module__.startswith(("pyspark", "py4j"))
    return is_of_it or isinstance(error, (ConnectionError, EOFError))


def run_until_stopped(job: Callable[[Sequence[str], threading.Event], int]) -> None:
    """Run a job that SIGTERM and SIGINT end with exit code 0, if this is the main thread.

    Its JVM may receive the signal, too, and exit in the middle of a step. The next run then does
    what was not committed.
    """
    stop = threading.Event()
    if threading.current_thread() is threading.main_thread():  # others can't handle signals
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())

    def run(arguments: Sequence[str]) -> int:
        try:
            return job(arguments, stop)
        except Exception as error:
            if stop.is_set() and _is_sparks(error):
                return EXIT_DONE
            raise

    run_job(run)


def exit_code(error: IngestdError) -> int:
    """Return the exit code for a job that ended with this error."""
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    return EXIT_TRANSIENT if isinstance(error, TransientError) else EXIT_OPERATOR
