"""SIGKILL at random instants while tables change under load: the lake is the source afterwards."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

import pytest
from psycopg import errors

from ingestd.model.schema import TableId
from tests.harness.compare import (
    assert_change_log_is_sound,
    assert_lake_equals_source,
    epochs,
    registry,
)
from tests.harness.config import wal_config
from tests.harness.waiting import await_until
from tests.harness.writers import Writers

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60
TABLES = tuple(TableId("public", name) for name in ("plain", "parted", "renamed", "other_name"))
CREATE = (
    "CREATE TABLE plain (id int PRIMARY KEY, note text, n int)",
    "CREATE TABLE parted (id int PRIMARY KEY, note text, n int) PARTITION BY HASH (id)",
    "CREATE TABLE parted_0 PARTITION OF parted FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
    "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
    "CREATE TABLE renamed (id int PRIMARY KEY, note text)",
)
DDL = (
    "ALTER TABLE plain ADD a{n} int DEFAULT 5",
    "ALTER TABLE plain ADD b{n} float8 DEFAULT random()",
    "ALTER TABLE plain ALTER n TYPE text",
    "ALTER TABLE plain ALTER n TYPE int USING n::int",
    "ALTER TABLE plain RENAME note TO remark",
    "ALTER TABLE plain RENAME remark TO note",
    "ALTER TABLE plain DROP n; ALTER TABLE plain ADD n int DEFAULT 3",
    "ALTER TABLE parted ADD a{n} text DEFAULT 'a'",
    "ALTER TABLE parted ALTER n TYPE bigint",
    "ALTER TABLE parted ALTER n TYPE int",
    "ALTER TABLE renamed RENAME TO other_name",
    "ALTER TABLE other_name RENAME TO renamed",
    "DROP TABLE renamed; CREATE TABLE renamed (id bigint PRIMARY KEY, m int)",
    "TRUNCATE plain",
    "VACUUM FULL plain",
)


class Changer:
    """Runs one random statement of `DDL` after another, as a context manager."""

    def __init__(self, database: Database, seed: int) -> None:
        self._database = database
        self._rng = random.Random(seed)
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._future: Future[None] | None = None
        self.applied = 0

    def __enter__(self) -> Self:
        self._future = self._pool.submit(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        assert self._future is not None
        self._future.result(timeout=LIMIT_S)
        self._pool.shutdown()

    def _run(self) -> None:
        with self._database.connect() as session:
            while not self._stopping.wait(self._rng.uniform(0, 0.3)):
                statement = self._rng.choice(DDL).format(n=self.applied)
                try:
                    session.execute(statement.encode())
                except (
                    errors.DeadlockDetected,
                    errors.DuplicateColumn,
                    errors.DuplicateTable,
                    errors.UndefinedColumn,
                    errors.UndefinedTable,
                ):
                    continue
                self.applied += 1


@pytest.mark.parametrize(
    ("seed", "kills"), [(20261121, 2), pytest.param(20261121, 6, marks=pytest.mark.long)]
)
def test_exactly_once_through_kills_during_schema_changes(
    database: Database, make_daemon: MakeDaemon, lake: Path, seed: int, kills: int
) -> None:
    """I2, I3, I6, I7: whatever was being read, altered or committed at the kill."""
    rng = random.Random(seed)
    database.execute(*CREATE)
    extra = (
        f'slot = "{database.name}"\npublication = "{database.name}"\ndiscover_interval = "200ms"'
    )
    daemon = make_daemon(
        wal_config(lake=lake, dsn=database.dsn, max_delay="60ms", source_extra=extra)
    )
    with Writers(database.dsn, TABLES, seed=seed) as writers:
        with Changer(database, seed) as changer:
            for _ in range(kills):
                seen = len(epochs(lake))
                daemon.start()
                _await_epoch_after(seen, lake, daemon)
                _run_for(rng.uniform(0.0, 1.0))
                daemon.sigkill()
            # Not until it is ready: while tables change all the time, one of them is being re-read.
            seen = len(epochs(lake))
            daemon.start()
            _await_epoch_after(seen, lake, daemon)
        writers.await_writes(TABLES[:2], 5)
    database.execute("CREATE TABLE the_last (id int PRIMARY KEY)")
    await_until(lambda: _is_settled(lake), LIMIT_S, daemon.tail)
    assert_lake_equals_source(database, lake, slot=database.name)
    assert_change_log_is_sound(database, lake, is_dense=False)
    assert changer.applied > 2 * kills
    assert daemon.sigterm() == 0


def _await_epoch_after(seen: int, lake: Path, daemon: Daemon) -> None:
    await_until(lambda: len(epochs(lake)) > seen, LIMIT_S, daemon.tail)


def _is_settled(lake: Path) -> bool:
    last = {row["table"]: row["state"] for row in registry(lake)}
    return last.get("public.the_last") == "live" and "snapshotting" not in last.values()


def _run_for(seconds: float) -> None:
    """Let the daemon run until a random instant."""
    end = time.monotonic() + seconds
    await_until(lambda: time.monotonic() >= end, seconds + 5, poll_s=0.01)
