"""The memory of decoding sessions before the server spills to disk."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from psycopg.conninfo import make_conninfo

from ingestd.model.lsn import ZERO
from ingestd.postgres.connection.session import connect
from ingestd.postgres.wal.decoding_memory import raise_decoding_memory
from ingestd.postgres.wal.replication_stream import StreamLimits, open_stream
from ingestd.postgres.wal.server import query_server_id
from tests.harness.open_transactions import send_while_open, sent_while_open
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from tests.harness.databases import Database

LIMIT_S = 30


@pytest.mark.parametrize("replication", [False, True], ids=["drains", "streams"])
@pytest.mark.parametrize(("set_for_it", "held"), [("64MB", "256MB"), ("1GB", "1GB")])
async def test_the_memory_that_the_server_gives_holds_if_it_is_more(
    database: Database, *, replication: bool, set_for_it: str, held: str
) -> None:
    dsn = make_conninfo(database.dsn, options=f"-c logical_decoding_work_mem={set_for_it}")
    async with await connect(dsn, replication=replication) as connection:
        await raise_decoding_memory(connection)
        cursor = await connection.execute("SHOW logical_decoding_work_mem")
        assert await cursor.fetchone() == (held,)


@pytest.mark.parametrize("streams_in_progress", [False, True], ids=["after_it", "while_open"])
async def test_a_large_transaction_is_streamed_past_the_servers_disk(
    database: Database, *, streams_in_progress: bool
) -> None:
    """It exceeds what the server would keep: it is kept all the same, or sent while it is open."""
    send_while_open(database)
    name = database.name
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        f"CREATE PUBLICATION {name} FOR TABLE t",
        f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')",
        "INSERT INTO t SELECT n, repeat('x', 300) FROM generate_series(1, 5000) n",
        "INSERT INTO t VALUES (0, 'the end')",
    )
    async with await connect(database.dsn) as connection:
        queried_id = await query_server_id(connection)
    limits = StreamLimits(1 << 20)
    stream = await open_stream(
        database.dsn,
        name,
        name,
        ZERO,
        ZERO,
        queried_id=queried_id,
        streams_in_progress=streams_in_progress,
        where="here",
        limits=limits,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            while b"the end" not in (await stream.receive()).block().buffer:
                pass
    finally:
        await stream.close()
    await_until(lambda: statistics(database, "total_txns") > 0, LIMIT_S, "no statistics")
    assert statistics(database, "spill_txns") == 0
    assert sent_while_open(database, name) == streams_in_progress


def statistics(database: Database, column: str) -> int:
    query = f"SELECT {column} FROM pg_stat_replication_slots WHERE slot_name = %s"
    found = database.rows(query, database.name)
    return int(found[0][0]) if found else 0
