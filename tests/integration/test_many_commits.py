"""A writer that commits to one table's log without end stops that table alone (I8)."""

from __future__ import annotations

import contextlib
import os
import threading
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
