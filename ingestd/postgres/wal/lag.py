"""The lag of a slot, by its row of pg_replication_slots (`slots/slot.py` has the query)."""

from __future__ import annotations

from ingestd.model.lsn import Lsn
from ingestd.ports import CaptureLag
from ingestd.postgres.wal.slots.slot import Slot


def slot_lag(slot: Slot) -> CaptureLag:
    """Return how far the server is ahead of the slot, and how much WAL the slot retains."""
    current, confirmed = Lsn.parse(slot.current), slot.confirmed_lsn
    return CaptureLag(
        current_lsn=current,
        confirmed_lsn=confirmed,
        lag_bytes=None if confirmed is None else max(0, current - confirmed),
        retained_bytes=slot.retained_bytes,
        safe_bytes=slot.safe_bytes,
        wal_status=slot.wal_status,
    )
