"""Keeps a source's reference tables current, alongside its pipeline and never blocking it.

====================  ===========================================================================
`reference`           action
====================  ===========================================================================
`snapshot_only`       read all rows every `refresh`, and on request
`manual`              read all rows if the lake has none, and on request
`snapshot_plus_cdc`   apply the lake's own changes of the table after every epoch
====================  ===========================================================================

One table after the other, and only while the source's pipeline runs: only the holder of its claim
writes to the lake (I5). A fault of one table affects only that table (I8). A transient one is
retried after 0.5 s to 30 s, any other after 5 s to 60 s, and at once when the source's table has
been re-read. The existing version remains readable.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from ingestd.model.changes import RESERVED_PREFIX
from ingestd.model.errors import IngestdError, OperatorError, TransientError
from ingestd.model.schema import TableId, in_name_order
from ingestd.pipeline.retry import ONCE_ATTEMPTS, RETRY, RetryPolicy
from ingestd.pipeline.telemetry.reference import ReferenceTelemetry
from ingestd.ports import ReferenceSink, ReferenceState, ReferenceTableSource

SHARE_OF_TIME = 0.2
"""Merges take no more than this part of the time: larger tables are merged less often."""
PAUSE_LIMIT_S = 60.0
_DRAIN_POLL_S = 0.05

Monotonic = Callable[[], float]


class ReferenceJob(Protocol):
    """Keeps one table current."""

    is_requested: bool

    async def step(self) -> float | None:
        """Do what is due; return the seconds until something may be due again.

        0.0: at once. None: when it is woken. Raises IngestdError.
        """
        ...

    async def close(self) -> None:
        """Release everything; another `step` may follow."""
        ...


class FullRefresh:
    """Reads all rows: every `refresh_s`, or (None) once and on request."""

    def __init__(
        self,
        table: TableId,
        source: Callable[[], ReferenceTableSource],
        sink: ReferenceSink,
        telemetry: ReferenceTelemetry,
        refresh_s: float | None,
        *,
        monotonic: Monotonic = time.monotonic,
    ) -> None:
        self.is_requested = False
        self._table = table
        self._make_source = source
        self._sink = sink
        self._telemetry = telemetry
        self._refresh_s = refresh_s
        self._monotonic = monotonic
        self._is_open = False
        self._state: ReferenceState | None = None
        self._due_s: float | None = None

    async def step(self) -> float | None:
        """Read the table if that is due."""
        now = self._monotonic()
        if not self._is_open:
            self._state = await self._sink.open()
            self._telemetry.opened(self._table, self._state)
            self._is_open = True
            # A version may be old, or come from other settings: read it once.
            if self._state is None or self._refresh_s is not None:
                self._due_s = now
        if self.is_requested or (self._due_s is not None and now >= self._due_s):
            await self._read_table()
        self._telemetry.succeeded(self._table, self._state)
        return None if self._due_s is None else max(0.0, self._due_s - self._monotonic())

    async def _read_table(self) -> None:
        began, self.is_requested = self._monotonic(), False
        source = self._make_source()
        try:
            self._state = state = await self._sink.replace(self._batches(source))
        except IngestdError:
            self._due_s = began  # requested or not, it must be read
            raise
        finally:
            await source.close()
        self._due_s = None if self._refresh_s is None else began + self._refresh_s
        seconds = self._monotonic() - began
        self._telemetry.current(self._table, state, seconds, is_requested=self.is_requested)

    async def _batches(self, source: ReferenceTableSource) -> AsyncIterator[pa.RecordBatch]:
        nbytes = 0
        while (batch := await source.poll_snapshot()) is not None:
            ratio = getattr(source, "progress", 0.0)
            read = getattr(source, "nbytes", 0)
            self._telemetry.reading(
                self._table, ratio, read - nbytes, is_requested=self.is_requested
            )
            nbytes = read
            yield batch

    async def close(self) -> None:
        """Close the sink."""
        self._is_open = False
        await self._sink.close()


class IncrementalRefresh:
    """Applies the changes since the last step; replaces all rows if that is not possible.

    `source`: returns one that continues after a position; None for one that starts over.
    """

    is_requested = False

    def __init__(
        self,
        table: TableId,
        source: Callable[[int | None], ReferenceTableSource],
        sink: ReferenceSink,
        telemetry: ReferenceTelemetry,
        *,
        monotonic: Monotonic = time.monotonic,
    ) -> None:
        self._table = table
        self._make_source = source
        self._sink = sink
        self._telemetry = telemetry
        self._monotonic = monotonic
        self._source: ReferenceTableSource | None = None
        self._state: ReferenceState | None = None
        self._has_restarted = False

    async def step(self) -> float | None:
        """Catch up with the lake; the seconds are a pause, after which it waits to be woken."""
        began = self._monotonic()
        has_restarted, self._has_restarted = self._has_restarted, False
        if self._source is None:
            self._state = await self._sink.open()
            self._telemetry.opened(self._table, self._state)
            position = None if self._state is None else self._state.position
            self._source = self._make_source(position)
        try:
            await self._advance(self._source)
        except TransientError as error:
            if error.reason == "not_whole":
                return None  # woken when its own snapshot is complete
            if error.reason == "row_missing" and not has_restarted:
                await self._restart()
                self._has_restarted = True
                return 0.0
            raise
        self._telemetry.succeeded(self._table, self._state)
        took_s = self._monotonic() - began
        return min(PAUSE_LIMIT_S, took_s / SHARE_OF_TIME - took_s) or None

    async def _advance(self, source: ReferenceTableSource) -> None:
        began = self._monotonic()
        has_restarted = was_replaced = False
        while True:
            if not source.is_snapshot_complete():
                was_replaced = True
                self._state = await self._replace(source)
                self._telemetry.current(self._table, self._state, self._monotonic() - began)
            changes = await source.poll_changes()
            if changes is None:
                if was_replaced and not source.key:  # every change needs a full fold: pause first
                    return
                continue
            state = self._state
            if state is None or not _fits(changes, state):
                if has_restarted:  # not at once: other tables wait for their turn
                    what = f"reference table {self._table}: its columns have changed again"
                    raise TransientError(what, reason="columns_changed")
                has_restarted = True
                source = await self._restart()
                continue
            if changes.num_rows:
                began = self._monotonic()
                self._state = await self._sink.merge(changes, source.key, position=source.position)
                self._telemetry.current(self._table, self._state, self._monotonic() - began)
            return

    async def _replace(self, source: ReferenceTableSource) -> ReferenceState:
        first = await source.poll_snapshot()

        async def batches() -> AsyncIterator[pa.RecordBatch]:
            batch = first
            while batch is not None:
                yield batch
                batch = await source.poll_snapshot()

        return await self._sink.replace(batches(), position=source.position)

    async def _restart(self) -> ReferenceTableSource:
        await self.close()
        self._state = await self._sink.open()
        self._source = self._make_source(None)
        return self._source

    async def close(self) -> None:
        """Forget the position: the sink has it."""
        source, self._source = self._source, None
        if source is not None:
            await source.close()
        await self._sink.close()


def _fits(changes: pa.RecordBatch, state: ReferenceState) -> bool:
    """Return whether these are the table's columns, in any order.

    The lake's order is that of an earlier version, also within structs.
    """
    own = [f for f in changes.schema if not f.name.startswith(RESERVED_PREFIX)]
    return _types(own) == _types(state.schema)


def _types(fields: Iterable[pa.Field]) -> dict[str, str]:
    return {f.name: str(in_name_order(f.type)) for f in fields}


@dataclass(frozen=True, slots=True)
class _Outcome:
    """How a table's last step ended: when it began (monotonic), its fault, failures in a row."""

    began: float
    error: IngestdError | None
    attempt: int


class References:
    """A source's reference tables; `on_request`: those that are read on request."""

    def __init__(
        self,
        keepers: Mapping[TableId, ReferenceJob],
        telemetry: ReferenceTelemetry,
        on_request: frozenset[TableId],
        *,
        retry: RetryPolicy = RETRY,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._keepers = keepers
        self._telemetry = telemetry
        self.on_request = on_request
        self._retry = retry
        self._jitter = jitter
        self._woken = {table: asyncio.Event() for table in keepers}
        self._one = asyncio.Semaphore(1)
        self._outcomes: dict[TableId, _Outcome] = {}

    async def run(self) -> None:
        """Run until cancelled; nothing is written after that."""
        if not self._keepers:
            return
        self._telemetry.telemetry.listeners.append(self._wake)
        try:
            async with asyncio.TaskGroup() as group:
                for table, keeper in self._keepers.items():
                    group.create_task(self._keep(table, keeper), name=f"reference {table}")
        finally:
            self._telemetry.telemetry.listeners.remove(self._wake)

    async def drain(self) -> None:
        """Return once all tables have what the lake has now; those that are copied, once read.

        Raise the error of one that needs an operator, or fails again and again. Needs `run`.
        """
        asked = time.monotonic()
        self._wake()
        while not all(self._is_current(table, asked) for table in self._keepers):  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_POLL_S)

    def _is_current(self, table: TableId, asked: float) -> bool:
        found = self._outcomes.get(table)
        if found is None:
            return False
        is_transient = isinstance(found.error, TransientError) and found.attempt < ONCE_ATTEMPTS
        if found.error is not None and not is_transient:
            raise found.error
        since = asked if isinstance(self._keepers[table], IncrementalRefresh) else 0.0
        return found.error is None and found.began >= since

    def request(self, tables: Sequence[TableId]) -> None:
        """Read tables of `on_request` now. Raises TransientError while the source does not run."""
        fault = self._telemetry.telemetry.not_running()
        if fault is not None:
            raise fault
        for table in tables:
            self._keepers[table].is_requested = True
            self._woken[table].set()
        self._telemetry.requested(tables)

    def _wake(self) -> None:
        for event in self._woken.values():
            event.set()

    async def _keep(self, table: TableId, keeper: ReferenceJob) -> None:
        woken = self._woken[table]
        attempt = 0
        try:
            while True:
                woken.clear()
                if not self._telemetry.is_running:
                    await self._tried(keeper.close())
                    await woken.wait()
                    continue
                async with self._one:
                    began = time.monotonic()
                    delay_s, error = await self._tried(keeper.step())
                    took_s = time.monotonic() - began
                attempt = 0 if error is None else attempt + 1
                self._outcomes[table] = _Outcome(began, error, attempt)
                if error is not None:
                    await self._tried(keeper.close())
                    delay_s = self._retry.delay_s(error, attempt, self._jitter())
                    if not isinstance(error, TransientError):
                        least_s = self._retry.reference_delay_s
                        delay_s = min(delay_s, max(least_s, took_s / SHARE_OF_TIME))
                    self._telemetry.failed(table, error, delay_s)
                    await self._pause(table, woken, delay_s)
                elif delay_s == 0.0:
                    await asyncio.sleep(0)
                elif isinstance(keeper, IncrementalRefresh):
                    await asyncio.sleep(delay_s or 0.0)
                    await woken.wait()
                else:
                    await self._pause(table, woken, delay_s)
        finally:
            await self._tried(keeper.close())

    async def _tried(
        self, work: Awaitable[float | None]
    ) -> tuple[float | None, IngestdError | None]:
        """Return the work's result or fault: any fault stops only this table."""
        try:
            return await work, None
        except IngestdError as fault:
            return None, fault
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as fault:  # noqa: BLE001 - a Rust panic too
            return None, self._telemetry.unknown(fault)

    async def _pause(self, table: TableId, woken: asyncio.Event, delay_s: float | None) -> None:
        """Wait, at most until a request arrives or the state of the source's table changes."""
        keeper, state = self._keepers[table], self._telemetry.state_of(table)
        try:
            async with asyncio.timeout(delay_s):
                while (
                    not keeper.is_requested
                    and self._telemetry.is_running
                    and state == self._telemetry.state_of(table)
                ):
                    await woken.wait()
                    woken.clear()
        except TimeoutError:
            return


def refused(tables: Sequence[TableId]) -> OperatorError:
    """Return the error that reference tables are read completely or not at all."""
    names = ", ".join(map(str, tables))
    return OperatorError(
        f"{names}: only current rows are kept, so the table is always read completely",
        remedy="repeat the request without a condition; a running read ends automatically",
    )
