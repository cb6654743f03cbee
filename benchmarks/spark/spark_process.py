"""A Spark job as a process: run to its end, or kept running and watched through its commits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from ingestd.testing.embedded.daemon import module_environment
from ingestd.testing.embedded.orphans import Guard
from ingestd.testing.embedded.waiting import await_until

LIMIT_S = 600.0
TERM_LIMIT_S = 60.0
_ENVIRONMENT = {"PYSPARK_SUBMIT_ARGS": "--conf spark.network.timeout=1h pyspark-shell"}
"""Spark gives up an executor from which it has not heard for 2 min, as of a suspended process."""


class SparkProcess:
    """`python -m MODULE ARGUMENTS` with its output in `log`; a context manager keeps it running.

    It always ends with this process.
    """

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None

    def timed(self, *more: str) -> float:
        """Run it to its end; return the seconds that took. Raise RuntimeError if it fails."""
        began = time.perf_counter()
        process = self._start(*more)
        code = process.wait(LIMIT_S)
        elapsed_s = time.perf_counter() - began
        self._forget()
        if code != 0:
            msg = f"{' '.join(self._command[2:4])} ended with {code}\n{self.tail()}"
            raise RuntimeError(msg)
        return elapsed_s

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            self.resume()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(TERM_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._forget()

    def suspend(self) -> None:
        """Stop it and its JVM until `resume`: another process is measured meanwhile."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it continue."""
        self._signal_all(signal.SIGCONT)

    def cpu_s(self) -> float:
        """Return the CPU seconds that it and its JVM have taken until now."""
        if self._process is None:
            return 0.0
        own = psutil.Process(self._process.pid)
        every = [each.cpu_times() for each in (own, *own.children(recursive=True))]
        return float(sum(each.user + each.system for each in every))

    def _signal_all(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def await_commits(self, logs: Sequence[CommitLog]) -> float:
        """Wait for one more commit in each table; return the time (Unix) of the last one."""

        def are_there() -> bool:
            if self._process is not None and self._process.poll() is not None:
                msg = f"{' '.join(self._command[2:4])} ended\n{self.tail()}"
                raise RuntimeError(msg)
            return all(log.has_new() for log in logs)

        await_until(are_there, LIMIT_S, self.tail, poll_s=0.02)
        return max(log.take() for log in logs)

    def tail(self) -> str:
        """Return the end of its output."""
        return self._log.read_text("utf-8", errors="replace")[-4000:] if self._log.exists() else ""

    def _start(self, *more: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, *more],
                env=module_environment() | _ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._guard = Guard(self._process.pid, signal.SIGKILL)
        return self._process

    def _forget(self) -> None:
        if self._guard is not None:
            self._guard.release()
            self._guard = None
        self._process = None


class CommitLog:
    """A Delta table's commits with rows, found by the files of its log."""

    def __init__(self, table: Path) -> None:
        self._folder = table / "_delta_log"
        self._has_rows: dict[str, bool] = {}
        self._taken = len(self._commits())

    def has_new(self) -> bool:
        """Return whether there is a commit beyond those taken."""
        return len(self._commits()) > self._taken

    def take(self) -> float:
        """Take all existing commits; return the time (Unix) of the newest."""
        commits = self._commits()
        self._taken = len(commits)
        return commits[-1].stat().st_mtime

    def _commits(self) -> list[Path]:
        found = sorted(self._folder.glob("[0-9]*.json"))
        for path in found:
            if path.name not in self._has_rows:
                self._has_rows[path.name] = '"add":' in path.read_text("utf-8")
        return [path for path in found if self._has_rows[path.name]]
