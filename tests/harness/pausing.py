"""Pauses a daemon's process, ends its sessions, and checks which daemon committed afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingestd.lake.delta.commit import FENCE, WRITER, parse_commit
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ingestd.testing.embedded.daemon import Daemon
    from tests.harness.databases import Database

LIMIT_S = 120.0
_SESSIONS = "FROM pg_stat_activity WHERE datname = %s AND application_name LIKE 'ingestd%%'"


@contextlib.contextmanager
def paused(daemon: Daemon) -> Iterator[None]:
    """Stop the process, as a debugger or a frozen virtual machine does; continue it at the end."""
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        stat = Path(f"/proc/{daemon.pid}/stat")
        await_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", LIMIT_S, "T")
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def let_pass(seconds: float) -> None:
    """Return after this time: the length of a pause is what the test is about."""
    end = time.monotonic() + seconds
    await_until(lambda: time.monotonic() >= end, seconds + 5)


def end_sessions(database: Database) -> int:
    """Terminate all daemon sessions on the server, as a TCP failure does; return their number.

    Sessions that are being opened are terminated, too.
    """
    query = f"SELECT pid, application_name, wait_event, pg_terminate_backend(pid) {_SESSIONS}"
    ended: set[int] = set()
    left: list[tuple[Any, ...]] = []

    def are_gone() -> bool:
        left[:] = database.rows(query, database.name)
        ended.update(pid for pid, *_ in left)
        return not left

    await_until(are_gone, LIMIT_S, lambda: f"the end of these sessions: {left}")
    return len(ended)


def await_acted(daemon: Daemon, point: str) -> None:
    """Wait until the failpoint of this life has acted."""

    def has_acted() -> bool:
        return any(event["point"] == point for event in daemon.events("failpoint.reached"))

    await_until(has_acted, LIMIT_S, lambda: f"{point}\n{daemon.tail()}", poll_s=0.01)


def assert_nobody_commits_after_a_fence(lake: Path, *, may_return: bool = False) -> int:
    """I5: after another process has fenced a log, no earlier process commits to it.

    Returns how many processes fenced `_epochs`. The logs must have all their commits.
    `may_return`: a fenced process may take over again with its own fence.
    """
    fences = 0
    for log in sorted(lake.glob("**/_delta_log")):
        gone: set[str] = set()
        present = ""
        for path in sorted(log.glob("*.json")):
            stamps = _stamps(path)
            writer = stamps.get(WRITER, "")
            if not writer:
                continue  # maintenance, which changes no rows
            is_back = may_return and FENCE in stamps and writer != present
            assert is_back or writer not in gone, f"{path}: {writer} committed after it was fenced"
            if writer != present:
                is_first = not present
                assert is_first or FENCE in stamps, f"{path}: {writer} began without a fence"
                gone = (gone | {present}) - {writer}
                present = writer
                fences += log.parent.name == "_epochs"
    return fences


def _stamps(commit: Path) -> Mapping[str, str]:
    found = parse_commit(commit.read_bytes(), str(commit))
    assert found.writer or not found.has_data, f"{commit}: whose is it?"
    return found.stamps
