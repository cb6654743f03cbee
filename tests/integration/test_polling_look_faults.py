"""Faults in the middle of a poll: its connection stays usable."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

import psycopg
import pytest

from ingestd.model.row_checks import UNLIMITED_BYTES
from ingestd.postgres.connection.session import connect
from ingestd.postgres.polling.poll import TablePoll, backend_of, begin_poll, scan_table
from ingestd.postgres.polling.progress import PollProgress, SeenXids
from tests.integration.test_polling_looks import described

if TYPE_CHECKING:
    from ingestd.postgres.connection.liveness import LivenessCheckedConnection
    from ingestd.postgres.polling.polled_table import PolledTable
    from tests.harness.databases import Database

ROWS = 200_000


async def rows_found(
    connection: LivenessCheckedConnection, backend: int, polled: PolledTable, limit_s: float | None
) -> int:
    """Poll the complete table, and release its locks."""
    now = await begin_poll(connection, backend)
    await connection.execute("SAVEPOINT a_table")
    progress = PollProgress(SeenXids(), SeenXids())
    scan = TablePoll(
        polled,
        progress,
        is_whole=True,
        page_rows=1000,
        row_limit_bytes=UNLIMITED_BYTES,
        limit_s=limit_s,
    )
    try:
        async with aclosing(scan_table(connection, scan, now)) as pages:
            return sum([rows.rows.count async for rows in pages])
    finally:
        await connection.execute("ROLLBACK TO SAVEPOINT a_table")
        await connection.rollback()


@pytest.mark.timeout(60)
async def test_answers_match_their_queries_after_a_consumer_failed(
    database: Database,
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, version int8)",
        f"INSERT INTO t SELECT i, now(), i FROM generate_series(1, {ROWS}) i",
    )
    polled = described(database, cursor=False)
    connection = await connect(database.dsn, autocommit=False)
    now = await begin_poll(connection, await backend_of(connection))
    await connection.execute("SAVEPOINT a_table")
    scan = TablePoll(
        polled,
        PollProgress(SeenXids(), SeenXids()),
        is_whole=True,
        page_rows=1000,
        row_limit_bytes=UNLIMITED_BYTES,
        limit_s=None,
    )
    async with aclosing(scan_table(connection, scan, now)) as pages:
        assert await anext(pages)
    await connection.execute("ROLLBACK TO SAVEPOINT a_table")
    for number in range(3):
        cursor = await connection.execute("SELECT %s::int", (number,))
        assert await cursor.fetchone() == (number,)
    await connection.close()


@pytest.mark.thorough
@pytest.mark.timeout(60)
async def test_a_server_that_gives_nothing_for_too_long_is_cancelled(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz, version int8)",
        f"INSERT INTO t SELECT i, now(), i FROM generate_series(1, {ROWS}) i",
    )
    polled = described(database, cursor=False)
    connection = await connect(database.dsn, autocommit=False)
    backend = await backend_of(connection)
    for limit_s in (0.0001, 0.001, 0.005):
        try:
            await rows_found(connection, backend, polled, limit_s)
        except psycopg.errors.QueryCanceled as error:
            assert "sent nothing" in str(error)  # noqa: PT017 - a fast server may not be cancelled
    assert await rows_found(connection, backend, polled, None) == ROWS
    await connection.close()
