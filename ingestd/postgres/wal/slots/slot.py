"""The replication slot: its row, what is wrong with it, and moving it.

Source: PostgreSQL documentation, the view pg_replication_slots.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
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
"""PostgreSQL 17 introduced slots that standbys keep a copy of."""

# A walsender waits for standbys (`StandbySlotsHaveCaughtup`); the slot copies that drain a backlog
# do not. This limit keeps them from reading what a promoted standby would lack. Null: no limit; a
# slot that is listed and missing allows nothing, as with the walsender.
_KEPT_BACK = sql.SQL("""
CASE WHEN (to_jsonb(s) ->> 'failover')::bool AND NOT pg_catalog.pg_is_in_recovery() THEN
  (SELECT CASE WHEN bool_and(p.restart_lsn IS NOT NULL) IS FALSE THEN s.confirmed_flush_lsn
               ELSE min(p.restart_lsn) END
     FROM string_to_table(translate(
            current_setting('synchronized_standby_slots', true), ' "', ''), ',') AS name
     LEFT JOIN pg_catalog.pg_replication_slots p
       ON p.slot_name = name AND p.slot_type = 'physical') END""")
# Read as JSON, because servers have different columns: `conflicting` since 16,
# `invalidation_reason`, `failover` and `synced` since 17.
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
    "unfinished": "its creation did not complete",
}
"""Why a slot is invalid: the values of pg_replication_slots.invalidation_reason, and our own."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A row of pg_replication_slots; positions as text, None where the server has none.

    `invalid`: why it is unusable, a key of _INVALID or the reason of a newer server; None if it is
    usable. `failover`: standbys keep a copy of it (17+). `two_phase`: it sends prepared
    transactions before they are committed, as pgoutput does since 15. `flushed`: how far changes
    may be read. `read_transactions`: how many transactions were read from it, per the server's
    statistics, which a crash resets.
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
        """The position at which it resumes."""
        return None if self.confirmed is None else Lsn.parse(self.confirmed)

    @property
    def reread_bytes(self) -> int:
        """WAL re-read before `confirmed`, in bytes: decoding begins at `restart`."""
        if self.confirmed is None or self.restart is None:
            return 0
        return max(0, Lsn.parse(self.confirmed) - Lsn.parse(self.restart))

    @property
    def is_lost(self) -> bool:
        """True if the server has invalidated it."""
        return self.invalid is not None

    @property
    def why_lost(self) -> str:
        """Why the server invalidated it, and the setting behind that."""
        reason = self.invalid or ""
        text = _INVALID.get(reason, reason)
        return text.format(keep_size=self.keep_size, idle_timeout=self.idle_timeout)

    def is_other(self, database: str) -> bool:
        """Return whether its kind, plugin or database is not ours."""
        return (self.slot_type, self.plugin, self.database) != ("logical", PLUGIN, database)

    def fault(self, name: str, database: str) -> OperatorError | None:
        """Return why ingestd can't use this slot, None if it can."""
        if not self.is_other(database):
            return self._sends_too_early(name) if self.two_phase else None
        return OperatorError(
            f"slot {name!r} is a {self.slot_type} slot of plugin {self.plugin}, "
            f"database {self.database}: ingestd needs a logical {PLUGIN} slot in {database}",
            remedy="set another name in `slot`, or drop that slot if nothing uses it: "
            f"SELECT pg_catalog.pg_drop_replication_slot('{name}');",
        )

    def _sends_too_early(self, name: str) -> OperatorError:
        return OperatorError(
            f"slot {name!r} was created with two_phase: it sends prepared transactions before they "
            "are committed",
            remedy=f"SELECT pg_catalog.pg_drop_replication_slot('{name}');  and, with "
            f"manage = false: SELECT "
            f"pg_catalog.pg_create_logical_replication_slot('{name}', '{PLUGIN}');  changes that "
            f"only this slot "
            "had are lost: all tables are re-read, or it stops, as slot_lost and snapshot say",
        )


async def find_slot(connection: AsyncConnection[Any], name: str) -> Slot | None:
    """Return the slot; None if it does not exist."""
    async with connection.cursor(row_factory=class_row(Slot)) as cursor:
        await cursor.execute(_SLOT, (name,))
        return await cursor.fetchone()


def gap_before(slot: Slot | None, name: str, position: Lsn) -> str | None:
    """Return why the slot may lack changes after `position`; None if it has them all."""
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
    """Move the slot there. Meanwhile the server reads all WAL from restart_lsn on.

    Raises TransientError (``slot_missing``; ``slot_moved``: beyond that, or lost), psycopg.Error.
    """
    try:
        await connection.execute(
            "SELECT pg_catalog.pg_replication_slot_advance(%s, %s::pg_lsn)", (name, str(position))
        )
    except psycopg.errors.UndefinedObject as error:
        raise vanished_slot(name) from error
    except psycopg.errors.ObjectNotInPrerequisiteState as error:
        raise moved_slot(name, loggable_message(error)) from error


def vanished_slot(name: str) -> TransientError:
    """Return the error for a missing slot that ingestd manages: the next start creates it."""
    return TransientError(
        f"slot {name!r} does not exist",
        reason="slot_missing",
        remedy="nothing to do: `ingestd run` creates it when it starts",
    )


def moved_slot(name: str, what: str) -> TransientError:
    """Return the error for a slot moved by another client: the next start finds what it skipped."""
    return TransientError(
        f"slot {name!r} is not where ingestd left it: {what}",
        reason="slot_moved",
        remedy="find the client that moves or re-creates this slot: only ingestd may do that",
    )


def skipped(confirmed: Lsn, wanted: Lsn) -> str:
    """Describe a slot that was moved too far."""
    return f"it is at {confirmed}, and should resume at {wanted}"


def busy_slot(name: str, slot: Slot) -> TransientError:
    """Return the error for a slot that another client reads."""
    return TransientError(
        f"slot {name!r} is in use by pid {slot.active_pid} ({slot.holder or 'unknown'})",
        reason="slot_active",
        remedy=f"stop that client, or SELECT pg_catalog.pg_terminate_backend({slot.active_pid});",
    )


def missing_slot(name: str) -> OperatorError:
    """Return the error for a missing slot that ingestd may not create (manage = false)."""
    return OperatorError(
        f"slot {name!r} does not exist, and manage = false",
        remedy=f"SELECT pg_catalog.pg_create_logical_replication_slot('{name}', '{PLUGIN}');",
    )


def older_slot(name: str, publication: str, where: str) -> OperatorError:
    """Return the error for a slot older than its publication, both unmanaged (manage = false)."""
    return OperatorError(
        f"{where}: publication {publication!r} was created after changes that slot {name!r} has "
        "yet to send, or was dropped and re-created",
        remedy=f"SELECT pg_catalog.pg_drop_replication_slot('{name}'); "
        f"SELECT pg_catalog.pg_create_logical_replication_slot('{name}', '{PLUGIN}');"
        "  -- all tables are read again",
    )


def unusable_slot(name: str, slot: Slot) -> OperatorError:
    """Return the error for an invalid slot that ingestd may not re-create (manage = false)."""
    return OperatorError(
        f"slot {name!r} is invalid: {slot.why_lost}; manage = false",
        remedy=f"SELECT pg_catalog.pg_drop_replication_slot('{name}'); "
        f"SELECT pg_catalog.pg_create_logical_replication_slot('{name}', '{PLUGIN}');",
    )


def slot_fault(slot: Slot | None, settings: WalSettings, database: str) -> IngestdError | None:
    """Return why a run would neither use this slot nor create one; None if it would."""
    name = settings.slot
    if slot is None:
        return None if settings.manage else missing_slot(name)
    if (fault := slot.fault(name, database)) is not None:
        return fault
    if slot.active_pid is not None:
        # Before a snapshot is read for nothing. The walsender of the previous daemon may take a
        # while to detect that its client has ended.
        return busy_slot(name, slot)
    return unusable_slot(name, slot) if slot.is_lost and not settings.manage else None


def temporary_name(slot: str, purpose: str) -> str:
    """Return a unique name: a dead session may keep its own temporary slot for a while."""
    return f"{slot[:40]}_{purpose}_{uuid.uuid4().hex[:8]}"
