"""Moving a slot beside a drain: to what is confirmed, and without reading all of it ever again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ingestd.capture.wal.slot_advance import SlotAdvance
from ingestd.positions import Lsn

if TYPE_CHECKING:
    from tests.harness.databases import Database


def write(database: Database, nbytes: int) -> Lsn:
    """Write about as much WAL, give where the server is then."""
    database.execute(f"SELECT pg_logical_emit_message(true, 'x', repeat('x', {nbytes}))")
    [[position]] = database.rows("SELECT pg_current_wal_flush_lsn()::text")
    return Lsn.parse(position)


def confirmed(database: Database) -> Lsn:
    [[position]] = database.rows(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s",
        database.name,
    )
    return Lsn.parse(position)


async def moved(database: Database, advance: SlotAdvance, position: Lsn) -> bool:
    """Tell whether the slot is moved there."""
    await advance.confirm(position)
    await advance.settle()
    return confirmed(database) >= position


async def test_a_step_is_no_shorter_than_what_is_read_again_for_it(database: Database) -> None:
    database.execute(f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')")
    advance = SlotAdvance(database.dsn, database.name, "source s", step_bytes=100_000)
    advance.begin(confirmed(database))
    try:
        assert not await moved(database, advance, write(database, 50_000))
        assert await moved(database, advance, write(database, 2_000_000))
        assert not await moved(database, advance, write(database, 300_000))
        assert await moved(database, advance, write(database, 2_500_000))
    finally:
        await advance.close()
