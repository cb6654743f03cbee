"""The changes of a slot: a backlog drained by SQL functions, then the stream.

::

         far behind        drained, or refused
    start ---------> drains -----------------> streams
      |                 ^   stays far behind    |   ^
      |                 +-----------------------+   |
      +---------------------------------------------+

Each hand-over is at the end of a transaction, where the next decoder begins.

Who moves a position: `changes` delivers; `confirmation` reports what the pipeline made durable;
`ingestd.postgres.wal.drain.decision` says when to drain.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn

import psycopg
import structlog

from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.decode.pgoutput.relation import ResolveRelation
from ingestd.decode.pgoutput.streamed_transactions import StreamedTransactions
from ingestd.decode.values.encodings import Encoding, encoding_of
from ingestd.failpoints import reach_async
from ingestd.model.changes import ChangeSet, idle_change_set
from ingestd.model.errors import IngestdError, OperatorError, ProtocolError, TransientError
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.memory_shares import HELD_MESSAGES, OPEN_TRANSACTIONS, RECEIVED, bytes_of
from ingestd.model.row_checks import row_limit_bytes
from ingestd.postgres.connection.errors import (
    FULL,
    classify,
    is_of_a_row,
)
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.block_decoder import BlockDecoder
from ingestd.postgres.wal.drain.decision import DrainDecision
from ingestd.postgres.wal.drain.drain import (
    Drain,
    DrainPolicy,
    PartFailedError,
)
from ingestd.postgres.wal.relation_cache import Relations
from ingestd.postgres.wal.replication_stream import (
    STATUS_INTERVAL_S,
    ReplicationStream,
    StreamLimits,
    open_stream,
)
from ingestd.postgres.wal.server import AskPosition, ServerPosition, WalServer
from ingestd.postgres.wal.slot_confirmation import SlotConfirmation
from ingestd.postgres.wal.slots.advance import ADVANCE_BYTES, SlotAdvance
from ingestd.postgres.wal.slots.decode_gap import SlotDecodeGap
from ingestd.postgres.wal.slots.slot import moved_slot, skipped
from ingestd.postgres.wal.spool import FileSpool, SpoolPolicy
from ingestd.postgres.wal.stream_faults import StreamFaults


class ChangeStream:
    """The changes of one slot, yielded once. `close` it always.

    `slot_position`: asks where the slot is. `server_position`: asks how far the server's WAL goes;
    changes that claim to follow it are refused. `memory_bytes`: for what is received and not
    decoded yet.
    """

    def __init__(
        self,
        source: str,
        settings: WalSettings,
        relations: Relations,
        *,
        slot_position: Callable[[], Awaitable[Lsn]],
        server_position: AskPosition,
        memory_bytes: int,
        drain_policy: DrainPolicy,
        spool: SpoolPolicy,
        decode_gap: SlotDecodeGap,
    ) -> None:
        self._source = source
        self._settings = settings
        self._dsn = settings.dsn.get_secret_value()
        self._slot_position = slot_position
        self._server_at = ServerPosition(server_position, f"source {source}, stream")
        self._relations = relations
        self._memory_bytes = memory_bytes
        self._row_limit_bytes = row_limit_bytes(memory_bytes)
        self._drain_policy = drain_policy
        self._spool_policy = spool
        self._decode_gap = decode_gap
        self._faults = StreamFaults(source, settings, decode_gap, spool)
        self._position = ZERO
        self._queried_id = ""
        self._encoding: Encoding | None = None
        self._drain: Drain | None = None
        self._decoder: PgoutputDecoder | None = None
        self._decision = DrainDecision(drain_policy)
        step_bytes = min(ADVANCE_BYTES, drain_policy.part_bytes)
        self.confirmation = SlotConfirmation(
            SlotAdvance(self._dsn, settings.slot, source, step_bytes=step_bytes)
        )

    async def changes(self, start: Lsn, server: WalServer) -> AsyncGenerator[ChangeSet, None]:
        """Yield the changes of transactions with commit_lsn >= `start`, the slot's or later.

        Call `server_is_at` first. Raises TransientError, OperatorError, ProtocolError.
        """
        self._position, self._queried_id = start, server.queried_id
        self._encoding = encoding_of(server.encoding)
        self._server_at.mark_uncertain()
        self.confirmation.begin(start, server.queried_id)
        await self._read_failed_transaction(start, server)
        while True:
            async with contextlib.aclosing(self._drain_backlogs()) as change_sets:
                async for change_set in change_sets:
                    await self._server_at.ensure_reached(change_set.position, self._queried_id)
                    yield self._deliver(change_set)
                    self._position = max(self._position, change_set.position)
            async with contextlib.aclosing(self._streamed(self._position, server)) as change_sets:
                async for change_set in change_sets:
                    yield change_set

    async def _drain_backlogs(self) -> AsyncGenerator[ChangeSet, None]:
        """Drain what is behind, and what was written meanwhile, until it does not pay."""
        decision = self._decision
        pays = decision.pays_at(self._position)
        if decision.rereads_too_much_at(self._position):
            self._report_rereading(decision.reread_bytes)
        while pays:
            begin, target = self._position, decision.flushed
            async with contextlib.aclosing(self._drain_backlog(begin, target)) as change_sets:
                async for change_set in change_sets:
                    yield change_set
            if self._position > begin:  # else the server refused
                self.confirmation.request(self._position)
            pays = self._position >= target and decision.is_late_at(self._position)

    async def _streamed(self, start: Lsn, server: WalServer) -> AsyncGenerator[ChangeSet, None]:
        """Yield the changes as they arrive, until a backlog must be drained.

        Does not end before the first change has arrived, or the server would decode a long
        transaction again.
        """
        self._decision.begin_stream(start)
        streams_in_progress = self._spool_policy.takes_open_transactions

        async def opened(slot_at: Lsn) -> ReplicationStream:
            return await self._open_stream(
                start, server, slot_at, streams_in_progress=streams_in_progress
            )

        async with self.confirmation.streaming(opened) as stream:
            self._spool_policy.connected()
            self._encoding = stream.encoding
            decoder, spool = self._new_decoder(), self._new_spool()
            # without open transactions it passes messages on as they are
            reordering = StreamedTransactions(spool)
            try:
                yield self._deliver(decoder.idle(start) or idle_change_set(start))
                async with contextlib.aclosing(
                    self._decoded(stream, decoder, reordering, start)
                ) as change_sets:
                    async for change_set in change_sets:
                        yield change_set
            except (OperatorError, ProtocolError, TransientError) as raised:
                self._raise_end(raised, streams_in_progress=streams_in_progress)
            finally:
                spool.close()

    async def _read_failed_transaction(self, start: Lsn, server: WalServer) -> None:
        """Read the transaction of a row that could not be sent, alone. Raises as `changes`.

        On a new connection the server sends each relation again, before its first row. So those
        that arrive are of this transaction, and the row is of one of them. Nothing is delivered,
        nor read after that transaction.
        """
        after = self._decode_gap.failed_after
        if after is None or after < start:
            return
        end = await self._server_at.query_end(self._queried_id)
        stream = await self._open_stream(after, server, start, streams_in_progress=False)
        self._encoding = stream.encoding
        decoder, spool = self._new_decoder(lambda _: None), self._new_spool()
        passing = StreamedTransactions(spool)
        try:
            decoder.idle(after)
            stream.begin_reporting()
            while decoder.position < end and not decoder.has_ended_transaction:
                decoding = BlockDecoder(decoder, passing, await stream.receive())
                while not decoding.is_done:
                    await asyncio.to_thread(decoding.decode_some)
                stream.set_received(decoder.position)
                if decoding.ended is not None:
                    raise stream.fault(decoding.ended) from decoding.ended
        except (OperatorError, ProtocolError, TransientError) as raised:
            self._raise_end(raised, streams_in_progress=False, is_alone=True)
        finally:
            spool.close()
            await stream.close()
        self._decode_gap.failed_after = None  # the server can send it now

    async def _decoded(
        self,
        stream: ReplicationStream,
        decoder: PgoutputDecoder,
        reordering: StreamedTransactions,
        start: Lsn,
    ) -> AsyncGenerator[ChangeSet, None]:
        while True:
            await reach_async("capture.receive.before")
            collected = await stream.receive()
            await reach_async("capture.receive.after")
            decoding = BlockDecoder(decoder, reordering, collected)
            while not decoding.is_done:
                found = await asyncio.to_thread(decoding.decode_some)
                if decoding.reply_requested:  # the reply may wait until an epoch is durable
                    self.confirmation.request_reply(decoder.position)
                await self._server_at.ensure_reached(decoder.position, self._queried_id)
                stream.set_received(decoder.position)
                for change_set in found:
                    yield self._deliver(change_set)
            if self._decision.has_passed_backlog(decoder.position):
                self.confirmation.request(decoder.position)
            if decoding.ended is not None:
                raise stream.fault(decoding.ended) from decoding.ended
            # The server would send what is kept of open transactions once more.
            is_between = decoder.position > start and not (
                decoder.is_in_transaction or reordering.has_open
            )
            if is_between and self._decision.ends_stream_at(decoder.position):
                self._position = decoder.position
                return

    def _with_location(self, error: ProtocolError, what: str, position: Lsn) -> ProtocolError:
        """Return the error with the place where it occurred."""
        return error.within(f"source {self._source}, {what}, after {position}")

    def _raise_end(
        self, raised: IngestdError, *, streams_in_progress: bool, is_alone: bool = False
    ) -> NoReturn:
        """Raise what this end of the stream means for the next start (`StreamFaults`)."""
        decoder, fault = self._decoder, raised
        if isinstance(raised, ProtocolError) and decoder is not None:
            fault = self._with_location(raised, "stream", decoder.position)
        after = self._position if decoder is None else decoder.position
        find = None if decoder is None else partial(self._relations.suspects, decoder)
        fault = self._faults.meaning_of(
            fault,
            after,
            streams_in_progress=streams_in_progress,
            find_suspects=find if is_alone else None,
        )
        if fault is raised:
            raise raised
        raise fault from raised.__cause__ or raised

    async def _open_stream(
        self, start: Lsn, server: WalServer, slot_at: Lsn, *, streams_in_progress: bool
    ) -> ReplicationStream:
        try:
            stream = await open_stream(
                self._dsn,
                self._settings.slot,
                self._settings.publication,
                start,
                slot_at,
                streams_in_progress=streams_in_progress,
                messages=self._settings.logs_ddl,
                where=f"source {self._source}, stream",
                limits=self._limits(server),
                queried_id=self._queried_id,
            )
            try:
                await self._ensure_not_moved(self._position)
            except BaseException:
                await stream.close()
                raise
        except ProtocolError as error:
            raise self._with_location(error, "stream", start) from error
        return stream

    async def _ensure_not_moved(self, start: Lsn) -> None:
        """Raise TransientError if the slot was moved beyond `start` before the stream took it.

        Until then any client could move it. The stream has not reported anything yet.
        """
        if (confirmed := await self._slot_position()) > start:
            raise moved_slot(self._settings.slot, skipped(confirmed, start))

    def server_is_at(self, flushed: Lsn, reread_bytes: int) -> None:
        """Record how far the server is, now and then: a stream may stay far behind.

        `reread_bytes`: see `Slot.reread_bytes`.
        """
        decoder = None if self.confirmation.stream is None else self._decoder
        streamed = None if decoder is None else decoder.position
        self._decision.server_is_at(flushed, reread_bytes, streamed)

    def resolve_again(self) -> None:
        """Record that other tables are captured from now on."""
        if self._decoder is not None:
            self._decoder.resolve_again()

    async def close(self) -> None:
        """Close its connections. May be called at any time, and twice."""
        if self._drain is not None:
            await self._drain.close()
        await self.confirmation.close()

    async def _drain_backlog(self, start: Lsn, target: Lsn) -> AsyncGenerator[ChangeSet, None]:
        """Yield the transactions from `start` to about `target`, drained by SQL functions.

        If the server refuses, yield nothing: the backlog is streamed. If it fails later, the source
        restarts, and then drains in another way or streams.
        """
        decoder = self._new_decoder()
        decoder.idle(start)
        has_yielded = False
        try:
            async with contextlib.aclosing(self._run_drain(start, target, decoder)) as change_sets:
                async for change_set in change_sets:
                    has_yielded = True
                    yield change_set
        except PartFailedError as error:
            what = f"source {self._source}, catch-up: {error}"
            remedy = error.remedy
            raise TransientError(what, reason="catch_up_refused", remedy=remedy) from error
        except ProtocolError as error:
            raise self._with_location(error, "catch-up", decoder.position) from error
        except psycopg.Error as error:
            self._refuse_to_drain(error, has_yielded=has_yielded)

    async def _run_drain(
        self, start: Lsn, target: Lsn, decoder: PgoutputDecoder
    ) -> AsyncGenerator[ChangeSet, None]:
        backlog = self._drain = await Drain.start(
            self._dsn,
            self._settings.slot,
            self._settings.publication,
            self._drain_policy,
            target - start,
            queried_id=self._queried_id,
            row_limit_bytes=self._row_limit_bytes,
        )
        try:
            async with contextlib.aclosing(
                backlog.change_sets(start, target, decoder)
            ) as change_sets:
                async for change_set in change_sets:
                    yield change_set
        finally:
            self._drain = None
            await backlog.close()
        if backlog.reread_bytes:
            self._drain_policy.pause(self._drain_policy.pause_s)
            self._report_rereading(backlog.reread_bytes)
        else:
            self._drain_policy.finished()

    def _refuse_to_drain(self, error: psycopg.Error, *, has_yielded: bool) -> None:
        """Stream for a time. Raises TransientError if that can't continue from here."""
        pause_s = self._drain_policy.refused_pause_s
        fault = classify(error, f"source {self._source}, catch-up", self._dsn)
        if isinstance(fault, TransientError) and not is_of_a_row(error):
            if has_yielded or fault.reason != FULL:
                raise fault from error
            pause_s = self._drain_policy.pause_s  # streaming takes fewer connections
        what, remedy = fault.what, fault.remedy
        self._drain_policy.pause(pause_s)
        self._report_streaming(what, remedy)
        if has_yielded:
            raise TransientError(what, reason="catch_up_refused", remedy=remedy) from error

    def _report_rereading(self, reread_bytes: int) -> None:
        reason = f"the server would read {reread_bytes / 1e9:.1f} GB of WAL again for each part"
        remedy = (
            "end long-running transactions: "
            "SELECT pid, xact_start, query FROM pg_catalog.pg_stat_activity ORDER BY xact_start;"
        )
        self._report_streaming(f"{reason}, from the slot's restart_lsn on", remedy)

    def _report_streaming(self, reason: str, remedy: str | None) -> None:
        """Log why a backlog is streamed."""
        log = structlog.get_logger("ingestd")
        log.warning("catch_up.refused", source=self._source, reason=reason, remedy=remedy)

    def _new_decoder(self, resolve: ResolveRelation | None = None) -> PgoutputDecoder:
        hold_bytes = min(8 << 20, bytes_of(HELD_MESSAGES, self._memory_bytes))
        self._decoder = PgoutputDecoder(
            resolve or self._relations.resolve,
            report_partition=self._relations.report_partition,
            report_message=self._relations.report_ddl,
            hold_bytes=hold_bytes,
            row_limit_bytes=self._row_limit_bytes,
            encoding=self._encoding,
        )
        return self._decoder

    def _new_spool(self) -> FileSpool:
        return FileSpool(
            self._spool_policy,
            memory_bytes=bytes_of(OPEN_TRANSACTIONS, self._memory_bytes),
            where=f"source {self._source}",
        )

    def _deliver(self, change_set: ChangeSet) -> ChangeSet:
        self.confirmation.record_received(change_set.position)
        interrupted = self._relations.take_interrupted()
        return replace(change_set, interrupted=interrupted) if interrupted else change_set

    def _limits(self, server: WalServer) -> StreamLimits:
        interval = STATUS_INTERVAL_S
        if server.sender_timeout_s > 0:
            interval = min(interval, server.sender_timeout_s / 4)
        return StreamLimits(
            limit_bytes=max(1 << 20, bytes_of(RECEIVED, self._memory_bytes)),
            status_interval_s=interval,
            row_limit_bytes=self._row_limit_bytes,
        )
