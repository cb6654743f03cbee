"""Has a slot there to stream from; and points at which tables can be read."""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection

from ingestd.capture.session import connect
from ingestd.capture.settings import WalSettings
from ingestd.capture.wal.slot import (
    ExportedPoint,
    busy_slot,
    drop_slot,
    export_point,
    find_slot,
    missing_slot,
    temporary_name,
    unusable_slot,
)
from ingestd.errors import OperatorError


async def prepare_slot(
    control: AsyncConnection[Any], settings: WalSettings, *, renew: bool, where: str
) -> ExportedPoint | None:
    """Take the slot that is there, or make one: then its point, with the snapshot.

    `renew`: what the slot has is of no use. `where` begins an error's text. Raises psycopg.Error,
    OperatorError, TransientError (``slot_active``).
    """
    name = settings.slot
    slot = await find_slot(control, name)
    if slot is not None:
        fault = slot.fault(name, control.info.dbname)
        if fault is not None:
            raise OperatorError(f"{where}: {fault.what}", remedy=fault.remedy)
        if slot.active_pid is not None:
            # Before a snapshot is read for nothing. The last daemon's walsender may take its
            # time to notice that it is gone.
            raise busy_slot(name, slot)
        # A slot that is not ours to make serves wherever it stands: all tables are read anew.
        if not (slot.is_lost or (renew and settings.manage)):
            return None
    if not settings.manage:
        raise missing_slot(name) if slot is None else unusable_slot(name, slot)
    await drop_slot(control, name)
    return await _export(settings, name, temporary=False)


async def temporary_point(settings: WalSettings) -> ExportedPoint:
    """Export a point, with a slot that goes with the snapshot. Raises psycopg.Error."""
    return await _export(settings, temporary_name(settings.slot, "snapshot"), temporary=True)


async def _export(settings: WalSettings, slot: str, *, temporary: bool) -> ExportedPoint:
    connection = await connect(settings.dsn.get_secret_value(), replication=True)
    try:
        return await export_point(connection, slot, temporary=temporary)
    except BaseException:
        await connection.close()
        raise
