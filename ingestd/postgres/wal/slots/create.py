"""Creating the slot to stream from, and points at which tables are read (design section 8.9, a).

A slot is moved or dropped here only if the lake contains no change read from it, or if it is lost.
It is moved to the point at which all tables are read, so the snapshot contains everything that the
slot skips (I1).

A slot that only can't pass a row is moved past it, not replaced: a new one would begin when all
transactions that write now have ended, and until then the source would deliver nothing.

    step                                    a kill after it
    the lake records that all tables are    the next start streams to that row again, or moves the
    to be read again, also those that are   slot at once
    not captured any more (`Startup`)
    the publication leaves tables out       the same, and a new publication: tables are re-read
    the slot is moved                       the lake has no table that needs continuity: the slot
                                            is moved once more, to a new point, and that
                                            waits for those transactions
    the lake's position is the slot's       the slot is used where it is; tables are read when those
                                            transactions have ended
    the stream begins; tables are read      the same; tables that are live again continue

So the slot is never beyond the lake's position while a table needs the changes between them:
`continuity` would take the lake for an older copy.

What the slot skips has been committed; each table is read when that is visible (I6), because its
reader waits for earlier writers of it (`snapshot.earlier_transactions`). The slot still sends what
transactions that are open have written to the tables of `sent_tables`; the readers of all others
wait for these transactions.
Source: PostgreSQL documentation, "Streaming Replication Protocol" (CREATE_REPLICATION_SLOT).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql

from ingestd.failpoints import reach_async
from ingestd.model.errors import IngestdError, OperatorError, TransientError
from ingestd.model.lsn import ZERO, Lsn
from ingestd.postgres.catalog.publication import FIRST_WITH_PARTS
from ingestd.postgres.connection.claim import take_claim
from ingestd.postgres.connection.errors import FREE_A_SLOT, cut_off
from ingestd.postgres.connection.liveness import LivenessPolicy
from ingestd.postgres.connection.session import connect, end_without_client
from ingestd.postgres.connection.wal_position import flush_position, is_standby
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.snapshot.read_view import enter_snapshot
from ingestd.postgres.wal.server import query_server_id, refuse_other
from ingestd.postgres.wal.slots.slot import (
    FIRST_WITH_FAILOVER,
    PLUGIN,
    Slot,
    advance_slot,
    busy_slot,
    drop_slot,
    find_slot,
    moved_slot,
    slot_fault,
    temporary_name,
    vanished_slot,
)
from ingestd.process.tasks import cancel_all

_DROP_WITHIN_S = 5.0
_POLL_S = 0.5
_MOST_ADVANCES = 3
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
"""The catalogs that decide what pgoutput sends, and how it is written as text."""
_DECODED_BY_FROM_15 = (*_DECODED_BY, "pg_publication_namespace")
CREATED_WITHOUT_WAIT_BYTES = 128
"""A slot created without waiting is this close to its restart_lsn: one record of running
transactions that lists none, 56 bytes, perhaps with a page header. After a wait, at least 150."""


@dataclass(frozen=True, slots=True)
class ExportedPoint:
    """A consistent point and the snapshot that shows it.

    Other sessions can import `snapshot` while `connection` stays open, which must run nothing
    else. It is the replication connection that created the slot, or an ordinary one in its place
    (`free_walsender`). Closing the former also drops a temporary slot.
    """

    connection: AsyncConnection[Any]
    point: Lsn
    snapshot: str
    at: datetime

    async def close(self) -> None:
        """Release the snapshot."""
        await self.connection.close()


@dataclass(frozen=True, slots=True)
class SlotCreationPolicy:
    """How long to wait for a slot.

    `standby_patience_s`: how long a standby may replay nothing while a slot is created there. A
    primary that is not idle logs the record that the slot needs every 15 s. `liveness`: another
    policy than the default.
    """

    standby_patience_s: float = 20.0
    liveness: LivenessPolicy | None = None


_DEFAULT = SlotCreationPolicy()


async def prepare_slot(
    control: AsyncConnection[Any],
    settings: WalSettings,
    *,
    renew: bool,
    passes: bool = False,
    unread_above: Lsn | None = None,
    where: str,
    policy: SlotCreationPolicy = _DEFAULT,
) -> ExportedPoint | None:
    """Use the existing slot, or create one: then return its point, with the snapshot.

    `renew`: discard the slot's retained changes; `passes`: by moving it. `unread_above`: from a
    slot beyond it nothing was read, so the slot is moved if an earlier start may have created it
    and not moved it; None if that is not known. `where` begins an error's text.
    Raises psycopg.Error, OperatorError, TransientError (``slot_active``, ``standby_waits``,
    ``slot_waits``, ``no_free_slot``; ``slot_missing``, ``slot_moved``, ``other_server`` if another
    client interferes).
    """
    name = settings.slot
    slot = await find_slot(control, name)
    fault = slot_fault(slot, settings, control.info.dbname)
    if isinstance(fault, OperatorError):
        raise OperatorError(f"{where}: {fault.what}", remedy=fault.remedy)
    if fault is not None:
        raise fault
    if passes and slot is not None and not slot.is_lost and settings.manage:
        with contextlib.suppress(psycopg.errors.InternalError_, psycopg.DataError):
            await _advance(control, settings, slot, Lsn.parse(slot.flushed))
            return None
    # A slot that ingestd does not manage will do at any position: all tables are re-read.
    if slot is not None and not slot.is_lost and not (settings.manage and renew):
        is_unread = unread_above is not None and (slot.confirmed_lsn or ZERO) > unread_above
        if not (settings.manage and is_unread and slot.reread_bytes > CREATED_WITHOUT_WAIT_BYTES):
            return None
        if (
            later := await _advance_past_concurrent_transactions(control, settings, slot, policy)
        ) is not None:
            return later
    await drop_slot(control, name)
    return await _make_slot(control, settings, policy)


async def _make_slot(
    control: AsyncConnection[Any], settings: WalSettings, policy: SlotCreationPolicy
) -> ExportedPoint:
    queried_id = await query_server_id(control)
    before = await _versions(control)
    made = await _export(settings, settings.slot, policy, temporary=False)
    try:
        slot = await find_slot(control, settings.slot)
        if slot is None or slot.reread_bytes <= CREATED_WITHOUT_WAIT_BYTES:
            return made
        later = await _advance_past_concurrent_transactions(control, settings, slot, policy)
        if later is None:
            await _refuse_altered(control, settings.slot, before)
    except BaseException:
        await made.close()
        if settings.snapshot == "never":  # the next start can't know that nothing was read from it
            await _drop_unread(control, settings, queried_id)
        raise
    if later is None:
        return made
    await made.close()
    return later


async def _drop_unread(
    control: AsyncConnection[Any], settings: WalSettings, queried_id: str
) -> None:
    """Drop the slot just created, if possible, even if the connection is lost.

    With the connection the claim is lost, too: its next holder may already use the slot. A
    terminated session may still be moving the slot for a moment.
    """
    name = settings.slot
    with contextlib.suppress(psycopg.Error, IngestdError, TimeoutError):
        async with asyncio.timeout(_DROP_WITHIN_S):
            while not control.closed:
                try:
                    await drop_slot(control, name)
                except psycopg.OperationalError:
                    await asyncio.sleep(_POLL_S)
                else:
                    return
            async with await connect(settings.dsn.get_secret_value()) as connection:
                await refuse_other(connection, queried_id)
                if not (await take_claim(connection, name)).holders:
                    await drop_slot(connection, name)


async def _versions(connection: AsyncConnection[Any]) -> object:
    """Return a value that differs if a row of a catalog used for decoding was altered in between.

    The newest transaction id does not show it: a transaction that began before and committed since
    has a lower one.
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
    """Raise TransientError if a catalog used for decoding was altered since `before`."""
    if await _versions(control) != before:
        raise _no_free_slot(
            f"a catalog was altered while slot {name!r} was created",
            f"{FREE_A_SLOT}; or alter no tables, types or publications meanwhile, and create no "
            "temporary tables: the slot is re-created",
        )


def _no_free_slot(why: str, remedy: str) -> TransientError:
    what = f"{why}, so a second slot is needed for a moment, and none is free"
    return TransientError(what, reason="no_free_slot", remedy=remedy)


async def _advance_past_concurrent_transactions(
    control: AsyncConnection[Any], settings: WalSettings, slot: Slot, policy: SlotCreationPolicy
) -> ExportedPoint | None:
    """Move a slot past all that ran while the server waited to create it; return its new point.

    Servers up to 18 decode such a slot as if the DDL, or the TRUNCATE, of a transaction that ended
    during the creation had not happened: the transaction, or a subtransaction of it, counts as
    running for as long as decoding begins at the slot's first restart_lsn. Nothing reports that,
    and columns are left out, or the server fails ("could not map filenumber"). Once a second slot
    has been created, no transaction of that time runs any more, and the server has kept what
    decoding needs from there; except for a transaction that a server crash cut off, which has no
    end before the next slot is created. None if no second slot is free: the slot is unchanged.
    Source: pgsql-hackers, "Bug fix in snapbuild", November 2025.
    """
    name, moved = settings.slot, slot
    for attempt in range(_MOST_ADVANCES):
        try:
            later = await temporary_point(settings, policy, is_claimed=True)
        except psycopg.errors.ConfigurationLimitExceeded:
            if attempt:  # the slot has passed its snapshot
                why = f"slot {name!r} must be moved once more"
                raise _no_free_slot(why, FREE_A_SLOT) from None
            return None
        try:
            moved = await _advance(control, settings, moved, later.point)
        except BaseException:
            await later.close()
            raise
        if moved.restart != slot.restart:
            return later
        await later.close()
    raise TransientError(
        f"slot {name!r} can't be moved past the transactions that ran when it was created",
        reason="slot_waits",
        remedy="nothing to do: retried automatically; if it persists, "
        f"SELECT pg_catalog.pg_drop_replication_slot('{name}');",
    )


async def _advance(
    control: AsyncConnection[Any], settings: WalSettings, slot: Slot, point: Lsn
) -> Slot:
    """Move the slot, if it is unchanged and the claim still holds; return it afterwards.

    Not by the connection with the claim, which would be blocked meanwhile: the server re-reads all
    WAL written since the slot was created.
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
        await refuse_other(connection, await query_server_id(control))
        await advance_slot(connection, name, point)
    moved = await find_slot(control, name)
    if moved is None or moved.is_lost:
        raise vanished_slot(name)
    return moved


async def free_walsender(settings: WalSettings, exported: ExportedPoint) -> ExportedPoint:
    """Return the same point with its snapshot kept by an ordinary session, to free the walsender.

    Otherwise a server with one walsender left could not stream while tables are read. A temporary
    slot is dropped; its snapshot stays. Closes `exported`, whatever is raised: psycopg.Error,
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
    """Wait, for a short time, until a walsender that was asked to end has ended."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_ENDS_WITHIN_S):
            while True:
                row = await (await connection.execute(_SENDS, (pid,))).fetchone()
                if row is None or not row[0]:
                    return
                await asyncio.sleep(_ENDING_S)


async def temporary_point(
    settings: WalSettings, policy: SlotCreationPolicy = _DEFAULT, *, is_claimed: bool = False
) -> ExportedPoint:
    """Export a point, with a slot that is dropped with the snapshot.

    `is_claimed`: for the holder of the claim; the next holder terminates it. Raises psycopg.Error,
    TransientError (``standby_waits``).
    """
    slot = temporary_name(settings.slot, "snapshot")
    return await _export(settings, slot, policy, temporary=True, is_claimed=is_claimed)


async def _export(
    settings: WalSettings,
    slot: str,
    policy: SlotCreationPolicy,
    *,
    temporary: bool,
    is_claimed: bool = True,
) -> ExportedPoint:
    dsn = settings.dsn.get_secret_value()
    step = "capture.point" if temporary else "capture.slot"
    claim = settings.slot if is_claimed else None
    connection = await connect(dsn, replication=True, claim=claim, liveness=policy.liveness)
    try:
        follows = await is_standby(connection)
        await reach_async(f"{step}.before", cut_off)
        making = asyncio.create_task(_export_point(connection, slot, temporary=temporary))
        try:
            if follows:
                await _await_slot_on_standby(dsn, making, slot, policy)
            exported = await making
        finally:
            await cancel_all(making)
        await reach_async(f"{step}.after", cut_off)
    except BaseException:
        await connection.close()
        raise
    return exported


async def _export_point(
    connection: AsyncConnection[Any], slot: str, *, temporary: bool
) -> ExportedPoint:
    """Create the slot and export its consistent point.

    `connection` is a replication connection and belongs to the result. The server waits until all
    transactions now running have ended. A permanent slot is a failover slot, of which standbys
    keep a copy, where the server has them (17+); but not on a standby, which can't create one.
    """
    cursor = await connection.execute(
        "SELECT pg_catalog.clock_timestamp(), pg_catalog.pg_is_in_recovery()"
    )
    row = await cursor.fetchone()
    assert row is not None
    at, in_recovery = row
    fails_over = not (temporary or in_recovery)
    kind = "TEMPORARY LOGICAL" if temporary else "LOGICAL"
    # Exporting is the default in all versions; the option's syntax changed in 15.
    options = ""
    if fails_over and connection.info.server_version >= FIRST_WITH_FAILOVER:
        options = " (SNAPSHOT 'export', FAILOVER true)"
    create = sql.SQL("CREATE_REPLICATION_SLOT {} {} {}{}").format(
        sql.Identifier(slot), sql.SQL(kind), sql.Identifier(PLUGIN), sql.SQL(options)
    )
    cursor = await connection.execute(create)
    created = await cursor.fetchone()
    assert created is not None
    _, point, snapshot, _ = created
    return ExportedPoint(connection, Lsn.parse(point), snapshot, at)


async def _await_slot_on_standby(
    dsn: str, making: asyncio.Task[ExportedPoint], slot: str, policy: SlotCreationPolicy
) -> None:
    """Wait for a slot that is being created on a standby.

    It begins at a record of running transactions, which only a primary can write; an idle one does
    not. Raises TransientError when none arrives. Source: PostgreSQL documentation, "Logical
    Decoding Concepts".
    """
    async with await connect(dsn, liveness=policy.liveness) as connection:
        replayed, since = ZERO, time.monotonic()
        while not making.done():
            now = await flush_position(connection)
            if now != replayed:
                replayed, since = now, time.monotonic()
            elif time.monotonic() - since > policy.standby_patience_s:
                raise TransientError(
                    f"slot {slot!r} can't be created on this standby while the primary is idle",
                    reason="standby_waits",
                    remedy="SELECT pg_log_standby_snapshot();  -- on the primary, while the next "
                    "attempt waits",
                )
            await asyncio.wait([making], timeout=_POLL_S)
