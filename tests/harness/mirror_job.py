"""The mirror job under test, in this process's session or as a separate process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ingestd.testing.embedded.daemon import module_environment
from spark_jobs.mirror import main
from tests.harness.mirrors import SOURCE
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 600.0


class InterruptionError(Exception):
    """The test ends the job here, between two of its commits."""


class MirrorRun:
    """The job in this process, until the exit or until its `interrupt_after`th commit.

    The session must exist. The exit raises the job's error, except for the interruption.
    """

    def __init__(
        self, lake: Path, target: Path, *more: str, interrupt_after: int | None = None
    ) -> None:
        self.commits: list[str] = []
        self._arguments = _arguments(lake, target, *more)
        self._interrupt_after = interrupt_after
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mirror")
        self._future: Future[int] | None = None

    def __enter__(self) -> Self:
        self._future = self._pool.submit(
            main, self._arguments, stop=self._stop, after_commit=self._committed
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._ended(LIMIT_S)
        self._pool.shutdown()

    @property
    def is_interrupted(self) -> bool:
        return self._interrupt_after is not None and len(self.commits) >= self._interrupt_after

    def await_interrupted(self) -> None:
        """Wait until the job has ended by its interruption."""
        self._ended(LIMIT_S)
        assert self.is_interrupted, "the job ended without an interruption"

    def await_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for an effect of the job."""
        await_until(
            lambda: self._is_over() or condition(),
            LIMIT_S,
            lambda: f"{what}; its commits: {self.commits[-20:]}",
        )
        if self._is_over():
            self._ended(0)
            assert condition(), f"the job ended before {what}"

    def _is_over(self) -> bool:
        return self._future is not None and self._future.done()

    def _ended(self, limit_s: float) -> None:
        assert self._future is not None
        try:
            code = self._future.result(limit_s)
        except Exception:
            if not self.is_interrupted:
                raise
        else:
            assert code == 0, f"the job ended with {code}"

    def _committed(self, name: str) -> None:
        with self._lock:  # called by several threads
            self.commits.append(name)
            if self.is_interrupted:
                raise InterruptionError(name)


class MirrorProcess:
    """The job as a separate process, which is killed at the exit if it still runs."""

    def __init__(self, lake: Path, target: Path, folder: Path, *more: str) -> None:
        self._log = folder / "mirror.log"
        self._target = target
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "spark_jobs.mirror", *_arguments(lake, target, *more)],
                env=module_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sigkill()

    def sigkill(self) -> None:
        """Kill the process and its JVM. May be called twice."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # it leads a process group
        self._process.wait()

    def await_commits(self, count: int) -> None:
        """Wait until the mirrors have this many commits."""

        def are_there() -> bool:
            assert self._process.poll() is None, f"the mirror job ended\n{self._tail()}"
            return commit_count(self._target) >= count

        await_until(are_there, LIMIT_S, self._tail, poll_s=0.01)

    def _tail(self) -> str:
        return self._log.read_text("utf-8", errors="replace")[-4000:]


def commit_count(target: Path) -> int:
    """Return the number of commits of all mirrors, without `_mirror`."""
    return sum(1 for _ in target.glob("[!_]*/*/_delta_log/[0-9]*.json"))


def _arguments(lake: Path, target: Path, *more: str) -> list[str]:
    where = ["--lake", str(lake), "--source", SOURCE, "--target", str(target)]
    return [*where, *more]
