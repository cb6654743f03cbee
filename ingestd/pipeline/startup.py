"""The start of a source: from its claim to a lake and a server that are ready for the stream.

`Startup.run` is the order; `ingestd.ports` has it as contract. What refuses a start is decided
before anything is changed, by the functions at the end, which `check` calls too.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace

from ingestd.model.errors import OperatorError
from ingestd.model.lake_state import RAW_TABLE_MISSING, LakeState, TableState
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.schema import TableId
from ingestd.pipeline.appender import EpochAppender
from ingestd.pipeline.known_lake import KnownLake, LakeRoot, lake_lost, read_lake
from ingestd.pipeline.policy import PipelinePolicy
from ingestd.pipeline.table_set import TableSet
from ingestd.pipeline.telemetry.slow_waits import warn_if_slow
from ingestd.pipeline.telemetry.source import SourceTelemetry
from ingestd.ports import (
    ChangeCapture,
    Continuity,
    Discovery,
    Fresh,
    LakeLost,
    Lost,
    Prepared,
    Resumed,
    Sink,
)
from ingestd.process.clock import utc_now


@dataclass(frozen=True, slots=True)
class Judgement:
    """What lake and source were found to be, and what that means.

    `committed`: what the lake holds; without a position, and with all tables to be read, where the
    `continuity` is Lost. `end`: the position that the lake has whatever `continuity` is.
    """

    committed: LakeState
    discovery: Discovery
    continuity: Continuity
    end: Lsn

    @property
    def position(self) -> Lsn:
        """Where the stream continues; zero for a first start, and where changes were lost."""
        return self.committed.position or ZERO


@dataclass(frozen=True, slots=True)
class Started:
    """A source that is ready: its tables are prepared, nothing has been read or streamed.

    `durable`: the lake's position. `may_begin_at_point`: tables are read before the stream begins,
    where it begins.
    """

    judgement: Judgement
    table_set: TableSet
    appender: EpochAppender
    durable: Lsn = ZERO
    may_begin_at_point: bool = True


class Startup:
    """Starts one attempt of a source, whose claim is held. Used once."""

    def __init__(
        self,
        capture: ChangeCapture,
        sink: Sink,
        policy: PipelinePolicy,
        telemetry: SourceTelemetry,
        *,
        known: KnownLake,
        root: LakeRoot,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capture = capture
        self._sink = sink
        self._policy = policy
        self._telemetry = telemetry
        self._known = known
        self._root = root
        self._monotonic = monotonic
        self._source = telemetry.source
        self._lost_lake: LakeLost | None = None

    async def run(self) -> Started:
        """Return the source, ready. Raises what refuses the start; nothing is half done then.

        1. Open the lake, refuse tables that the server has not reached, write the lake's id, and
           fence earlier writers (I5).
        2. Refuse raw tables that are missing and may not be re-read.
        3. Discover the tables, and judge whether the source still has all changes (I13).
        4. Record all tables whose changes were lost, also those that are not captured any more,
           before the server is adopted and the slot is re-created or moved: a later start finds
           neither fault.
        5. Adopt the server.
        6. Record missing, damaged, refused and dropped tables, before anything is written of them:
           a later start finds the raw tables again.
        7. Prepare the source: publication, replica identities, slot.
        8. Record the position of a slot that was created or moved, before any table is recorded
           that needs all changes from there on: a later start finds the slot where the lake ends.
        """
        committed = await self._open_lake()
        refuse_missing(self._source, committed, may_read=self._policy.may_read)
        judgement = await self._judge(committed)
        table_set = TableSet(judgement.committed, self._policy.resnapshot_rewritten)
        table_set.update(judgement.discovery)
        appender = EpochAppender(self._sink, table_set, self._telemetry, self._monotonic)
        started = Started(judgement, table_set, appender)
        self._telemetry.discovered(judgement.committed, judgement.discovery)
        await self._record_lost(started)
        await self._sink.adopt(judgement.discovery.server_id)
        await self._record_found(started)
        prepared = await self._prepare(judgement)
        table_set.apply_prepared(prepared)
        durable = await self._reach(prepared, judgement)
        is_resumed = isinstance(judgement.continuity, Resumed)
        may_begin_at_point = not (is_resumed or prepared.is_moved)
        return replace(started, durable=durable, may_begin_at_point=may_begin_at_point)

    # --- 1: the lake -------------------------------------------------------------------------

    async def _open_lake(self) -> LakeState:
        """Read the lake, and fence earlier writers.

        Nothing is written if it is not the source's: see `ingestd.pipeline.known_lake`.
        """
        patience_s = self._policy.standby_patience_s
        committed, continuity = await read_lake(self._sink, self._capture, patience_s)
        self._telemetry.noticed(committed.notices)  # the fence drops them
        why = continuity.reason if isinstance(continuity, LakeLost) else None
        lost = self._known.difference(committed) or why
        if lost is not None:
            self._accept_lost_lake(lost)
        elif committed.lake_id is None and committed.has_nothing:
            await self._root.ensure_not_lost(self._source)
        is_new = committed.has_nothing and committed.lake_id is None
        lake_id = await self._sink.write_lake_id(None if is_new else self._known.lake_id)
        self._known.mark_found(lake_id)
        if committed.has_nothing and self._known.lake_id is not None:
            self._telemetry.begins(self._known.lake_id)
        self._root.report(self._source, None)
        self._telemetry.lake_found()
        not_fenced = await self._sink.fence()
        return replace(committed, damaged={**committed.damaged, **not_fenced})

    def _accept_lost_lake(self, why: str) -> None:
        """Record that the lake is lost, where the operator accepted that. Raises LakeLostError."""
        if not (self._policy.resnapshot_when_lake_lost or self._known.is_accepted):
            self._known.mark_lost()
            self._root.report(self._source, why)
            raise lake_lost(self._source, why)
        self._lost_lake = LakeLost(why)

    # --- 3: what the source still has --------------------------------------------------------

    async def _judge(self, committed: LakeState) -> Judgement:
        """Return what is found. Raises LakeLostError, and OperatorError where it must not start."""
        discovery = await self._capture.discover(committed.tables)
        continuity = await self._capture.continuity(committed)
        if self._lost_lake is None and isinstance(continuity, LakeLost):
            self._accept_lost_lake(continuity.reason)  # moved, or committed to, since it was opened
        if self._lost_lake is not None:
            self._telemetry.lake_given_up(self._lost_lake.reason)
            continuity = Fresh() if committed.has_nothing else Lost(self._lost_lake.reason)
        end = committed.position or ZERO
        if isinstance(continuity, Lost):
            self._accept_loss(continuity)
            committed = without_position(committed, continuity.reason)
        return Judgement(committed, discovery, continuity, end)

    def _accept_loss(self, lost: Lost) -> None:
        """Report that changes were lost. Raises OperatorError where tables may not be re-read."""
        is_agreed = self._policy.resnapshot_when_lost or self._lost_lake is not None
        refuse_lost(self._source, lost, may_read=is_agreed and self._policy.reads_existing_rows)
        if self._lost_lake is None:
            self._telemetry.lost(lost.reason)

    # --- 4 to 8: records, and the server -----------------------------------------------------

    async def _record_lost(self, started: Started) -> None:
        """Record the tables whose changes were lost. Raises OperatorError for a server behind."""
        judgement = started.judgement
        continuity, tables = judgement.continuity, judgement.committed.tables
        if not isinstance(continuity, Lost):
            return
        lost = [name for name, known in tables.items() if known.reason == continuity.reason]
        await self._enter_snapshotting(started, lost, continuity.reason, judgement.end)
        refuse_behind(self._source, continuity)

    async def _record_found(self, started: Started) -> None:
        """Record missing, damaged, refused and dropped tables."""
        judgement, table_set = started.judgement, started.table_set
        committed, position = judgement.committed, judgement.position
        missing = [name for name in committed.missing if table_set.is_present(name)]
        await self._enter_snapshotting(started, missing, RAW_TABLE_MISSING, position)
        damaged = [e for e in committed.damaged.values() if table_set.is_present(e.table)]
        await started.appender.stop_damaged(damaged, position)
        await started.appender.record(table_set.removal_events(utc_now(), position))

    @staticmethod
    async def _enter_snapshotting(
        started: Started, names: Collection[TableId], cause: str, at_lsn: Lsn
    ) -> None:
        now = utc_now()
        await started.appender.record(started.table_set.loss_events(names, cause, now, at_lsn))

    def _prepare(self, judgement: Judgement) -> Awaitable[Prepared]:
        """Prepare the source; a new slot begins when all transactions that write now have ended."""
        tables = judgement.discovery.tables
        renew = isinstance(judgement.continuity, Lost)
        names = [table.id for table in tables]
        preparing = self._capture.prepare(tables, renew=renew)
        return warn_if_slow(preparing, lambda: self._telemetry.reading_waits(names))

    async def _reach(self, prepared: Prepared, judgement: Judgement) -> Lsn:
        """Record, durably, where the stream begins; return the lake's position."""
        begins = prepared.begins
        if begins is None or begins <= judgement.position:
            return judgement.position
        await self._sink.advance(begins)
        self._known.note_position(begins)
        return begins


def without_position(committed: LakeState, reason: str) -> LakeState:
    """Return the state with each table to be re-read for this reason; old rows serve until then."""
    tables = {
        name: replace(known, state=TableState.STOPPED, reason=reason, progress="")
        if known.state is TableState.LIVE or known.progress
        else known
        for name, known in committed.tables.items()
    }
    return replace(committed, position=None, tables=tables)


# --- what refuses a start ----------------------------------------------------------------------


def refuse_missing(source: str, committed: LakeState, *, may_read: bool) -> None:
    """Raise OperatorError where raw tables are missing and may not be re-read.

    `may_read`: lost changes may be replaced by re-reading all tables (`slot_lost`, `snapshot`).
    """
    if committed.missing and not may_read:
        names = ", ".join(sorted(map(str, committed.missing)))
        raise OperatorError(
            f"source {source}: raw tables are missing from the lake: {names}",
            remedy='restore them from a copy; or set slot_lost = "resnapshot" and snapshot ='
            ' "initial" to re-read them',
        )


def refuse_lost(source: str, lost: Lost, *, may_read: bool) -> None:
    """Raise OperatorError where changes may be lost and tables may not be re-read.

    Not for a source that is behind the lake: once it has passed the lake, nothing else shows the
    gap, so the loss has to be recorded first.
    """
    if not (may_read or lost.is_behind):
        raise OperatorError(
            f"source {source}: changes may be lost: {lost.reason}",
            remedy='set slot_lost = "resnapshot" and snapshot = "initial" to re-read all tables',
        )


def refuse_behind(source: str, lost: Lost) -> None:
    """Raise OperatorError where the server's position precedes that of the lake."""
    if lost.is_behind:
        raise OperatorError(f"source {source}: {lost.reason}", remedy=lost.remedy)
