"""Backfills whose tasks are threads of the driver, and which can be killed in a given state.

``python -m tests.harness.backfill CONFIG SOURCE STATE [--again] TABLE...`` kills itself when it
reaches STATE: one of `spark_jobs.backfills.driver`, or ``split:N`` after N splits are read.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ingestd.config import load_config
from ingestd.model.schema import TableId
from ingestd.postgres.settings import SETTINGS
from ingestd.testing.embedded.daemon import module_environment
from spark_jobs.backfill import build
from spark_jobs.backfills.runner import of_text, to_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spark_jobs.backfills.driver import BackfillOutcome
    from spark_jobs.backfills.reading import SplitRunner
    from spark_jobs.backfills.record import Note
    from spark_jobs.backfills.task import BackfillReader, Failure, SplitOrder

SPLIT_BYTES = 300_000
LIMIT_S = 60


class Threads:
    """Runs tasks as threads. `ended` is called with the number of finished tasks."""

    def __init__(self, ended: Callable[[int], None] = lambda _: None, *, at_once: int = 2) -> None:
        self._ended = ended
        self._at_once = at_once
        self._is_cancelled = False
        self.orders: list[SplitOrder] = []

    def run(self, reader: BackfillReader, orders: Sequence[SplitOrder]) -> list[Note | Failure]:
        self.orders = list(orders)
        outcomes = []
        with ThreadPoolExecutor(self._at_once) as pool:
            for outcome in pool.map(reader.read, () if self._is_cancelled else orders):
                outcomes.append(of_text(to_text(outcome)))
                self._ended(len(outcomes))
        return outcomes

    def cancel(self) -> None:
        self._is_cancelled = True


def backfill(
    config_path: Path,
    source: str,
    tables: Sequence[str],
    *,
    runner: SplitRunner | None = None,
    reached: Callable[[str], None] = lambda _: None,
    print_line: Callable[[str], None] = lambda _: None,
    split_bytes: int = SPLIT_BYTES,
    again: bool = False,
) -> BackfillOutcome:
    """Run a backfill in this process."""
    config = load_config(config_path, SETTINGS, os.environ)
    made = build(
        config,
        source,
        runner or Threads(),
        split_bytes=split_bytes,
        again=again,
        print_line=print_line,
        reached=reached,
    )
    return asyncio.run(made.run([TableId.parse(table) for table in tables]))


def killed_backfill(config_path: Path, source: str, state: str, *tables: str) -> None:
    """Run a backfill in a separate process that kills itself (SIGKILL) in a state."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(config_path), source, state, *tables],
        env=module_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, f"{state}: {done.returncode}\n{done.stderr}"


def main(config_path: str, source: str, state: str, *tables: str) -> None:
    def die_at(reached: str) -> None:
        if reached == state:
            os.kill(os.getpid(), signal.SIGKILL)

    runner = Threads(lambda ended: die_at(f"split:{ended}"), at_once=1)
    again = "--again" in tables
    names = [name for name in tables if name != "--again"]
    outcome = backfill(Path(config_path), source, names, runner=runner, reached=die_at, again=again)
    sys.stderr.write(f"{outcome}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
