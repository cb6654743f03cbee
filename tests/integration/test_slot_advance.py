"""Advancing a slot during a drain: to the confirmed position, in steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ingestd.model.lsn import Lsn
from ingestd.postgres.wal.slots.advance import SlotAdvance, step_after
from tests.harness.databases import query_server_id

if TYPE_CHECKING:
    from tests.harness.databases import Database


def write(database: Database, nbytes: int) -> None:
    database.execute(f"SELECT pg_logical_emit_message(true, 'x', repeat('x', {nbytes}))")


def confirmed(database: Database) -> Lsn:
    [[position]] = database.rows(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s",
        database.name,
    )
    return Lsn.parse(position)


async def test_a_slot_is_moved_by_steps_and_small_ones_wait(database: Database) -> None:
    database.execute(f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')")
    advance = SlotAdvance(database.dsn, database.name, "s", step_bytes=100_000)
    start = confirmed(database)
    advance.start_at(start)
    advance.queried_id = await query_server_id(database.dsn)

    async def moved(nbytes: int) -> bool:
        position = Lsn(start + nbytes)
        await advance.advance_to(position)
        await advance.settle()
        return confirmed(database) == position

    try:
        write(database, 3_000_000)
        assert not await moved(50_000)
        assert await moved(2_000_000)
        assert not await moved(2_200_000)  # restart_lsn lies far behind: larger steps
        assert await moved(2_500_000)
        advance.start_at(Lsn(start + 2_500_000))
        assert await moved(2_601_000)
    finally:
        await advance.close()


def test_a_step_is_as_long_as_the_reread_up_to_a_limit() -> None:
    assert [step_after(n, 10) for n in (0, 9, 11, 40, 41, 1000)] == [10, 10, 11, 40, 40, 40]
