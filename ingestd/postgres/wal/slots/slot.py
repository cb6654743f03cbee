"""The replication slot: what the server keeps for us; and exported points.

Source: PostgreSQL documentation, "Streaming Replication Protocol" (CREATE_REPLICATION_SLOT,
IDENTIFY_SYSTEM) and the view pg_replication_slots.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.rows import class_row

from ingestd.model.errors import IngestdError, OperatorError, TransientError
from ingestd.model.lsn import Lsn
from ingestd.postgres.connection.server_messages import loggable_message
from ingestd.postgres.connection.wal_position import CURRENT, FLUSHED
from ingestd.postgres.settings import WalSettings

PLUGIN = "pgoutput"
FIRST_WITH_FAILOVER = 170000
"""PostgreSQL 17 brought slots that standbys keep a copy of."""

# What a walsender does by itself (`StandbySlotsHaveCaughtup`) does not hold for copies of the slot,
# which drain a backlog: nobody is to have what the standby that takes over would lack. Null where
# nothing is kept back; a slot that is named and not there keeps back all, as from the walsender.
_KEPT_BACK = sql.SQL("""
CASE WHEN (to_jsonb(s) ->> 'failover')::bool AND NOT pg_catalog.pg_is_in_recovery() THEN
  (SELECT CASE WHEN bool_and(p.restart_lsn IS NOT NULL) IS FALSE THEN s.confirmed_flush_lsn
               ELSE min(p.restart_lsn) END
     FROM string_to_table(translate(
            current_setting('synchronized_standby_slots', true), ' "', ''), ',') AS name
     LEFT JOIN pg_catalog.pg_replication_slots p
       ON p.slot_name = name AND p.slot_type = 'physical') END""")
# As JSON, because servers have different columns: `conflicting` from 16 on, `invalidation_reason`,
# `failover` and `synced` from 17 on.
_SLOT = sql.SQL("""
SELECT plugin, slot_type, database, active_pid,
       confirmed_flush_lsn::text AS confirmed, restart_lsn::text AS restart,
       wal_status, safe_wal_size::int8 AS safe_bytes,
       pg_wal_lsn_diff({current}, restart_lsn)::int8 AS retained_bytes,
       {current}::text AS current, least({flushed}, {kept_back})::text AS flushed,
       (SELECT application_name FROM pg_stat_activity WHERE pid = active_pid) AS holder,
       coalesce(to_jsonb(s) ->> 'invalidation_reason',
                CASE WHEN (to_jsonb(s) ->> 'conflicting')::bool THEN 'conflict'
                     WHEN wal_status = 'lost' THEN 'wal_removed'
                     WHEN restart_lsn IS NULL THEN 'unfinished' END) AS invalid,
       coalesce((to_jsonb(s) ->> 'failover')::bool, false) AS failover,
       two_phase AND current_setting('server_version_num')::int >= 150000 AS two_phase,
       coalesce((SELECT total_txns FROM pg_catalog.pg_stat_replication_slots t
                  WHERE t.slot_name = s.slot_name), 0)::int8 AS read_transactions,
       current_setting('max_slot_wal_keep_size') AS keep_size,
       coalesce(current_setting('idle_replication_slot_timeout', true), '') AS idle_timeout
  FROM pg_replication_slots s WHERE slot_name = %s
""").format(current=CURRENT, flushed=FLUSHED, kept_back=_KEPT_BACK)
_INVALID = {
    "wal_removed": "the server removed WAL that it needs (max_slot_wal_keep_size = {keep_size})",
    "idle_timeout": "it was not used for longer than idle_replication_slot_timeout = "
    "{idle_timeout}",
    "rows_removed": "the standby removed catalog rows that it needs (prevented by "
    "hot_standby_feedback = on, and a slot of the primary for the standby)",
    "wal_level_insufficient": "wal_level of the primary was not 'logical' for a time",
    "conflict": "recovery conflicted with it: catalog rows that it needs were removed (prevented "
    "by hot_standby_feedback = on), or wal_level of the primary was not 'logical'",
    "unfinished": "it was never made whole",
}
"""Why a slot is of no use; those of pg_replication_slots.invalidation_reason, and our own."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A row of pg_replication_slots; positions as text, None where the server has none.

    `invalid`: why it can't be used any more, a key of _INVALID or what a newer server says; None if
    it can. `failover`: standbys keep a copy of it (17+). `two_phase`: it gives prepared
    transactions before they are committed, as pgoutput does from 15 on. `flushed`: how far changes
    may be read. `read_transactions`: how many were read of it, as far as the server still knows: it
    forgets that when it crashes.
    """

    plugin: str | None
    slot_type: str
    database: str | None
    active_pid: int | None
    confirmed: str | None
    restart: str | None
    wal_status: str | None
    safe_bytes: int | None
    retained_bytes: int | None
    current: str
    flushed: str
    holder: str | None
    invalid: str | None
    failover: bool
    two_phase: bool
    read_transactions: int
    keep_size: str
    idle_timeout: str

    @property
    def confirmed_lsn(self) -> Lsn | None:
        """Where it goes on."""
        return None if self.confirmed is None else Lsn.parse(self.confirmed)

    @property
    def again_bytes(self) -> int:
        """How much WAL is read before what follows `confirmed`: decoding begins at `restart`."""
        if self.confirmed is None or self.restart is None:
            return 0
        return max(0, Lsn.parse(self.confirmed) - Lsn.parse(self.restart))

    @property
    def is_lost(self) -> bool:
        """Whether it can't be used any more: the server gave it up."""
        return self.invalid is not None

    @property
    def why_lost(self) -> str:
        """What the server gave it up for, and the setting behind that."""
        reason = self.invalid or ""
        told = _INVALID.get(reason, reason)
        return told.format(keep_size=self.keep_size, idle_timeout=self.idle_timeout)

    def is_other(self, database: str) -> bool:
        """Return whether it is of another kind or database than ours."""
        return (self.slot_type, self.plugin, self.database) != ("logical", PLUGIN, database)

    def fault(self, name: str, database: str) -> OperatorError | None:
        """Say why this slot can't be ours, None if it can."""
        if not self.is_other(database):
            return self._sends_too_early(name) if self.two_phase else None
        return OperatorError(
            f"slot {name!r} is a {self.slot_type} slot of plugin {self.plugin}, "
            f"database {self.database}: ingestd needs a logical {PLUGIN} slot in {database}",
            remedy="give another name in `slot`, or drop that slot if nothing uses it: "
            f"SELECT pg_catalog.pg_drop_replication_slot('{name}');",
        )

    def _sends_too_early(self, name: str) -> OperatorError:
        return OperatorError(
            f"slot {name!r} was made with two_phase: it gives prepared transactions before they "
            "are committed",
            remedy=f"SELECT pg_catalog.pg_drop_replication_slot('{name}');  and, with "
            f"manage = false: SELECT "
            f"pg_catalog.pg_create_logical_replication_slot('{name}', '{PLUGIN}');  what "
            f"only this slot "
            "had is lost: all tables are read anew, or, by slot_lost or snapshot, it stops",
        )


async def find_slot(connection: AsyncConnection[Any], name: str) -> Slot | None:
    """Read the slot; None if there is none."""
    async with connection.cursor(row_factory=class_row(Slot)) as cursor:
        await cursor.execute(_SLOT, (name,))
        return await cursor.fetchone()


def gap_before(slot: Slot | None, name: str, position: Lsn) -> str | None:
    """Say why the slot may not have all that follows `position`; None if it has."""
    if slot is None:
        return f"slot {name!r} does not exist"
    if slot.is_lost:
        return f"slot {name!r} is invalid: {slot.why_lost}"
    confirmed = slot.confirmed_lsn
    if confirmed is None or confirmed > position:
        return f"slot {name!r} was moved to {confirmed}, the lake ends at {position}"
    return None


async def drop_slot(connection: AsyncConnection[Any], name: str) -> None:
    """Drop the slot if it exists."""
    await connection.execute(
        "SELECT pg_catalog.pg_drop_replication_slot(slot_name) FROM pg_replication_slots "
        "WHERE slot_name = %s",
        (name,),
    )


async def advance_slot(connection: AsyncConnection[Any], name: str, position: Lsn) -> None:
    """Move the slot there. The server reads all WAL from its restart_lsn on meanwhile.

    Raises TransientError (``slot_missing``, ``slot_moved``: beyond that, or lost), psycopg.Error.
    """
    try:
        await connection.execute(
            "SELECT pg_catalog.pg_replication_slot_advance(%s, %s::pg_lsn)", (name, str(position))
        )
    except psycopg.errors.UndefinedObject as error:
        raise vanished_slot(name) from error
    except psycopg.errors.ObjectNotInPrerequisiteState as error:
        raise moved_slot(name, loggable_message(error)) from error


@dataclass(slots=True)
class UndecodablePast:
    """What the slot can't decode; a source has one as long as the process runs.

    `lacks_publication`: it was made after changes that the slot still has to send.
    """

    lacks_publication: bool = False


def vanished_slot(name: str) -> TransientError:
    """Make the error for a slot that is ours to make and not there: the next start makes it."""
    return TransientError(
        f"slot {name!r} does not exist",
        reason="slot_missing",
        remedy="nothing to do: `ingestd run` makes it at its start",
    )


def moved_slot(name: str, what: str) -> TransientError:
    """Make the error for a slot that someone else moved: the next start sees what that skipped."""
    return TransientError(
        f"slot {name!r} is not where ingestd left it: {what}",
        reason="slot_moved",
        remedy="look for who moves this slot, or drops it and makes it anew: only ingestd may",
    )


def skipped(confirmed: Lsn, wanted: Lsn) -> str:
    """Say how a slot was moved too far."""
    return f"it is at {confirmed}, and was to go on from {wanted}"


def busy_slot(name: str, slot: Slot) -> TransientError:
    """Make the error for a slot that another client reads."""
    return TransientError(
        f"slot {name!r} is in use by pid {slot.active_pid} ({slot.holder or 'unknown'})",
        reason="slot_active",
        remedy=f"stop that client, or SELECT pg_catalog.pg_terminate_backend({slot.active_pid});",
    )


def missing_slot(name: str) -> OperatorError:
    """Make the error for a slot that is not there and not ours to make (manage = false)."""
    return OperatorError(
        f"slot {name!r} does not exist, and manage = false",
        remedy=f"SELECT pg_catalog.pg_create_logical_replication_slot('{name}', '{PLUGIN}');",
    )


def older_slot(name: str, publication: str, where: str) -> OperatorError:
    """Make the error for a slot older than its publication, not ours to make (manage = false)."""
    return OperatorError(
        f"{where}: publication {publication!r} was made after changes that slot {name!r} still has "
        "to send, or dropped and made again",
        remedy=f"SELECT pg_catalog.pg_drop_replication_slot('{name}'); "
        f"SELECT pg_catalog.pg_create_logical_replication_slot('{name}', '{PLUGIN}');"
        "  -- all tables are read again",
    )


def unusable_slot(name: str, slot: Slot) -> OperatorError:
    """Make the error for a slot that is lost and not ours to make again (manage = false)."""
    return OperatorError(
        f"slot {name!r} is invalid: {slot.why_lost}; manage = false",
        remedy=f"SELECT pg_catalog.pg_drop_replication_slot('{name}'); "
        f"SELECT pg_catalog.pg_create_logical_replication_slot('{name}', '{PLUGIN}');",
    )


def slot_fault(slot: Slot | None, settings: WalSettings, database: str) -> IngestdError | None:
    """Say why a run would not take this slot, nor make one in its place; None if it would."""
    name = settings.slot
    if slot is None:
        return None if settings.manage else missing_slot(name)
    if (fault := slot.fault(name, database)) is not None:
        return fault
    if slot.active_pid is not None:
        # Before a snapshot is read for nothing. The last daemon's walsender may take its time to
        # notice that it is gone.
        return busy_slot(name, slot)
    return unusable_slot(name, slot) if slot.is_lost and not settings.manage else None


def temporary_name(slot: str, purpose: str) -> str:
    """Name a temporary slot; a dead session may hold its own for a while, so never the same."""
    return f"{slot[:40]}_{purpose}_{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, slots=True)
class ExportedPoint:
    """A consistent point and the snapshot that shows it.

    `snapshot` can be taken up by other sessions while `connection` stays open, which must run
    nothing else: the replication connection that made the slot, or an ordinary one in its place
    (`slot_making.without_walsender`). Closing the former also drops a temporary slot.
    """

    connection: AsyncConnection[Any]
    point: Lsn
    snapshot: str
    at: datetime

    async def close(self) -> None:
        """Let the snapshot go."""
        await self.connection.close()


async def export_point(
    connection: AsyncConnection[Any], slot: str, *, temporary: bool
) -> ExportedPoint:
    """Create the slot and export its consistent point.

    `connection` is a replication connection and belongs to the result. The server waits until all
    transactions now running have ended. Standbys are to keep a copy of a slot that stays, where
    the server has that (17+); a standby itself makes no such slot.
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
