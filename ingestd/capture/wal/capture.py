"""The ChangeCapture of kind `wal`.

Connections: one for control, which holds the claim and runs catalog queries and DDL; one for lag;
the replication connection of the stream; and those of a snapshot while it is read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.capture.session import classify, connect
from ingestd.capture.settings import WalSettings
from ingestd.capture.wal.catch_up import CatchUpPolicy
from ingestd.capture.wal.delivery import Delivery
from ingestd.capture.wal.discovery import SourceTables
from ingestd.capture.wal.publication import (
    ColumnLists,
    check_publication,
    column_lists,
    keep_publication,
    keep_what_is_free,
    owners_statement,
)
from ingestd.capture.wal.published import find_publication
from ingestd.capture.wal.relations import Relations
from ingestd.capture.wal.server import Server, inspect_server
from ingestd.capture.wal.slot import (
    ExportedPoint,
    busy_slot,
    claim_key,
    drop_slot,
    export_point,
    find_slot,
    gap_before,
    missing_slot,
    temporary_name,
    unusable_slot,
    vanished_slot,
)
from ingestd.capture.wal.snapshot import TableSnapshot
from ingestd.changes import Chunk
from ingestd.decode.relation import Relation
from ingestd.errors import OperatorError, TransientError
from ingestd.ports import Continuity, Discovery, Fresh, Lag, Lost, Resumed, Snapshot
from ingestd.positions import ZERO, Lsn
from ingestd.recorded import Committed, RegisteredTable
from ingestd.schema import Table, TableId

LOCK_TIMEOUT_S = 10.0
"""How long a change of the publication waits for a table's lock before it is tried again later."""


class WalCapture:
    """Logical replication of one database; see `ingestd.ports.ChangeCapture` for the contract."""

    supports_replay = True

    def __init__(
        self,
        source: str,
        settings: WalSettings,
        *,
        memory_bytes: int,
        catch_up: CatchUpPolicy,
    ) -> None:
        self._source = source
        self._settings = settings
        self._dsn = settings.dsn.get_secret_value()
        self._slot = settings.slot
        self._publication = settings.publication
        self._control: AsyncConnection[Any] | None = None
        self._monitor: AsyncConnection[Any] | None = None
        self._exported: ExportedPoint | None = None
        self._snapshots: list[TableSnapshot] = []
        self._tables = SourceTables(settings)
        self._relations = Relations(self._describe, lambda t: settings.includes(t.schema, t.name))
        self._delivery = Delivery(
            source,
            settings,
            self._relations,
            memory_bytes=memory_bytes,
            catch_up=catch_up,
        )
        self._is_live = False
        self._claimed = False

    async def claim(self) -> None:
        """Take the session-level advisory lock that goes with the slot's name."""
        control = await self._connected()
        if self._claimed:
            return
        with self._errors("claim"):
            cursor = await control.execute(
                "SELECT pg_try_advisory_lock(%s)", (claim_key(self._slot),)
            )
            row = await cursor.fetchone()
        if not (row and row[0]):
            raise TransientError(
                f"source {self._source}: another ingestd works on slot {self._slot!r}",
                reason="claimed",
                remedy="stop the other one; this one takes over as soon as it is gone",
            )
        self._claimed = True

    async def discover(self, known: Mapping[TableId, RegisteredTable]) -> Discovery:
        """Read the catalog, hold it against `tables` and against what the lake has."""
        control = await self._connected()
        with self._errors("discover"):
            server = await self._checked_server(control)
            return await self._tables.discover(control, server, known)

    async def tables_changed(self) -> None:
        """Compare the catalog with that of the last discovery: now and then, or when told to."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.discover_interval):
                    await self._relations.noticed.wait()
            self._relations.noticed.clear()
            with self._errors("catalog"), contextlib.suppress(psycopg.errors.LockNotAvailable):
                # A table that is locked for long is looked at later.
                if await self._tables.have_changed():
                    return

    async def continuity(self, committed: Committed) -> Continuity:
        """Compare slot and server with what the lake holds."""
        control = await self._connected()
        with self._errors("continuity"):
            server = await self._checked_server(control)
            slot = await find_slot(control, self._slot)
            publication = await find_publication(control, self._publication)
            cursor = await control.execute("SELECT pg_current_wal_lsn()::text")
            row = await cursor.fetchone()
        assert row is not None
        current = Lsn.parse(row[0])
        system, _, timeline = (committed.origin or server.origin).partition("/")
        if system != server.system_identifier:
            raise self._foreign_lake(f"came from server {system}, this is another")
        reached = max(committed.position or ZERO, committed.floor or ZERO)
        if current < reached:
            raise self._foreign_lake(f"ends at {reached}, the server is at {current}")
        if not any(committed.is_live(t) for t in committed.tables) or committed.position is None:
            return Fresh()
        if timeline != str(server.timeline):
            return Lost(f"the server was promoted: timeline {timeline}, now {server.timeline}")
        if publication is None:
            # Made anew it is unknown to the WAL that the slot still has to decode.
            return Lost(f"publication {self._publication!r} does not exist any more")
        gap = gap_before(slot, self._slot, committed.position)
        return Resumed() if gap is None else Lost(gap)

    async def prepare(self, tables: Sequence[Table], *, renew: bool = False) -> frozenset[TableId]:
        """Make or check publication and slot."""
        control = await self._connected()
        self._relations.keep(tables)
        self._delivery.resolve_again()
        with self._errors("prepare"):
            busy = await self._prepare_publication(control, tables)
            if await self._tables.take_publication():
                self._relations.noticed.set()
            if not self._is_live:
                await self._prepare_slot(control, renew=renew)
        return busy

    async def snapshot(self, tables: Sequence[Table]) -> Snapshot:
        """Read at the new slot's point, or at that of a temporary one."""
        exported, self._exported = self._exported, None
        if exported is None:
            name = temporary_name(self._slot, "snapshot")
            try:
                with self._errors("snapshot"):
                    exported = await self._export(name, temporary=True)
            except OperatorError as error:
                if not isinstance(error.__cause__, psycopg.errors.ConfigurationLimitExceeded):
                    raise
                reason = "no_free_slot"
                raise TransientError(error.what, reason=reason, remedy=error.remedy) from error
        self._delivery.delivered(exported.point)
        workers = self._settings.snapshot_workers
        snapshot = TableSnapshot(self._dsn, exported, tables, workers=workers)
        self._snapshots = [s for s in self._snapshots if not s.is_closed]
        self._snapshots.append(snapshot)
        return snapshot

    async def live(self, after: Lsn | None) -> AsyncGenerator[Chunk, None]:
        """Give the changes from `after`, or from the slot's confirmed position if that is later."""
        self._is_live = True
        control = await self._connected()
        with self._errors("live"):
            await self._drop_export()
            server = await inspect_server(control)
            slot = await find_slot(control, self._slot)
        if slot is None or slot.confirmed_lsn is None:
            raise self._without_slot()
        start = max(after or ZERO, slot.confirmed_lsn)
        changes = self._delivery.changes(start, Lsn.parse(slot.flushed), server)
        async with contextlib.aclosing(changes):
            async for chunk in changes:
                yield chunk

    def checkpoint_requested(self) -> bool:
        """Whether the server asked for a reply with everything sent."""
        return self._delivery.checkpoint_requested

    async def confirm(self, position: Lsn) -> None:
        """See `Delivery.confirm`."""
        await self._delivery.confirm(position)

    async def lag(self) -> Lag:
        """Ask pg_replication_slots."""
        with self._errors("lag"):
            if self._monitor is None or self._monitor.closed:
                self._monitor = await connect(self._dsn)
            slot = await find_slot(self._monitor, self._slot)
        if slot is None:
            raise self._without_slot()
        current, confirmed = Lsn.parse(slot.current), slot.confirmed_lsn
        return Lag(
            current_lsn=current,
            confirmed_lsn=confirmed,
            lag_bytes=None if confirmed is None else max(0, current - confirmed),
            retained_bytes=slot.retained_bytes,
            safe_bytes=slot.safe_bytes,
        )

    async def health(self) -> None:
        """Ask the connection that holds the claim."""
        if self._control is None or self._control.closed:
            raise self._claim_lost()
        with self._errors("health"):
            await self._control.execute("SELECT")

    async def close(self) -> None:
        """Close all connections; the lock and a temporary slot go with them."""
        self._claimed = False
        await self._delivery.close()
        for snapshot in self._snapshots:
            await snapshot.close()
        await self._relations.close()
        await self._drop_export()
        for connection in (self._monitor, self._control):
            if connection is not None:
                await connection.close()
        self._monitor = self._control = None

    # --- inside ------------------------------------------------------------------------------

    async def _connected(self) -> AsyncConnection[Any]:
        if self._control is not None and self._control.closed and self._claimed:
            raise self._claim_lost()
        if self._control is None or self._control.closed:
            with self._errors("connect"):
                self._control = await connect(self._dsn)
        return self._control

    def _claim_lost(self) -> TransientError:
        return TransientError(
            f"source {self._source}: the connection that holds the claim is gone",
            reason="connection_lost",
        )

    async def _checked_server(self, control: AsyncConnection[Any]) -> Server:
        server = await inspect_server(control)
        for fault in server.faults():
            raise OperatorError(f"source {self._source}: {fault.what}", remedy=fault.remedy)
        return server

    def _without_slot(self) -> OperatorError | TransientError:
        make = vanished_slot if self._settings.manage else missing_slot
        return make(self._slot)

    def _foreign_lake(self, what: str) -> OperatorError:
        return OperatorError(
            f"source {self._source}: the lake {what} (restored, replaced or promoted server)",
            remedy="give this server a lake.uri or a source name of its own",
        )

    async def _prepare_publication(
        self, control: AsyncConnection[Any], tables: Sequence[Table]
    ) -> frozenset[TableId]:
        """Give the tables that are locked: they have to wait, the others need not."""
        names = [t.id for t in tables]
        lists = column_lists(tables, self._settings, control.info.server_version)
        found = await find_publication(control, self._publication)
        if found is None and self._is_live:
            # Made anew it would be unknown to the WAL that is still to be decoded: `continuity`
            # has to see that it is gone.
            raise TransientError(
                f"source {self._source}: publication {self._publication!r} was dropped",
                reason="publication_lost",
            )
        if not self._settings.manage or not (found is None or found.owned):
            fault = check_publication(self._publication, found, names, lists)
            if fault is not None:
                raise OperatorError(f"source {self._source}: {fault.what}", remedy=fault.remedy)
            return frozenset()
        try:
            # Not on the connection that answers the decoder: a lock may take its time.
            async with await connect(self._dsn, lock_timeout_s=LOCK_TIMEOUT_S) as connection:
                return await self._keep_publication(connection, names, lists)
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
            raise TransientError(
                f"source {self._source}: a table went while it was put into publication "
                f"{self._publication!r}: {error.diag.message_primary}",
                reason="table_gone",
            ) from error
        except psycopg.errors.InsufficientPrivilege as error:
            statement = await owners_statement(control, self._publication, names, lists)
            raise OperatorError(
                f"source {self._source}: no right to keep publication {self._publication!r}: "
                f"{error.diag.message_primary}",
                remedy=f"{statement}  -- as the tables' owner; then set manage = false",
            ) from error

    async def _keep_publication(
        self, connection: AsyncConnection[Any], names: Sequence[TableId], lists: ColumnLists
    ) -> frozenset[TableId]:
        try:
            await keep_publication(connection, self._publication, names, lists)
        except psycopg.errors.LockNotAvailable:
            return await keep_what_is_free(connection, self._publication, names, lists)
        return frozenset()

    async def _prepare_slot(self, control: AsyncConnection[Any], *, renew: bool) -> None:
        slot = await find_slot(control, self._slot)
        if slot is not None:
            fault = slot.fault(self._slot, control.info.dbname)
            if fault is not None:
                raise OperatorError(f"source {self._source}: {fault.what}", remedy=fault.remedy)
            if slot.active_pid is not None:
                # Before a snapshot is read for nothing. The last daemon's walsender may take its
                # time to notice that it is gone.
                raise busy_slot(self._slot, slot)
            # A slot that is not ours to make serves wherever it stands: all tables are read anew.
            if not (slot.is_lost or (renew and self._settings.manage)):
                return
        if not self._settings.manage:
            raise missing_slot(self._slot) if slot is None else unusable_slot(self._slot)
        await drop_slot(control, self._slot)
        self._exported = await self._export(self._slot, temporary=False)
        self._delivery.begin_anew()

    async def _export(self, slot: str, *, temporary: bool) -> ExportedPoint:
        connection = await connect(self._dsn, replication=True)
        try:
            return await export_point(connection, slot, temporary=temporary)
        except BaseException:
            await connection.close()
            raise

    async def _drop_export(self) -> None:
        exported, self._exported = self._exported, None
        if exported is not None:
            await exported.close()

    async def _describe(self, relation: Relation, name: TableId) -> Table:
        control = await self._connected()
        with self._errors("describe"):
            return await self._tables.of_relation(control, relation, name)

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise classify(error, f"source {self._source}, {doing}", self._dsn) from error
