"""Files of the lake are created with the umask that the daemon was started with."""

from __future__ import annotations

import itertools
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from ingestd.lake.maintenance.compaction import MaintenancePolicy
from ingestd.lake.maintenance.process import MaintenanceProcess
from tests.harness.config import wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60.0


UMASK = 0o027
EPOCHS = 20


@contextmanager
def umask() -> Iterator[None]:
    before = os.umask(UMASK)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.thorough
async def test_files_of_the_lake_are_created_with_the_umask(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        "INSERT INTO t SELECT i, 'x' FROM generate_series(1, 100) i",
        "CREATE TABLE rates (id int PRIMARY KEY, rate int)",
        "INSERT INTO rates VALUES (1, 2)",
    )
    sections = '[sources.shop.table."public.rates"]\nreference = "snapshot_plus_cdc"\n'
    daemon = make_daemon(wal_config(lake=lake, dsn=database.dsn, max_delay="10ms", extra=sections))
    with umask():
        daemon.start()
    daemon.await_ready(LIMIT_S)
    written = itertools.count(1000)

    def has_changed() -> bool:
        database.execute(f"INSERT INTO t VALUES ({next(written)})", "UPDATE rates SET rate = 3")
        return len(daemon.events("epoch.committed")) > EPOCHS

    await_until(has_changed, LIMIT_S, daemon.tail)
    assert daemon.sigterm() == 0
    with umask():
        process = MaintenanceProcess(str(lake), "shop", MaintenancePolicy(1 << 20, None))
        done = [told async for told in process.run(joins=True, cleans=False)]
        DeltaTable(str(lake / "shop/public/t")).create_checkpoint()  # as every 100 commits
    assert sum(told.joined_files for told in done) >= EPOCHS
    assert modes(lake) == {(True, 0o750), (False, 0o640)}


def modes(lake: Path) -> set[tuple[bool, int]]:
    """Those of folders (true) and of files."""
    paths = (lake, *lake.rglob("*"))
    return {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in paths}
