"""Has a slot there to stream from; and points at which tables can be read.

A slot is moved or dropped here only if nothing was read of it that the lake has, or it is lost: it
is moved to the point at which all tables are read, so what lies between is in that snapshot (I1).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql

from ingestd.failpoints import reach_async
from ingestd.model.errors import IngestdError, OperatorError, TransientError
from ingestd.model.lsn import ZERO, Lsn
from ingestd.postgres.catalog.publication import FIRST_WITH_PARTS
from ingestd.postgres.connection.claim_session import take_claim
from ingestd.postgres.connection.errors import FREE_A_SLOT
from ingestd.postgres.connection.session import connect, end_without_client
from ingestd.postgres.connection.wal_position import flush_position, is_standby
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.snapshot.ctid_splits import enter_snapshot
from ingestd.postgres.wal.errors import cut_off
from ingestd.postgres.wal.server import lineage_of, refuse_other
from ingestd.postgres.wal.slots.slot import (
    ExportedPoint,
    Slot,
    advance_slot,
    busy_slot,
    drop_slot,
    export_point,
    find_slot,
    moved_slot,
    slot_fault,
    temporary_name,
    vanished_slot,
)

STANDBY_PATIENCE_S = 20.0
"""How long a standby may replay nothing while a slot is made there. A primary that is not idle logs
what a slot needs every 15 s."""
_DROP_WITHIN_S = 5.0
_LOOK_S = 0.5
_MOVES = 3
_ENDS_WITHIN_S = 2.0
_ENDING_S = 0.005
_SENDS = "SELECT EXISTS (SELECT FROM pg_catalog.pg_stat_get_wal_senders() WHERE pid = %s)"
_VERSIONS = """
SELECT pg_catalog.count(*), coalesce(pg_catalog.sum(pg_catalog.hashtextextended(row_version, 0)), 0)
  FROM ({versions}) AS version (row_version)
"""
_DECODED_BY = (
    "pg_attribute",
    "pg_class",
    "pg_enum",
    "pg_index",
    "pg_namespace",
    "pg_proc",
    "pg_publication",
    "pg_publication_rel",
    "pg_type",
)
"""The catalogs that tell pgoutput what to send, and how it is written as text."""
_DECODED_BY_FROM_15 = (*_DECODED_BY, "pg_publication_namespace")
UNWAITED_BYTES = 128
"""A slot that was made without waiting is so near its restart_lsn: a record that nobody runs, of 56
bytes, perhaps with a page's header. With what was waited for it is 150 bytes away at least."""


async def prepare_slot(
    control: AsyncConnection[Any],
    settings: WalSettings,
    *,
    renew: bool,
    unread_above: Lsn | None = None,
    where: str,
) -> ExportedPoint | None:
    """Take the slot that is there, or make one: then its point, with the snapshot.

    `renew`: what the slot has is of no use. `unread_above`: nothing was read of a slot that is
    beyond that, so it is moved if an earlier start may have made it and not moved it; None if that
    is not known. `where` begins an error's text.
    Raises psycopg.Error, OperatorError, TransientError (``slot_active``, ``standby_waits``,
    ``slot_waits``, ``no_free_slot``; ``slot_missing``, ``slot_moved``, ``other_server`` if someone
    meddles).
    """
    name = settings.slot
    slot = await find_slot(control, name)
    fault = slot_fault(slot, settings, control.info.dbname)
    if isinstance(fault, OperatorError):
        raise OperatorError(f"{where}: {fault.what}", remedy=fault.remedy)
    if fault is not None:
        raise fault
    # A slot that is not ours to make serves wherever it stands: all tables are re-read.
    if slot is not None and not slot.is_lost and not (settings.manage and renew):
        is_unread = unread_above is not None and (slot.confirmed_lsn or ZERO) > unread_above
        if not (settings.manage and is_unread and slot.again_bytes > UNWAITED_BYTES):
            return None
        if (later := await _move_past_those_waited_for(control, settings, slot)) is not None:
            return later
    await drop_slot(control, name)
    return await _make_slot(control, settings)


async def _make_slot(control: AsyncConnection[Any], settings: WalSettings) -> ExportedPoint:
    lineage = await lineage_of(control)
    before = await _versions(control)
    made = await _export(settings, settings.slot, temporary=False)
    try:
        slot = await find_slot(control, settings.slot)
        if slot is None or slot.again_bytes <= UNWAITED_BYTES:
            return made
        later = await _move_past_those_waited_for(control, settings, slot)
        if later is None:
            await _refuse_altered(control, settings.slot, before)
    except BaseException:
        await made.close()
        if settings.snapshot == "never":  # the next start can't know that nothing was read of it
            await _drop_unread(control, settings, lineage)
        raise
    if later is None:
        return made
    await made.close()
    return later


async def _drop_unread(control: AsyncConnection[Any], settings: WalSettings, lineage: str) -> None:
    """Drop the slot that was just made, if that can be done, also where the connection is lost.

    With that the claim is lost, too: whoever has it now may have taken the slot. A session that was
    cut off may be moving it still, for a moment.
    """
    name = settings.slot
    with contextlib.suppress(psycopg.Error, IngestdError, TimeoutError):
        async with asyncio.timeout(_DROP_WITHIN_S):
            while not control.closed:
                try:
                    await drop_slot(control, name)
                except psycopg.OperationalError:
                    await asyncio.sleep(_LOOK_S)
                else:
                    return
            async with await connect(settings.dsn.get_secret_value()) as connection:
                await refuse_other(connection, lineage)
                if not (await take_claim(connection, name)).holders:
                    await drop_slot(connection, name)


async def _versions(connection: AsyncConnection[Any]) -> object:
    """Return what differs if a row of the catalogs that are decoded by was altered in between.

    Not the ids of transactions: one that began before and committed since has a lower one.
    """
    is_from_15 = connection.info.server_version >= FIRST_WITH_PARTS
    versions = sql.SQL(" UNION ALL ").join(
        sql.SQL(
            "SELECT {}::text || ' ' || xmin::text || ' ' || ctid::text FROM pg_catalog.{}"
        ).format(sql.Literal(catalog), sql.Identifier(catalog))
        for catalog in (_DECODED_BY_FROM_15 if is_from_15 else _DECODED_BY)
    )
    return await (await connection.execute(sql.SQL(_VERSIONS).format(versions=versions))).fetchone()


async def _refuse_altered(control: AsyncConnection[Any], name: str, before: object) -> None:
    """Raise TransientError if anything that is decoded by was altered since `before`."""
    if await _versions(control) != before:
        raise _no_free_slot(
            f"something was altered while slot {name!r} was made",
            f"{FREE_A_SLOT}; or alter no tables, types or publications meanwhile, and make no "
            "temporary tables: it is made again",
        )


def _no_free_slot(why: str, remedy: str) -> TransientError:
    what = f"{why}, so a second one is needed for a moment, and none is free"
    return TransientError(what, reason="no_free_slot", remedy=remedy)


async def _move_past_those_waited_for(
    control: AsyncConnection[Any], settings: WalSettings, slot: Slot
) -> ExportedPoint | None:
    """Move a slot for whose making the server waited past all that ran then; give its new point.

    Servers to 18 decode from such a slot as if DDL had not been, or TRUNCATE, of a transaction that
    ended during the making: it, or a subtransaction of it, counts as running for as long as
    decoding begins at the slot's first restart_lsn. Nothing tells of that, and columns are left
    out, or the server fails ("could not map filenumber"). Where a second slot was made, nothing of
    that time runs any more, and the server has kept what decoding begins with there; but for a
    transaction that a crash of the server cut off, which has no end before the next slot's making.
    None if no second slot is free: it is as it was. Source: pgsql-hackers, "Bug fix in snapbuild",
    November 2025.
    """
    name, moved = settings.slot, slot
    for attempt in range(_MOVES):
        try:
            later = await temporary_point(settings, is_claimed=True)
        except psycopg.errors.ConfigurationLimitExceeded:
            if attempt:  # its snapshot lies behind the slot now
                why = f"slot {name!r} is to be moved once more"
                raise _no_free_slot(why, FREE_A_SLOT) from None
            return None
        try:
            moved = await _move(control, settings, moved, later.point)
        except BaseException:
            await later.close()
            raise
        if moved.restart != slot.restart:
            return later
        await later.close()
    raise TransientError(
        f"slot {name!r} can't be moved past what ran when it was made",
        reason="slot_waits",
        remedy="nothing: it is tried again; if it stays, "
        f"SELECT pg_catalog.pg_drop_replication_slot('{name}');",
    )


async def _move(
    control: AsyncConnection[Any], settings: WalSettings, slot: Slot, point: Lsn
) -> Slot:
    """Move it, if it is as it was left and the claim still holds; give how it is then.

    Not by the connection with the claim, which would be deaf for as long: all WAL is read again
    that was written since the slot was made.
    """
    name = settings.slot
    found = await find_slot(control, name)
    if found is None:
        raise vanished_slot(name)
    if found.active_pid is not None:
        raise busy_slot(name, found)
    if found.confirmed != slot.confirmed:
        raise moved_slot(name, f"it is at {found.confirmed}, and was at {slot.confirmed}")
    async with await connect(settings.dsn.get_secret_value(), claim=name) as connection:
        await end_without_client(connection)
        await refuse_other(connection, await lineage_of(control))
        await advance_slot(connection, name, point)
    moved = await find_slot(control, name)
    if moved is None or moved.is_lost:
        raise vanished_slot(name)
    return moved


async def without_walsender(settings: WalSettings, exported: ExportedPoint) -> ExportedPoint:
    """Return the same point, its snapshot kept by an ordinary session: the walsender is free.

    Else a server with one walsender left could not stream while tables are read. A temporary slot
    is dropped; its snapshot stays. Closes `exported`, whatever is raised: psycopg.Error,
    TransientError (``snapshot_gone``).
    """
    pid = exported.connection.info.backend_pid
    try:
        keeper = await connect(settings.dsn.get_secret_value(), autocommit=False)
        try:
            await enter_snapshot(keeper, exported.snapshot)
            row = await (await keeper.execute("SELECT pg_catalog.pg_export_snapshot()")).fetchone()
            assert row is not None
            await exported.close()
            await _await_walsenders_end(keeper, pid)
        except BaseException:
            await keeper.close()
            raise
    finally:
        await exported.close()
    return replace(exported, connection=keeper, snapshot=row[0])


async def _await_walsenders_end(connection: AsyncConnection[Any], pid: int) -> None:
    """Wait until a walsender that was told to end has ended, but not for long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ENDS_WITHIN_S):
            while True:
                row = await (await connection.execute(_SENDS, (pid,))).fetchone()
                if row is None or not row[0]:
                    return
                await asyncio.sleep(_ENDING_S)


async def temporary_point(settings: WalSettings, *, is_claimed: bool = False) -> ExportedPoint:
    """Export a point, with a slot that goes with the snapshot.

    `is_claimed`: for the holder of the claim, whose successor ends it. Raises psycopg.Error,
    TransientError (``standby_waits``).
    """
    slot = temporary_name(settings.slot, "snapshot")
    return await _export(settings, slot, temporary=True, is_claimed=is_claimed)


async def _export(
    settings: WalSettings, slot: str, *, temporary: bool, is_claimed: bool = True
) -> ExportedPoint:
    dsn = settings.dsn.get_secret_value()
    step = "capture.point" if temporary else "capture.slot"
    claim = settings.slot if is_claimed else None
    connection = await connect(dsn, replication=True, claim=claim)
    try:
        follows = await is_standby(connection)
        await reach_async(f"{step}.before", cut_off)
        making = asyncio.create_task(export_point(connection, slot, temporary=temporary))
        try:
            if follows:
                await _while_it_replays(dsn, making, slot)
            exported = await making
        finally:
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)
        await reach_async(f"{step}.after", cut_off)
    except BaseException:
        await connection.close()
        raise
    return exported


async def _while_it_replays(dsn: str, making: asyncio.Task[ExportedPoint], slot: str) -> None:
    """Wait for a slot that is made on a standby.

    It begins at a record of running transactions, which only a primary can write and an idle one
    does not. Raises TransientError when nothing comes. Source: PostgreSQL documentation, "Logical
    Decoding Concepts".
    """
    async with await connect(dsn) as connection:
        replayed, since = ZERO, time.monotonic()
        while not making.done():
            now = await flush_position(connection)
            if now != replayed:
                replayed, since = now, time.monotonic()
            elif time.monotonic() - since > STANDBY_PATIENCE_S:
                raise TransientError(
                    f"slot {slot!r} can't be made on this standby while the primary is idle",
                    reason="standby_waits",
                    remedy="SELECT pg_log_standby_snapshot();  -- on the primary, while the next "
                    "attempt waits",
                )
            await asyncio.wait([making], timeout=_LOOK_S)
