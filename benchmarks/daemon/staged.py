"""A daemon that measures its stages: `python -m benchmarks.daemon.staged CONFIG FILE`.

It is `ingestd run`, in which the functions of each stage are timed by the CPU time of their thread;
a stage inside another is counted separately. At its end FILE contains, as JSON, CPU and wall
seconds by stage; `start`: of the process until the first message, `all`: the total.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingestd import cli
from ingestd.decode import change_batch as rows
from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.lake.epochs_table import EpochTable
from ingestd.lake.parquet_writer import FragmentWriter
from ingestd.lake.raw_table import RawTable
from ingestd.lake.store import plain_files as durable

DECODE, CAST, PARQUET = "decode", "Arrow cast", "Parquet"
COMMIT, FSYNC = "Delta commit", "fsync"
STAGES: tuple[tuple[str, Any, str], ...] = (
    (DECODE, PgoutputDecoder, "feed"),
    (CAST, rows, "cast"),
    (PARQUET, FragmentWriter, "write"),
    (PARQUET, FragmentWriter, "finish"),
    (COMMIT, RawTable, "commit"),
    (COMMIT, EpochTable, "append_epoch"),
    (FSYNC, durable, "_sync"),
)


@dataclass(slots=True)
class Spent:
    """CPU and wall seconds."""

    cpu_s: float = 0.0
    wall_s: float = 0.0


@dataclass(slots=True)
class Stopwatch:
    """The time of each stage, in all threads, without the stages inside it."""

    spent: dict[str, Spent] = field(default_factory=dict)
    started_cpu_s: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _inside: threading.local = field(default_factory=threading.local)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the block for this stage."""
        if self.started_cpu_s is None and name == DECODE:
            self.started_cpu_s = time.process_time()
        outer = getattr(self._inside, "spent", None)
        within = self._inside.spent = Spent()
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        try:
            yield
        finally:
            cpu_s, wall_s = time.thread_time() - cpu_s, time.perf_counter() - wall_s
            self._inside.spent = outer
            if outer is not None:
                outer.cpu_s += cpu_s
                outer.wall_s += wall_s
            with self._lock:
                total = self.spent.setdefault(name, Spent())
                total.cpu_s += cpu_s - within.cpu_s
                total.wall_s += wall_s - within.wall_s

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function wrapped so that its calls are counted."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any function
            with self.stage(name):
                return function(*args, **kwargs)

        return call


def main(config: str, report: str) -> None:
    """Run the daemon until it is stopped."""
    watch = Stopwatch()
    for name, owner, attribute in STAGES:
        setattr(owner, attribute, watch.timed(name, getattr(owner, attribute)))
    try:
        cli.app(["run", "--config", config], standalone_mode=False)
    finally:
        found = {name: [spent.cpu_s, spent.wall_s] for name, spent in watch.spent.items()}
        found["start"] = [watch.started_cpu_s or 0.0, 0.0]
        found["all"] = [time.process_time(), 0.0]
        Path(report).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
