"""Runs the polls of one source: decides when and for which tables, and yields their changes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import AsyncConnection

from ingestd.model.changes import ChangeSet, TableBatch, idle_change_set
from ingestd.model.errors import ProtocolError, TableChangedError, TableError, TransientError
from ingestd.model.lsn import ZERO
from ingestd.model.memory_shares import POLLED, POLLED_KEYS, bytes_of
from ingestd.model.row_checks import WITHOUT_ITS_VALUE, row_limit_bytes
from ingestd.model.schema import TableId
from ingestd.ports import ChangeLog
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.liveness import LivenessCheckedConnection
from ingestd.postgres.connection.session import connect
from ingestd.postgres.connection.wal_position import await_flushed
from ingestd.postgres.polling.faults import PollFaults
from ingestd.postgres.polling.intervals import PollSchedule
from ingestd.postgres.polling.keys.delete_sweep import SWEEPS, Sweep, SweepPolicy, absent
from ingestd.postgres.polling.keys.lake_keys import WHOLE
from ingestd.postgres.polling.known_keys import KnownKeys
from ingestd.postgres.polling.poll import (
    TablePoll,
    backend_of,
    begin_poll,
    first_progress,
    scan_table,
)
from ingestd.postgres.polling.poll_result import PollResult, TablePollResult
from ingestd.postgres.polling.polled_table import PolledTable
from ingestd.postgres.polling.position_clock import Positions
from ingestd.postgres.polling.progress import PollProgress
from ingestd.postgres.polling.rows import PollReadPoint, vanished_rows
from ingestd.postgres.polling.table_state import PolledState
from ingestd.postgres.settings import PollingSettings
from ingestd.postgres.snapshot.errors import read_error
from ingestd.process.tasks import cancel_all

FAILURES = 5
"""Consecutive polls that a lock or a statement timeout may fail before a table is stopped."""
_POLLED_S = 0.05
_WAITING = frozenset({"lock_timeout", "timeout", "deadlock", "out_of_memory"})


class PollScheduler:
    """Polls the tables passed to `keep`. Used on one event loop; always `close` it.

    `wake` ends a wait; `noticed` is set when the catalog must be checked. `key_bytes`: for the keys
    of all tables. Raises TransientError, OperatorError, ProtocolError.
    """

    def __init__(
        self,
        source: str,
        settings: PollingSettings,
        positions: Positions,
        log: ChangeLog | None,
        *,
        memory_bytes: int,
        sweeps: SweepPolicy = SWEEPS,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._where = f"source {source}, poll"
        self._settings = settings
        self._dsn = settings.dsn.get_secret_value()
        self._positions = positions
        self._log = log
        self._sweeps = sweeps
        self._hold_bytes = bytes_of(POLLED, memory_bytes)
        self._key_bytes = bytes_of(POLLED_KEYS, memory_bytes)
        self._row_limit_bytes = row_limit_bytes(memory_bytes)
        self._monotonic = monotonic
        self._wall = wall
        self._connection: LivenessCheckedConnection | None = None
        self._backend = 0
        self._sweep: asyncio.Task[None] | None = None
        self.faults = PollFaults(monotonic)
        self.states: dict[TableId, PolledState] = {}
        self._keys = KnownKeys(
            log,
            self.states,
            memory_bytes=self._key_bytes,
            least_bytes=sweeps.least_key_bytes,
        )
        self.confirmed = ZERO
        self.wake = asyncio.Event()
        self.noticed = asyncio.Event()

    def use_tables(
        self, tables: Sequence[PolledTable], progress: Mapping[TableId, PollProgress]
    ) -> None:
        """Poll these tables only, from now on; `progress`: of those that were polled before."""
        before = dict(self.states)
        self.states.clear()
        now = self._monotonic()
        for polled in tables:
            name = polled.table.id
            state = before.get(name)
            if state is None or state.polled.table.oid != polled.table.oid:
                self.faults.clear(name)
                state = PolledState(polled, PollSchedule(polled.interval_s, now))
                state.turn.swept_at = state.polled_at = now
                known = progress.get(name)
                if known is not None and known.deleted == polled.deleted:
                    state.progress, state.resumes_at = known.by(polled.by), ZERO
                    # By the wall clock: a daemon started daily must still sweep once a week.
                    state.turn.swept_at = now - max(0.0, self._wall() - known.swept_at)
                    state.key_partition = known.key_partition
            if state.polled.table != polled.table:
                state.forget_missing()
                state.key_partition = WHOLE
            state.polled, state.turn.interval_s = polled, polled.interval_s
            self.states[name] = state
        for state in before.values():
            if self.states.get(state.polled.table.id) is not state:
                state.forget_missing()
        self.wake.set()

    def poll_now(self) -> None:
        """Request a poll of all tables at once."""
        for state in self.states.values():
            state.turn.ask()
        self.wake.set()

    async def poll_completely(self) -> None:
        """Return once polls that began after the call have read all tables that can be polled.

        Sweeps that are running or due end first, and what they found is polled.
        """
        asked = self._monotonic()
        self.poll_now()
        while self._is_sweeping() or any(  # noqa: ASYNC110 - several places change it
            (state.polled_at < asked or state.missing) and self._can_be_polled(state)
            for state in self.states.values()
        ):
            await asyncio.sleep(_POLLED_S)

    def _is_sweeping(self) -> bool:
        """Return whether a sweep runs; have one begin that is due."""
        if self._log is None or self._sweep is not None:
            return self._log is not None
        now = self._monotonic()
        is_due = any(s.sweep_at <= now and self._may_sweep(s) for s in self.states.values())
        if is_due:
            self.wake.set()
        return is_due

    async def change_sets(self) -> AsyncGenerator[ChangeSet, None]:
        """Yield the results of polls, indefinitely; an empty change set when nothing is found."""
        given = self._positions.end
        yield idle_change_set(given)
        while True:
            due = await self._wait()
            if due:
                async with aclosing(self._poll(due)) as change_sets:
                    async for change_set in change_sets:
                        yield change_set
                        given = max(given, change_set.position)
            if self._positions.end > given:
                given = self._positions.end
                yield idle_change_set(given)
            self._start_sweep()

    async def close(self) -> None:
        """Release all resources. May be called at any time, and twice."""
        sweep, self._sweep = self._sweep, None
        if sweep is not None:
            await cancel_all(sweep)
        await self._disconnect()

    # --- waiting -----------------------------------------------------------------------------

    async def _wait(self) -> list[PolledState]:
        """Return the tables to poll now; none if the state must be checked again first."""
        self._raise_sweeps_fault()
        now = self._monotonic()
        active = [s for s in self.states.values() if self._is_active(s)]
        due = [s for s in active if s.turn.due_at <= now or (s.missing and not s.turn.failures)]
        if due:
            return due
        until = min((s.turn.due_at for s in active), default=None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if until is None else max(0.0, until - now)):
                await self.wake.wait()
        self.wake.clear()
        return []

    def _is_active(self, state: PolledState) -> bool:
        """Return whether it has been read; if tables are never read, it is polled immediately."""
        return self._can_be_polled(state) and self._keys.can_be_loaded(state, self.confirmed)

    def _can_be_polled(self, state: PolledState) -> bool:
        if state.polled.table.id in self.faults or state.readings:
            return False
        return state.progress is not None or self._settings.snapshot == "never"

    # --- one poll ----------------------------------------------------------------------------

    async def _poll(self, due: Sequence[PolledState]) -> AsyncGenerator[ChangeSet, None]:
        """Poll tables in one transaction: one change set for all, more if it would be too large."""
        try:
            connection = await self._connected()
            started = self._monotonic()
            for state in due:
                state.turn.record_start()
            poll = PollResult(
                connection, await begin_poll(connection, self._backend), self._positions
            )
            for state in due:
                async with aclosing(self._poll_table(poll, state)) as change_sets:
                    async for change_set in change_sets:
                        yield change_set
            if poll.has_found:
                await await_flushed(connection, poll.now.lsn)
            await connection.rollback()
            for outcome in poll.outcomes:
                await self._note(outcome, started)
            last = poll.last_change_set()
            if last is not None:
                yield last
        except psycopg.Error as error:
            await self._disconnect()
            raise classify(error, self._where, self._dsn) from error
        except BaseException:
            await self._disconnect()
            raise

    async def _poll_table(
        self, poll: PollResult, state: PolledState
    ) -> AsyncGenerator[ChangeSet, None]:
        """Poll one table. A fault of this table alone leaves the poll unchanged."""
        if not self._is_active(state):  # not any more: a snapshot has begun to read it
            return
        await poll.connection.execute("SAVEPOINT a_table")
        # The server would count the time for which the lake delays the rows: see `scan_table`.
        await poll.connection.execute("SET LOCAL statement_timeout = 0")
        outcome: TablePollResult | None = None
        is_given = False
        try:
            if state.progress is None:
                # Nothing was ever read: polling begins here.
                state.progress = await first_progress(poll.connection, state.polled, poll.now)
                return
            now = self._monotonic()
            is_whole = state.turn.is_whole_due(now)
            scan = TablePoll(
                state.polled,
                state.progress,
                is_whole,
                self._settings.page_rows,
                self._row_limit_bytes,
                self._settings.statement_timeout or None,
            )
            outcome = TablePollResult(
                state, scan, poll.next_read_point(), is_due=state.turn.due_at <= now
            )
            async with aclosing(self._changes(poll, outcome)) as found:
                async for batch in found:
                    if self._is_full((*poll.waiting, *outcome.batches)):
                        is_given = True
                        await self._keys.record_delivered(state, outcome.batches)
                        yield poll.open_change_set(outcome)
                        outcome.batches = []
                    outcome.batches.append(batch)
        except ProtocolError as error:
            raise error.within(f"{self._where}, table {state.polled.table.id}") from error
        except (psycopg.Error, TableError) as error:
            if not await self._passes(poll.connection, state, error):
                raise
            if outcome is not None:
                # What was yielded stays, without the progress: it is delivered once more.
                poll.abandon_table(outcome, is_given=is_given)
        else:
            poll.complete_table(
                outcome, swept_at=self._wall() - self._monotonic() + state.turn.swept_at
            )
            # So DDL on the table need not wait for the other tables, or for the lake.
            await poll.connection.execute("ROLLBACK TO SAVEPOINT a_table")

    def _is_full(self, batches: Sequence[TableBatch]) -> bool:
        return sum(b.nbytes for b in batches) > self._hold_bytes

    async def _changes(
        self, poll: PollResult, outcome: TablePollResult
    ) -> AsyncGenerator[TableBatch, None]:
        """Yield a table's changes: rows that were written, then those that were deleted."""
        state, read_point = outcome.state, outcome.read_point
        table = state.polled.table
        if outcome.is_due:
            async with aclosing(self._written(poll, outcome)) as written:
                async for batch in written:
                    yield batch
        while state.missing and state.polled.table == table:
            candidates = state.missing[0]
            gone = await absent(poll.connection, table, candidates, self._row_limit_bytes)
            keys = await self._keys.load_keys(state)
            if keys is not None and gone.num_rows:
                probe = vanished_rows(
                    table, gone, PollReadPoint(read_point.position, read_point.at)
                )
                gone = gone.filter(pa.array(keys.contains(probe)))
            if gone.num_rows:
                outcome.deleted = True
                yield vanished_rows(table, gone, read_point)
            if state.missing and state.missing[0] is candidates:  # else they were dropped
                del state.missing[0]
        if not state.missing:
            state.swept.set()

    async def _written(
        self, poll: PollResult, outcome: TablePollResult
    ) -> AsyncGenerator[TableBatch, None]:
        """Yield the rows that a scan finds."""
        state, scan = outcome.state, outcome.scan
        # Only the time of the source: not of the lake, nor of the consumer.
        scanned_s, started = 0.0, self._monotonic()
        async with aclosing(scan_table(poll.connection, scan, poll.now)) as pages:
            async for rows in pages:
                scanned_s += self._monotonic() - started
                keys = await self._keys.load_keys(state)
                for batch in await asyncio.to_thread(rows.changes, outcome.read_point, keys):
                    yield batch
                started = self._monotonic()
        if scan.is_whole:
            outcome.whole_s = scanned_s + self._monotonic() - started

    async def _passes(
        self, connection: AsyncConnection[Any], state: PolledState, error: Exception
    ) -> bool:
        """Record a fault if it is of one table only, and return whether the poll continues."""
        table = state.polled.table.id
        fault: Exception = error
        if isinstance(error, psycopg.Error):
            fault = read_error(error, table, self._dsn)
        if connection.broken or connection.closed:
            return False
        if isinstance(fault, TransientError):
            if fault.reason not in _WAITING:
                return False
            if state.turn.failed(self._monotonic()) >= FAILURES:
                what = f"could not be polled {FAILURES} times in a row: {fault.what}"
                remedy = "raise `statement_timeout` or `lock_timeout`, or find out what locks it"
                if fault.reason == "out_of_memory":
                    remedy = WITHOUT_ITS_VALUE
                fault = TableError(table, what, remedy=remedy)
                self._stop(fault)
        elif isinstance(fault, TableChangedError):
            state.turn.failed(self._monotonic())
            self.noticed.set()
        elif isinstance(fault, TableError):
            self._stop(fault)
        else:
            return False
        state.forget_missing()
        await connection.execute("ROLLBACK TO SAVEPOINT a_table")
        return True

    def _stop(self, fault: TableError) -> None:
        """Stop polling a table until it is re-read."""
        self.faults.pause(fault)
        state = self.states.get(fault.table)
        if state is not None:
            state.forget_missing()
        self.noticed.set()

    async def _note(self, outcome: TablePollResult, started: float) -> None:
        """Record that the result of a scan has been yielded."""
        state = outcome.state
        found = bool(outcome.batches)
        if outcome.is_due:
            state.progress, state.peak = outcome.scan.progress, outcome.scan.peak
            state.polled_at = started
            state.turn.record_poll(self._monotonic(), found_rows=found, whole_s=outcome.whole_s)
            self.faults.succeeded(state.polled.table.id)
        if found:
            state.resumes_at = min(state.resumes_at, outcome.read_point.position)
        if outcome.deleted:
            state.deleted_at = outcome.read_point.position
        await self._keys.record_delivered(state, outcome.batches)

    # --- sweeps ------------------------------------------------------------------------------

    def _start_sweep(self) -> None:
        if self._sweep is not None or self._log is None:
            return
        now = self._monotonic()
        due = [(s.sweep_at, s) for s in self.states.values() if self._may_sweep(s)]
        at, state = min(due, key=lambda one: one[0], default=(now + 1, None))
        if state is not None and at <= now:
            self._sweep = asyncio.create_task(self._run_sweep(state, self._log))
            self._sweep.add_done_callback(lambda sweep: self._swept_now(state, sweep))

    def _may_sweep(self, state: PolledState) -> bool:
        """Return whether it is swept at all, and the lake has the result of the last sweep.

        Otherwise another sweep would find the same keys again.
        """
        if state.polled.sweep_s is None or state.progress is None or not self._is_active(state):
            return False
        return state.deleted_at == ZERO or state.deleted_at < self.confirmed

    def _swept_now(self, state: PolledState, sweep: asyncio.Task[None]) -> None:
        is_cut = sweep.cancelled() or sweep.exception() is not None
        early_s = max(0.0, state.sweep_s - self._sweeps.restart_s) if is_cut else 0.0
        state.turn.swept_at = self._monotonic() - early_s
        self.wake.set()

    async def _run_sweep(self, state: PolledState, log: ChangeLog) -> None:
        table = state.polled.table
        keys = await self._keys.load_keys(state)
        sweep = Sweep(
            self._settings,
            table,
            keys,
            log,
            key_bytes=self._key_bytes,
            row_limit_bytes=self._row_limit_bytes,
            policy=self._sweeps,
            first=state.key_partition,
            began=state.begin_partition,
        )
        state.unlooked = False
        async with aclosing(sweep.missing()) as found:
            async for candidates in found:
                is_same = self.states.get(table.id) is state and state.polled.table == table
                if not (is_same and self._is_active(state)):
                    return
                state.swept.clear()
                state.missing.append(candidates)
                self.wake.set()
                await state.swept.wait()
                if state.unlooked:
                    what = f"{self._where}: {table.id} could not be polled for a sweep"
                    raise TransientError(what, reason="sweep_cut_off")
        state.key_partition = WHOLE

    def _raise_sweeps_fault(self) -> None:
        """Drop a sweep that has ended. Raises its error, unless that is transient."""
        sweep = self._sweep
        if sweep is None or not sweep.done():
            return
        self._sweep = None
        error = None if sweep.cancelled() else sweep.exception()
        if error is None or isinstance(error, TransientError | TableChangedError):
            return
        if not isinstance(error, TableError):
            raise error
        if error.table in self.states:
            self._stop(error)

    # --- connection --------------------------------------------------------------------------

    async def _connected(self) -> LivenessCheckedConnection:
        if self._connection is None or self._connection.closed:
            self._connection = await connect(
                self._dsn,
                autocommit=False,
                statement_timeout_s=self._settings.statement_timeout,
                lock_timeout_s=self._settings.lock_timeout,
            )
            self._backend = await backend_of(self._connection)
        return self._connection

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
