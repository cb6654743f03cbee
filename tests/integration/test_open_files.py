"""Out of file descriptors (`ulimit -n`): reported, and recovered from."""

from __future__ import annotations

import resource
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.harness.compare import assert_lake_equals_source
from tests.harness.config import wal_config
from tests.harness.pausing import end_sessions
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60.0
OPEN_ALREADY = 3
"""With this limit nothing can be opened; what is open stays."""


@contextmanager
def no_files_left(daemon: Daemon) -> Iterator[None]:
    """Lower the limit of a process that runs."""
    before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (OPEN_ALREADY, before[1]))
    yield
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("fault", "place"), [("connections", "source shop, connect: "), ("lake", "")]
)
def test_no_files_left_is_said_with_the_remedy_and_passes(
    database: Database, lake: Path, make_daemon: MakeDaemon, fault: str, place: str
) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    slot = f"ingestd_{database.name}"
    names = f'slot = "{slot}"\npublication = "{slot}"'
    daemon = make_daemon(wal_config(lake=lake, dsn=database.dsn, source_extra=names))
    daemon.start_ready(LIMIT_S)

    def told() -> list[dict[str, str]]:
        found = f"{place}no more files can be opened: the limit of this process is {OPEN_ALREADY}"
        return [e for e in daemon.events("source.failed") if found in e["reason"]]

    with no_files_left(daemon):
        if fault == "connections":
            end_sessions(database)
        else:
            database.execute("INSERT INTO orders VALUES (1)")
        await_until(told, LIMIT_S, daemon.tail)
        assert "LimitNOFILE" in told()[0]["remedy"]
        assert told()[0]["state"] == "backing_off"
    database.execute("INSERT INTO orders VALUES (2)")
    assert_lake_equals_source(database, lake, slot=slot, limit_s=LIMIT_S)
    daemon.await_ready(LIMIT_S)
    assert not daemon.events("source.unknown_error")
