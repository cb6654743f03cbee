"""A writer that commits to one table's log without end stops that table alone (I8)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.testing.embedded.waiting import await_until
from tests.harness.hostile_folder import commit_of, newest_version
from tests.integration.test_one_folder import await_good, log_of, started

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

pytestmark = [pytest.mark.attack("lake writer"), pytest.mark.thorough]

KINDS = {"without data": {}, "ours": {"ingestdCommit": "0" * 32, "ingestdWriter": "1" * 32}}


@contextlib.contextmanager
def committing(log: Path, stamps: dict[str, str], pause_s: float) -> Iterator[None]:
    """Have another thread commit without end, by links to one file."""
    info: dict[str, Any] = {"operation": "OPTIMIZE", "timestamp": 1, **stamps}
    source = log.parent / "source.json"
    source.write_text(commit_of([{"commitInfo": info}]))
    ended = threading.Event()

    def commit() -> None:
        number = newest_version(log) + 1
        while not ended.wait(pause_s):
            with contextlib.suppress(FileExistsError):
                os.link(source, log / f"{number:020}.json")
            number += 1

    thread = threading.Thread(target=commit)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("kind", KINDS)
def test_isolated_a_writer_who_never_stops_stops_one_table(
    database: Database, lake: Path, make_daemon: MakeDaemon, kind: str
) -> None:
    daemon = started(database, lake, make_daemon, "wal")
    with committing(log_of(lake), KINDS[kind], 0.002):
        for row in range(2, 6):
            database.execute(f"INSERT INTO bad VALUES ({row})", f"INSERT INTO good VALUES ({row})")
            await_good(daemon, lake, row)
    await_until(lambda: bool(daemon.events("table.stopped")), 30, daemon.tail)
    assert {event["table"] for event in daemon.events("table.stopped")} == {"public.bad"}
    assert not daemon.events("source.failed")


OWNER = """
import os, sys
log, content = sys.argv[1], sys.argv[2].encode()
def put(version):
    at = os.open(f"{log}/{version:020}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    os.write(at, content)
    os.close(at)
while True:
    made = next((n for n in os.listdir(log) if n[:1] == "." and ".json." in n), None)
    if made is None:
        continue
    version = int(made[1:21])
    if not os.path.lexists(f"{log}/{version - 1:020}.json"):
        put(version - 1)  # the last race was lost: the daemon has read it
    try:
        put(version)
    except FileExistsError:
        continue
    while os.path.lexists(f"{log}/{made}"):
        pass
    os.unlink(f"{log}/{version:020}.json")
"""
"""Makes the next commit once its temporary file exists, and removes it with that file."""


def test_isolated_an_owner_who_wins_each_race_stops_one_table(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = started(database, lake, make_daemon)
    without_data = commit_of([{"commitInfo": {"operation": "OPTIMIZE", "timestamp": 1}}])
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(log_of(lake)), without_data])
    try:
        deadline, number = time.monotonic() + 60, 2
        while time.monotonic() < deadline and not daemon.events("table.stopped"):
            database.execute(
                f"INSERT INTO good VALUES ({number})", f"INSERT INTO bad VALUES ({number})"
            )
            await_good(daemon, lake, number)
            number += 1
    finally:
        owner.kill()
        owner.wait()
    assert {event["table"] for event in daemon.events("table.stopped")} <= {"public.bad"}
    assert not daemon.events("source.failed")
