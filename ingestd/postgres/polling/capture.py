"""The ChangeCapture of kind `polling`.

Connections: one for control, which holds the claim and reads the catalog; one for lag; one for
polls; those of a snapshot, or of a sweep, while it is read; and one that listens, if configured.

Positions: `Positions` issues a separate place to each poll with rows, and to each snapshot, above
all earlier ones. `changes` delivers up to its end. `confirm` only records what the pipeline has
made durable, because the source retains nothing for ingestd. A table's progress (`PollProgress`)
goes into the lake with its rows (`TableBatch.resume`), in one commit. So after a kill between two
tables' commits each table resumes where its own rows end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql

from ingestd.model.changes import ChangeSet
from ingestd.model.errors import OperatorError, TransientError
from ingestd.model.lake_state import LakeState, RegisteredTable
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.row_checks import row_limit_bytes
from ingestd.model.schema import Table, TableId
from ingestd.ports import (
    CaptureLag,
    ChangeLog,
    Continuity,
    Discovery,
    Fresh,
    LakeLost,
    Lost,
    Prepared,
    Refused,
    Resumed,
    ServerEnd,
    Snapshot,
)
from ingestd.postgres.connection.control_connection import ControlConnection
from ingestd.postgres.connection.session import connect
from ingestd.postgres.connection.wal_position import (
    await_flushed,
    current_position,
)
from ingestd.postgres.polling.discovery import PolledTables
from ingestd.postgres.polling.keys.delete_sweep import SWEEPS, SweepPolicy
from ingestd.postgres.polling.lag import seconds_behind
from ingestd.postgres.polling.poll import backend_of, begin_poll
from ingestd.postgres.polling.position_clock import Positions
from ingestd.postgres.polling.progress import PollProgress
from ingestd.postgres.polling.scheduler import PollScheduler
from ingestd.postgres.polling.server import (
    POLLING,
    PolledServer,
    claim_of_polling,
    detect_transaction_pooler,
    inspect_polled_server,
)
from ingestd.postgres.polling.snapshot import PollingSnapshot
from ingestd.postgres.polling.table_state import PolledState
from ingestd.postgres.settings import PollingSettings
from ingestd.postgres.snapshot.read_view import current_pg_snapshot
from ingestd.process.tasks import cancel_all

SLACK_BYTES = 1 << 16
"""How far positions may be ahead of an idle server's WAL: by one for each poll with rows."""


LAG_PATIENCE_S = 1.0
"""How long the query for a table's newest cursor may wait for a lock on the table."""


class PollingCapture:
    """Changes found by queries; see `ingestd.ports.ChangeCapture` for the contract.

    `polls`: runs the polls.
    """

    supports_replay = False

    def __init__(
        self,
        source: str,
        settings: PollingSettings,
        *,
        memory_bytes: int,
        log: ChangeLog | None = None,
        sweeps: SweepPolicy = SWEEPS,
    ) -> None:
        self._source = source
        self._where = f"source {source}"
        self._settings = settings
        self._dsn = settings.dsn.get_secret_value()
        self._control = ControlConnection(self._where, self._dsn)
        self._monitor: AsyncConnection[Any] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._snapshots: list[PollingSnapshot] = []
        self._tables = PolledTables(settings)
        self._positions = Positions()
        self._row_limit_bytes = row_limit_bytes(memory_bytes)
        self.polls = PollScheduler(
            source, settings, self._positions, log, memory_bytes=memory_bytes, sweeps=sweeps
        )
        self._progress: dict[TableId, PollProgress] = {}
        self._delivered = ZERO

    async def claim(self) -> None:
        """Take the claim on the source's name."""
        with self._control.errors("claim"):
            await detect_transaction_pooler(self._dsn)
        await self._control.claim(
            claim_of_polling(self._source),
            taken="another ingestd polls this database under the same name",
            remedy="stop the other one; this one takes over as soon as it has ended. Or give the "
            "source another name",
        )

    async def hold(self) -> None:
        """Wait until the claim is lost."""
        await self._control.hold()

    async def discover(self, known: Mapping[TableId, RegisteredTable]) -> Discovery:
        """Read the catalog; compare it with `tables` and with what the lake has."""
        control = await self._control.connection()
        with self._control.errors("discover"):
            server = await self._checked_server(control)
            found = await self._tables.discover(control, known)
        self.polls.noticed.clear()
        self.polls.faults.try_again()
        # The pipeline waits for the position of the discovery: it must not wait for the next poll.
        self._positions.pass_by(found.lsn)
        self.polls.wake.set()
        return self._without_faulty(replace(found, server_id=server.server_id))

    def _without_faulty(self, discovery: Discovery) -> Discovery:
        """Refuse, for a time, the tables that can't be polled."""
        faults = self.polls.faults.lasting()
        refused = [Refused(t, faults[t.id]) for t in discovery.tables if t.id in faults]
        tables = tuple(t for t in discovery.tables if t.id not in faults)
        return replace(discovery, tables=tables, refused=(*discovery.refused, *refused))

    def retry(self, tables: Collection[TableId]) -> Collection[TableId]:
        """Retry at the next discovery those tables that are refused for some time after a fault."""
        return self.polls.faults.retry(tables)

    async def tables_changed(self) -> None:
        """Return once the catalog differs from the last discovery: check regularly or on notice."""
        while True:
            noticed = self.polls.noticed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.discover_interval):
                    await noticed.wait()
            if noticed.is_set() or self.polls.faults.has_waited:
                return
            with (
                self._control.errors("catalog"),
                contextlib.suppress(psycopg.errors.LockNotAvailable),
            ):
                if await self._tables.have_changed():
                    return

    async def server_end(self, committed: LakeState) -> ServerEnd:
        """Return the end of the server's WAL, and how far positions may run ahead of it."""
        del committed
        control = await self._control.connection()
        with self._control.errors("server_end"):
            server = await self._checked_server(control)
            current = await current_position(control)
        return ServerEnd(Lsn(current + SLACK_BYTES), server.in_recovery)

    async def end_position(self) -> Lsn:
        """Return the end of polls that began after the call, of all tables that can be polled."""
        await self.polls.poll_completely()
        return self._positions.end

    async def continuity(self, committed: LakeState) -> Continuity:
        """Compare the server with the one that the lake's rows came from."""
        control = await self._control.connection()
        with self._control.errors("continuity"):
            server = await self._checked_server(control)
            current = await current_position(control)
        reached = max(committed.position or ZERO, committed.floor or ZERO)
        self._positions.begin_at(reached)
        self._progress = _progress_of(committed)
        if committed.has_nothing and committed.removed is not None:
            return LakeLost(f"{committed.removed}. The source has no record of it")
        verdict = self._judge(committed, server, current)
        if not isinstance(verdict, Resumed):
            self._progress = {}
        return verdict

    def _judge(self, committed: LakeState, server: PolledServer, current: Lsn) -> Continuity:
        """Return the result.

        What the lake records of one table alone does not count: see `PolledTables.discover`.
        """
        reached = max(committed.position or ZERO, committed.floor or ZERO)
        is_behind = current + SLACK_BYTES < reached
        if is_behind and server.in_recovery:
            raise TransientError(
                f"{self._where}: the standby has not replayed all that the lake has ({reached})",
                reason="standby_behind",
                remedy="wait, or find out what delays its replay",
            )
        if committed.position is None or not committed.needs_continuity:
            if is_behind:
                raise self._behind(reached, current)
            return Fresh()
        if is_behind:
            error = self._behind(reached, current)
            return Lost(error.what, remedy=error.remedy, is_behind=current < reached)
        system, timeline, *kind = (committed.server_id or server.server_id).split("/")
        if system != server.system_identifier:
            return Lost(
                f"this server (system identifier {server.system_identifier}) is not the one that "
                f"the lake's rows came from ({system})"
            )
        if kind != [POLLING]:
            return Lost("the lake's rows came by another kind of capture")
        if timeline != str(server.timeline):
            return Lost(
                f"the server was promoted or restored (timeline {timeline}, now "
                f"{server.timeline}): it may lack transactions that the lake has"
            )
        return Resumed()

    def _behind(self, reached: Lsn, current: Lsn) -> OperatorError:
        return OperatorError(
            f"{self._where}: the lake ends at {reached}, the server is at {current}: it was "
            "restored from an older backup, or it is another server",
            remedy="give this server its own lake.uri or source name",
        )

    async def prepare(
        self, tables: Sequence[Table], *, renew: bool = False, read_to: Lsn | None = None
    ) -> Prepared:
        """Poll these tables from now on; create nothing in the source."""
        del read_to
        if renew:
            self._progress = {}
            self.polls.use_tables([], {})
        polled = [replace(self._tables.polled(t.id), table=t) for t in tables]
        # The lake's progress at the start does not apply to a table that comes back later.
        ahead = self._tables.ahead
        progress = {name: p for name, p in self._progress.items() if name not in ahead}
        self._progress = {}
        self.polls.use_tables(polled, progress)
        return Prepared()

    async def choose_incremental(
        self, tables: Sequence[Table], *, initial: bool
    ) -> frozenset[TableId]:
        """Return no tables: all are read at one point."""
        del tables, initial
        return frozenset()

    async def snapshot(
        self,
        tables: Sequence[Table],
        *,
        incremental: bool = False,
        newly_published: bool = False,
        remainder: str = "",
        where: str | None = None,
    ) -> Snapshot:
        """Export a snapshot of the present."""
        del newly_published
        if incremental or remainder or where is not None:
            msg = "polled tables are read at one point only"
            raise RuntimeError(msg)
        self._snapshots = [s for s in self._snapshots if not s.is_closed]
        states = {t.id: s for t in tables if (s := self.polls.states.get(t.id)) is not None}
        if len(states) < len(tables):
            raise TransientError(f"{self._where}: a table was dropped", reason="table_gone")
        # From here on they are not polled: a poll that saw more must not get a lower position.
        reads = _Reads(self.polls, self._positions, states)
        try:
            made = await self._begin_snapshot(tables, reads)
        except BaseException:
            reads.close()
            raise
        self._snapshots.append(made)
        self.polls.wake.set()
        return made

    async def _begin_snapshot(self, tables: Sequence[Table], reads: _Reads) -> PollingSnapshot:
        with self._control.errors("snapshot"):
            connection = await connect(self._dsn, autocommit=False)
            try:
                now = await begin_poll(connection, await backend_of(connection))
                row = await (
                    await connection.execute("SELECT pg_catalog.pg_export_snapshot()")
                ).fetchone()
                assert row is not None
                await await_flushed(connection, now.lsn)
            except BaseException:
                await connection.close()
                raise
        reads.point = self._positions.next_position(now.lsn)
        self._delivered = max(self._delivered, reads.point)
        polled = [replace(reads.states[t.id].polled, table=t) for t in tables]
        return PollingSnapshot(
            self._settings,
            connection,
            row[0],
            now,
            reads.point,
            polled,
            reads,
            self._move_on,
            row_limit_bytes=self._row_limit_bytes,
        )

    async def changes(self, after: Lsn | None) -> AsyncGenerator[ChangeSet, None]:
        """Poll indefinitely. `after` is where the positions continue."""
        if after is not None:
            self._positions.begin_at(after)
        if self._settings.listen is not None and self._listener is None:
            self._listener = asyncio.create_task(self._listen(self._settings.listen))
        async with contextlib.aclosing(self.polls.change_sets()) as change_sets:
            async for change_set in change_sets:
                self._control.ensure_claimed()
                if self._tables.texts.record_changes(change_set.batches):
                    self.polls.noticed.set()
                self._delivered = max(self._delivered, change_set.position)
                yield change_set

    async def current_pg_snapshot(self) -> PgSnapshot:
        """Query on the connection that holds the claim."""
        control = await self._control.connection()
        with self._control.errors("snapshot"):
            return await current_pg_snapshot(control)

    def commit_requested(self) -> bool:
        """Return False: the source never waits for a confirmation."""
        return False

    async def confirm(self, position: Lsn) -> None:
        """Record what is durable; the source retains nothing for ingestd."""
        if position > self._delivered:
            msg = f"confirm {position} is beyond what was delivered, {self._delivered}"
            raise ValueError(msg)
        self.polls.confirmed = max(self.polls.confirmed, position)
        self.polls.wake.set()

    async def lag(self) -> CaptureLag:
        """Query the server's position and the newest cursors of the tables."""
        with self._control.errors("lag"):
            if self._monitor is None or self._monitor.closed:
                timeout_s = self._settings.statement_timeout
                self._monitor = await connect(
                    self._dsn, statement_timeout_s=timeout_s, lock_timeout_s=LAG_PATIENCE_S
                )
            current = await current_position(self._monitor)
            states = list(self.polls.states.values())
            seconds = await seconds_behind(self._monitor, states, current)
        confirmed = self.polls.confirmed or None
        behind = None if confirmed is None else max(0, current - confirmed)
        return CaptureLag(current, confirmed, behind, None, None, seconds)

    async def health(self) -> None:
        """Query on the connection that holds the claim."""
        await self._control.health()
        if self._listener is not None and self._listener.done():
            listener, self._listener = self._listener, None
            listener.result()

    async def close(self) -> None:
        """Close all connections; that releases the claim."""
        listener, self._listener = self._listener, None
        if listener is not None:
            await cancel_all(listener)
        await self.polls.close()
        for snapshot in self._snapshots:
            await snapshot.close()
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            await monitor.close()
        await self._control.close()

    # --- inside ------------------------------------------------------------------------------

    def _move_on(self) -> None:
        self._positions.advance()
        self.polls.wake.set()

    async def _listen(self, channel: str) -> None:
        """Poll at each notification of the source. Raises IngestdError."""
        with self._control.errors("listen"):
            async with await connect(self._dsn) as connection:
                await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
                async for _ in connection.notifies():
                    self.polls.poll_now()
        raise TransientError(f"{self._where}: LISTEN ended", reason="connection_lost")

    async def _checked_server(self, control: AsyncConnection[Any]) -> PolledServer:
        server = await inspect_polled_server(control)
        for fault in server.faults():
            raise OperatorError(f"{self._where}: {fault.what}", remedy=fault.remedy)
        return server


class _Reads:
    """The tables of a snapshot, which are not polled while it reads them.

    `states`: from before the snapshot. `point`: the position of the snapshot, once taken.
    """

    def __init__(
        self, polls: PollScheduler, positions: Positions, states: Mapping[TableId, PolledState]
    ) -> None:
        self.states = states
        self.point = ZERO
        self.polls = polls
        self._positions = positions
        self._before = {name: state.progress for name, state in states.items()}
        self._reading = set(states)
        for state in states.values():
            state.readings += 1

    def resume_of(self, table: TableId, first: PollProgress) -> str | None:
        """Return a table's progress, unless the lake has later progress.

        A table that was polled before resumes where it was: rows changed since are delivered twice.
        """
        if self.states[table].resumes_at < self.polls.confirmed:
            return None
        return (self._before[table] or first).to_text()

    def has_read(self, table: TableId, first: PollProgress) -> None:
        """Start or resume polling: the entire table, including its `t`, has been yielded."""
        state = self.states[table]
        state.resumes_at = min(state.resumes_at, self.point)
        if self._before[table] is None:
            state.progress, state.peak = first, first.ahead
            state.polled_at = time.monotonic()
            state.turn.due_at = time.monotonic() + state.turn.interval_s
        self._end(table)

    def close(self) -> None:
        """Record that no more is read. May be called twice."""
        for table in list(self._reading):
            self._end(table)

    def _end(self, table: TableId) -> None:
        """Poll it once all its rows are durable: only then can its keys be loaded.

        Any position confirmed above the current end comes after them.
        """
        if table not in self._reading:
            return
        self._reading.discard(table)
        state = self.states[table]
        state.readings -= 1
        state.forget_keys(self._positions.end)
        self._positions.advance()
        self.polls.wake.set()


def _progress_of(committed: LakeState) -> dict[TableId, PollProgress]:
    """Return the progress of the tables that are live."""
    read = {
        name: PollProgress.parse(known.resume)
        for name, known in committed.tables.items()
        if committed.is_live(name) and known.resume
    }
    return {name: progress for name, progress in read.items() if progress is not None}
