"""Polls of a table under writes: every row version that stays is found exactly once."""

from __future__ import annotations

import random
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ingestd.decode.type_mapping import lake_type
from ingestd.model.lsn import Lsn
from ingestd.model.row_checks import UNLIMITED_BYTES
from ingestd.model.schema import Column, Table, TableId
from ingestd.postgres.connection.session import connect
from ingestd.postgres.polling.poll import (
    PollPoint,
    TablePoll,
    backend_of,
    begin_poll,
    first_progress,
    scan_table,
)
from ingestd.postgres.polling.polled_table import Cursor, PolledTable
from ingestd.postgres.polling.progress import PollProgress, SeenXids
from ingestd.postgres.polling.rows import PollReadPoint

if TYPE_CHECKING:
    import psycopg

    from ingestd.postgres.connection.liveness import LivenessCheckedConnection
    from tests.harness.databases import Database

COLUMNS = [
    ("id", 23, "integer"),
    ("at", 1184, "timestamp with time zone"),
    ("version", 20, "bigint"),
]
STEPS = 300


@dataclass
class Watcher:
    """Polls, and what they found: numbers of versions."""

    connection: LivenessCheckedConnection
    backend: int
    polled: PolledTable
    progress: PollProgress | None = None
    found: list[int] = field(default_factory=list)
    kinds: set[bool] = field(default_factory=set)

    async def now(self) -> PollPoint:
        return await begin_poll(self.connection, self.backend)

    async def look(self, *, is_whole: bool) -> None:
        now = await self.now()
        if self.progress is None:
            self.progress = await first_progress(self.connection, self.polled, now)
            cursor = await self.connection.execute("SELECT version FROM public.t")
            self.found += [v for (v,) in await cursor.fetchall()]
        else:
            scan = TablePoll(
                self.polled, self.progress, is_whole, page_rows=3, row_limit_bytes=UNLIMITED_BYTES
            )
            async with aclosing(scan_table(self.connection, scan, now)) as pages:
                async for rows in pages:
                    for batch in rows.changes(PollReadPoint(Lsn(1), now.at), None):
                        self.found += batch.rows.column("version").to_pylist()
            self.progress = PollProgress.parse(scan.progress.to_text())
            self.kinds.add(scan.is_whole)
        await self.connection.rollback()


@dataclass
class Writers:
    """Sessions that write, some of whose transactions last."""

    database: Database
    sessions: list[psycopg.Connection[tuple[Any, ...]]]
    chance: random.Random
    version: int = 0

    def step(self) -> None:
        session = self.chance.choice(self.sessions)
        what = self.chance.random()
        if what < 0.15:
            session.commit()
        elif what < 0.2:
            session.rollback()
        else:
            try:
                self._write(session)
            except Exception:  # noqa: BLE001 - a lock: that transaction is over
                session.rollback()

    def _write(self, session: psycopg.Connection[tuple[Any, ...]]) -> None:
        self.version += 1
        at = self.chance.choice(["now()", "clock_timestamp()", "now() - interval '9 days'", "NULL"])
        is_nested = self.chance.random() < 0.4
        if is_nested:
            session.execute("SAVEPOINT s")
        key = self.chance.randrange(40)
        if self.chance.random() < 0.15:
            session.execute("DELETE FROM t WHERE id = %s", [key])
        else:
            session.execute(
                f"INSERT INTO t VALUES (%s, {at}, %s) ON CONFLICT (id)"
                " DO UPDATE SET at = excluded.at, version = excluded.version".encode(),
                [key, self.version],
            )
        if is_nested:
            session.execute(self.chance.choice(["RELEASE s", "ROLLBACK TO s"]))


def described(database: Database, *, cursor: bool) -> PolledTable:
    columns = tuple(
        Column(n, oid, -1, lake_type(oid, -1), p, identity=n == "id") for n, oid, p in COLUMNS
    )
    oid = database.value("SELECT 't'::regclass::oid::int8")
    table = Table(TableId("public", "t"), oid, columns, key=("id",), before=("id",))
    return PolledTable(table, Cursor(("at",), "time") if cursor else None, None, 1.0, None)


@pytest.mark.thorough
@pytest.mark.parametrize("cursor", [True, False])
@pytest.mark.parametrize("seed", range(5))
async def test_every_version_that_stays_is_found_once(
    database: Database, seed: int, *, cursor: bool
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, version int8)",
        "CREATE INDEX ON t (at)",
        "INSERT INTO t SELECT i, now() - interval '1 day', -i FROM generate_series(1, 20) i",
    )
    chance = random.Random(seed)
    sessions = [database.connect(autocommit=False) for _ in range(4)]
    for session in sessions:
        session.execute("SET lock_timeout = '20ms'")
        session.commit()
    writers = Writers(database, sessions, chance)
    connection = await connect(database.dsn, autocommit=False)
    watcher = Watcher(connection, await backend_of(connection), described(database, cursor=cursor))
    try:
        for _ in range(STEPS):
            if chance.random() < 0.25:
                await watcher.look(is_whole=chance.random() < 0.4)
            else:
                writers.step()
        for session in sessions:
            session.commit()
        await watcher.look(is_whole=True)
    finally:
        for session in sessions:
            session.close()
        await connection.close()
    assert len(set(watcher.found)) == len(watcher.found), "a version was found twice"
    there = {version for (version,) in database.rows("SELECT version FROM t")}
    assert there <= set(watcher.found)
    if cursor:
        assert False in watcher.kinds, "no near look was made"


def test_what_was_seen_is_written_and_read() -> None:
    for xids in ([], [5], [5, 6, 9, 1 << 40]):
        seen = SeenXids(4, np.array(xids, np.int64))
        progress = PollProgress(seen, SeenXids(4), "2026-01-01 00:00:00+00", None, 7, "at", "gone")
        assert PollProgress.parse(progress.to_text()) == progress
        assert progress.by("at") == progress
        assert progress.by("id") == PollProgress(seen, seen, cursor="id", deleted="gone")
    assert PollProgress.parse("{}") is None
    assert PollProgress.parse("") is None
