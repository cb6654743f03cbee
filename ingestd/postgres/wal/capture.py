"""The ChangeCapture of kind `wal`.

Connections: one for control, which holds the claim and runs catalog queries and DDL; one for lag;
the replication connection of the stream; and those of a snapshot while it is read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.decode.pgoutput.relation import Relation
from ingestd.model.changes import ChangeSet
from ingestd.model.errors import OperatorError, TransientError
from ingestd.model.lake_state import LakeState, RegisteredTable
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.row_checks import row_limit_bytes
from ingestd.model.schema import Table, TableId
from ingestd.ports import (
    CaptureLag,
    Continuity,
    Discovery,
    Fresh,
    Lost,
    Prepared,
    Resumed,
    ServerEnd,
    Snapshot,
)
from ingestd.postgres.connection.control_connection import ControlConnection
from ingestd.postgres.connection.errors import FREE_A_SENDER
from ingestd.postgres.connection.session import connect
from ingestd.postgres.connection.wal_position import insert_position
from ingestd.postgres.rewrites.stream_evidence import StreamEvidence
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.snapshot.earlier_transactions import next_xid
from ingestd.postgres.snapshot.incremental import IncrementalSnapshot
from ingestd.postgres.snapshot.incremental_choice import choose_incremental
from ingestd.postgres.snapshot.read_view import current_pg_snapshot
from ingestd.postgres.wal.change_stream import ChangeStream
from ingestd.postgres.wal.continuity import continuity_of, server_end
from ingestd.postgres.wal.discovery import SourceTables
from ingestd.postgres.wal.drain.drain import DrainPolicy
from ingestd.postgres.wal.lag import slot_lag
from ingestd.postgres.wal.publication.alteration import is_locked
from ingestd.postgres.wal.publication.preparation import prepare_publication
from ingestd.postgres.wal.relation_cache import Relations
from ingestd.postgres.wal.server import WalServer, inspect_server, position_of, server_notices
from ingestd.postgres.wal.slot_snapshot import SlotSnapshot
from ingestd.postgres.wal.slots.create import (
    ExportedPoint,
    free_walsender,
    prepare_slot,
    temporary_point,
)
from ingestd.postgres.wal.slots.decode_gap import SlotDecodeGap
from ingestd.postgres.wal.slots.sent_tables import SentTables
from ingestd.postgres.wal.slots.slot import (
    find_slot,
    missing_slot,
    moved_slot,
    skipped,
    vanished_slot,
)
from ingestd.postgres.wal.spool import SpoolPolicy

DDL_PATIENCE_S = 0.2
"""The delay before the catalog is checked again for DDL that the last check did not see."""


class WalCapture:
    """Logical replication of one database; see `ingestd.ports.ChangeCapture` for the contract."""

    supports_replay = True

    def __init__(
        self,
        source: str,
        settings: WalSettings,
        *,
        memory_bytes: int,
        drain_policy: DrainPolicy,
        spool: SpoolPolicy | None = None,
        evidence: StreamEvidence | None = None,
        decode_gap: SlotDecodeGap | None = None,
    ) -> None:
        self._where = f"source {source}"
        self._settings = settings
        self._dsn = settings.dsn.get_secret_value()
        self._slot = settings.slot
        self._control = ControlConnection(self._where, self._dsn)
        self._monitor: AsyncConnection[Any] | None = None
        self._monitor_lock = asyncio.Lock()
        self._exported: ExportedPoint | None = None
        self._memory_bytes = memory_bytes
        self._snapshots: list[SlotSnapshot | IncrementalSnapshot] = []
        self._decode_gap = decode_gap or SlotDecodeGap()
        self._tables = SourceTables(settings, evidence, decode_gap=self._decode_gap)
        self._relations = Relations(
            self._describe,
            settings.streams,
            self._tables.take_partition,
            self._tables.take_ddl,
        )
        self._stream = ChangeStream(
            source,
            settings,
            self._relations,
            slot_position=self._slot_position,
            server_position=self._server_position,
            memory_bytes=memory_bytes,
            drain_policy=drain_policy,
            spool=spool or SpoolPolicy(settings.open_transaction_spool),
            decode_gap=self._decode_gap,
        )
        self._is_live = False
        # The slot only has to pass a row that it can't send.
        self._passes = False
        # Nothing was read from a slot above this: an earlier start may have created it.
        self._unread_above: Lsn | None = None
        # The highest valid position of the slot before the stream: above it, changes are missing.
        self._slot_limit: Lsn | None = None
        # Above the ids of all transactions that ran when `changes` began.
        self._live_since_xid = 0
        self._sent = SentTables(self._decode_gap.sent_completely)

    async def claim(self) -> None:
        """Take the claim on the slot's name."""
        await self._control.claim(
            self._slot,
            taken=f"another ingestd works on slot {self._slot!r}",
            remedy="stop the other one; this one takes over as soon as it has ended",
        )

    async def hold(self) -> None:
        """Wait until the claim is lost."""
        await self._control.hold()

    async def discover(self, known: Mapping[TableId, RegisteredTable]) -> Discovery:
        """Read the catalog; compare it with `tables` and with what the lake has."""
        control = await self._control.connection()
        with self._control.errors("discover"):
            server = await self._checked_server(control)
            found = await self._tables.discover(control, server, known)
            self._sent.interrupt(found.interrupted)
            notices = server_notices(server, self._dsn)
            return replace(found, notices=(*found.notices, *notices))

    def retry(self, tables: Collection[TableId]) -> Collection[TableId]:
        """Return nothing: no table is refused for some time."""
        del tables
        return ()

    async def tables_changed(self) -> None:
        """Return once the catalog differs from the last discovery: check regularly or on notice."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.discover_interval):
                    await self._relations.noticed.wait()
            was_noticed = self._relations.noticed.is_set()
            self._relations.noticed.clear()
            try:
                if await self._have_changed():
                    return
            except asyncio.CancelledError:
                if was_noticed:
                    self._relations.noticed.set()
                raise

    async def _have_changed(self) -> bool:
        with self._control.errors("catalog"), contextlib.suppress(psycopg.errors.LockNotAvailable):
            if self._settings.logs_ddl:
                control = await self._control.connection()
                if await self._tables.ddl_log_changed(control):
                    return True
            has_changed = await self._tables.have_changed()
            if self._tables.evidence.ddl.awaits:  # a commit is in the WAL before it is visible
                loop = asyncio.get_running_loop()
                loop.call_later(DDL_PATIENCE_S, self._relations.noticed.set)
            return has_changed
        return False  # a table that is locked for long is checked later

    async def server_end(self, committed: LakeState) -> ServerEnd:
        """Return the end of the server's WAL, or where its history left that of the lake."""
        control = await self._control.connection()
        with self._control.errors("server_end"):
            server = await self._checked_server(control)
            return await server_end(control, server, self._settings, committed)

    async def end_position(self) -> Lsn:
        """Return where the newest record of the server's WAL ends."""
        with self._control.errors("end_position"):
            return await insert_position(await self._monitoring())

    async def continuity(self, committed: LakeState) -> Continuity:
        """Compare slot and server with what the lake holds."""
        control = await self._control.connection()
        with self._control.errors("continuity"):
            server = await self._checked_server(control)
            found = await continuity_of(
                control,
                server,
                self._settings,
                committed,
                decode_gap=self._decode_gap,
                where=self._where,
            )
        undecodable = self._decode_gap.undecodable
        is_row = isinstance(found, Lost) and found.reason == undecodable
        self._passes = bool(undecodable) and (is_row or isinstance(found, Fresh))
        if is_row:
            self._sent.keep_live(committed)
        self._slot_limit = committed.position if isinstance(found, Resumed) else None
        reads_all = self._settings.snapshot == "initial"
        is_unread = isinstance(found, Fresh) and reads_all
        self._unread_above = (committed.position or ZERO) if is_unread else None
        return found

    async def prepare(
        self, tables: Sequence[Table], *, renew: bool = False, read_to: Lsn | None = None
    ) -> Prepared:
        """Create, alter or check publication and slot."""
        control = await self._control.connection()
        self._relations.use_tables(tables, self._tables.dropped)
        self._stream.resolve_again()
        with self._control.errors("prepare"):
            change = await prepare_publication(
                control,
                self._settings,
                tables,
                is_live=self._is_live,
                only_these=self._passes and not self._is_live,
                where=self._where,
            )
            busy = frozenset(change.refused)
            self._tables.refusals.suspect(
                t for t, error in change.refused.items() if not is_locked(error)
            )
            is_news, fingerprints = await self._tables.take_publication(
                is_replaced=change.is_replaced
            )
            if is_news:
                self._relations.noticed.set()
            is_moved, exported = False, None
            if not self._is_live:
                unread_above = self._unread_above
                if unread_above is not None and read_to is not None:
                    unread_above = max(unread_above, read_to)
                exported = await prepare_slot(
                    control,
                    self._settings,
                    # Also where no table needs continuity: the stream would never pass the row.
                    renew=renew or self._decode_gap.why(self._settings.publication) is not None,
                    passes=self._passes,
                    unread_above=unread_above,
                    where=self._where,
                )
                is_moved = self._passes and exported is None
                if exported is not None:
                    exported = await free_walsender(self._settings, exported)
                if is_moved or exported is not None:
                    self._decode_gap.renewed(is_moved=is_moved)
                    self._stream.confirmation.reset()
                self._slot_limit = exported.point if exported is not None else self._slot_limit
                if self._slot_limit is None:  # an unmanaged slot, valid at any position
                    self._slot_limit = await self._slot_position()
                self._exported = exported or self._exported
            published = [t for t in tables if t.id not in busy]
            self._sent.publish(published, is_new=exported is not None)
        begins = None if self._is_live else self._slot_limit
        return Prepared(busy, fingerprints, is_moved=is_moved, begins=begins)

    async def choose_incremental(
        self, tables: Sequence[Table], *, initial: bool
    ) -> frozenset[TableId]:
        """Return the tables to read incrementally: on the first load only the large ones."""
        least_bytes = self._settings.snapshot_chunked_above if initial else 0
        with self._control.errors("sizes"):
            return await choose_incremental(self._dsn, tables, least_bytes)

    async def snapshot(
        self,
        tables: Sequence[Table],
        *,
        incremental: bool = False,
        newly_published: bool = False,
        remainder: str = "",
        where: str | None = None,
    ) -> Snapshot:
        """Return an incremental snapshot, or one at the point of the new or of a temporary slot."""
        self._snapshots = [s for s in self._snapshots if not s.is_closed]
        snapshot: SlotSnapshot | IncrementalSnapshot
        if incremental:
            with self._control.errors("snapshot"):
                snapshot = await IncrementalSnapshot.start(
                    self._settings,
                    tables,
                    live_since_xid=self._live_since_xid,
                    newly_published=newly_published and not self._sent.has_all(tables),
                    remainder=remainder,
                    where=where,
                    memory_bytes=self._memory_bytes,
                )
        else:
            snapshot = await self._at_one_point(tables)
        self._snapshots.append(snapshot)
        return snapshot

    async def _at_one_point(self, tables: Sequence[Table]) -> SlotSnapshot:
        exported, self._exported = self._exported, None
        if exported is None:
            try:
                with self._control.errors("snapshot"):
                    exported = await temporary_point(self._settings, is_claimed=True)
                    exported = await free_walsender(self._settings, exported)
            except (OperatorError, TransientError) as error:
                is_slot = isinstance(error.__cause__, psycopg.errors.ConfigurationLimitExceeded)
                if not (is_slot or error.remedy == FREE_A_SENDER):
                    raise
                reason = "no_free_slot"
                raise TransientError(error.what, reason=reason, remedy=error.remedy) from error
        self._stream.confirmation.record_received(exported.point)
        limit_bytes = row_limit_bytes(self._memory_bytes)
        return SlotSnapshot(self._settings, exported, tables, row_limit_bytes=limit_bytes)

    async def changes(self, after: Lsn | None) -> AsyncGenerator[ChangeSet, None]:
        """Yield the changes from `after`, or from the slot's confirmed position if it is later."""
        self._is_live = True
        control = await self._control.connection()
        with self._control.errors("live"):
            await self._drop_export()
            self._live_since_xid = await next_xid(control)
            server = await inspect_server(control, self._dsn)
            slot = await find_slot(control, self._slot)
        if slot is None or slot.confirmed_lsn is None:
            raise self._without_slot()
        limit = max(self._slot_limit or slot.confirmed_lsn, self._stream.confirmation.confirmed)
        if slot.confirmed_lsn > limit:
            raise moved_slot(self._slot, skipped(slot.confirmed_lsn, limit))
        start = max(after or ZERO, slot.confirmed_lsn)
        self._stream.server_is_at(Lsn.parse(slot.flushed), slot.reread_bytes)
        changes = self._stream.changes(start, server)
        async with contextlib.aclosing(changes):
            async for change_set in changes:
                self._sent.interrupt(change_set.interrupted)
                judged, is_news = self._tables.note_delivered(change_set)  # enum labels, doubts
                if self._tables.texts.record_changes(change_set.batches) or is_news:
                    self._relations.noticed.set()
                yield judged

    async def current_pg_snapshot(self) -> PgSnapshot:
        """Query on the connection that holds the claim."""
        control = await self._control.connection()
        with self._control.errors("snapshot"):
            return await current_pg_snapshot(control)

    def commit_requested(self) -> bool:
        """Return whether the server asked for a reply with everything sent, or a backlog was."""
        return self._stream.confirmation.commit_requested

    async def confirm(self, position: Lsn) -> None:
        """See `SlotConfirmation.confirm`."""
        await self._stream.confirmation.confirm(position)

    async def lag(self) -> CaptureLag:
        """Query pg_replication_slots."""
        with self._control.errors("lag"):
            slot = await find_slot(await self._monitoring(), self._slot)
        if slot is None:
            raise self._without_slot()
        self._stream.server_is_at(Lsn.parse(slot.flushed), slot.reread_bytes)
        return slot_lag(slot)

    async def health(self) -> None:
        """Query on the connection that holds the claim."""
        await self._control.health()

    async def close(self) -> None:
        """Close all connections; that releases the claim and drops a temporary slot."""
        async with contextlib.AsyncExitStack() as last_first:  # all, whatever any of them raises
            last_first.push_async_callback(self._control.close)
            monitor, self._monitor = self._monitor, None
            if monitor is not None:
                last_first.push_async_callback(monitor.close)
            last_first.push_async_callback(self._drop_export)
            last_first.push_async_callback(self._relations.close)
            for snapshot in reversed(self._snapshots):
                last_first.push_async_callback(snapshot.close)
            last_first.push_async_callback(self._stream.close)

    # --- inside ------------------------------------------------------------------------------

    async def _checked_server(self, control: AsyncConnection[Any]) -> WalServer:
        server = await inspect_server(control, self._dsn)
        for fault in server.faults():
            raise OperatorError(f"{self._where}: {fault.what}", remedy=fault.remedy)
        return server

    async def _slot_position(self) -> Lsn:
        control = await self._control.connection()
        with self._control.errors("slot"):
            slot = await find_slot(control, self._slot)
        if slot is None or slot.confirmed_lsn is None:
            raise self._without_slot()
        return slot.confirmed_lsn

    async def _server_position(self, queried_id: str) -> Lsn:
        """Query on the connection that is never busy for long."""
        with self._control.errors("position"):
            return await position_of(await self._monitoring(), queried_id)

    async def _monitoring(self) -> AsyncConnection[Any]:
        async with self._monitor_lock:  # queries for a position and for lag
            if self._monitor is None or self._monitor.closed:
                self._monitor = await connect(self._dsn, reads_names=True)
            return self._monitor

    def _without_slot(self) -> OperatorError | TransientError:
        make = vanished_slot if self._settings.manage else missing_slot
        return make(self._slot)

    async def _drop_export(self) -> None:
        exported, self._exported = self._exported, None
        if exported is not None:
            await exported.close()

    async def _describe(self, relation: Relation, name: TableId) -> Table:
        control = await self._control.connection()
        with self._control.errors("describe"):
            return await self._tables.of_relation(control, relation, name)
