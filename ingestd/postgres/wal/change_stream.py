"""The slot's changes: a backlog drained by SQL functions, then the stream; and the confirmation.

States; each hand-over is at the end of a complete transaction, where the next decoder begins::

         far behind        drained, or refused
    start ---------> drains -----------------> streams
      |                 ^   stays far behind    |   ^
      |                 +-----------------------+   |
      +---------------------------------------------+

`changes` delivers up to a position; `confirm` receives the position that the pipeline has made
durable. The confirmation goes to the stream while there is one, to the slot itself while a backlog
is drained, and otherwise with the start of the next stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

import psycopg
import structlog

from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.decode.pgoutput.streamed_transactions import StreamedTransactions
from ingestd.decode.values.encodings import Encoding, encoding_of
from ingestd.failpoints import reach_async
from ingestd.model.changes import Chunk, idle_chunk
from ingestd.model.errors import IngestdError, OperatorError, ProtocolError, TransientError
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.row_limit import row_limit_bytes
from ingestd.postgres.connection.errors import FULL, classify, is_unsendable
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.block_decoder import BlockDecoder
from ingestd.postgres.wal.drain.drain import (
    PAUSE_S,
    REFUSED_PAUSE_S,
    CatchUpPolicy,
    Drain,
    PartFailedError,
)
from ingestd.postgres.wal.relation_cache import Relations
from ingestd.postgres.wal.replication_stream import (
    STATUS_INTERVAL_S,
    ReplicationStream,
    StreamLimits,
    open_stream,
)
from ingestd.postgres.wal.server import WalServer
from ingestd.postgres.wal.server_position import AskPosition, ServerPosition
from ingestd.postgres.wal.slots.advance import ADVANCE_BYTES, SlotAdvance
from ingestd.postgres.wal.slots.slot import UndecodablePast, moved_slot, older_slot, skipped
from ingestd.postgres.wal.spool import OpenTransactions, SpoolPolicy

_COLLECTED = 12
"""The memory divided by this may hold input that is collected while the decoder is busy. An open
transaction over many tables is decoded at once: with an eighth the peak is 40 MB higher.
"""
LATE_LOOKS = 2
"""After this many checks in a row that find a stream far behind, the backlog is drained instead."""


class ChangeStream:
    """One slot's changes, each yielded once. Always `close` it.

    `slot_position` returns the slot's position, `server_position` the end of the server's WAL:
    nothing is yielded from a stream that reports a position beyond that. `memory_bytes`: for input
    that is read and not decoded yet.
    `checkpoint_requested`: the server waits for a reply with everything sent, or a backlog has been
    drained or streamed.
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
        catch_up: CatchUpPolicy,
        spool: SpoolPolicy,
        past: UndecodablePast,
    ) -> None:
        self._source = source
        self._slot_position = slot_position
        self._server_at = ServerPosition(server_position, f"source {source}, stream")
        self._dsn = settings.dsn.get_secret_value()
        self._slot = settings.slot
        self._publication = settings.publication
        self._logs_ddl = settings.logs_ddl
        self._is_managed = settings.manage
        self._relations = relations
        self._memory_bytes = memory_bytes
        self._row_limit_bytes = row_limit_bytes(memory_bytes)
        self._catch_up = catch_up
        self._spool = spool
        self._past = past
        self._position = self._slot_at = ZERO
        self._lineage = ""
        self._encoding: Encoding | None = None
        self._stream: ReplicationStream | None = None
        self._draining: Drain | None = None
        self._decoder: PgoutputDecoder | None = None
        self._slot_lock = asyncio.Lock()
        self._advance = SlotAdvance(
            self._dsn,
            self._slot,
            source,
            step_bytes=min(ADVANCE_BYTES, catch_up.part_bytes),
        )
        self._delivered = self._confirmed = self._flushed = self._wanted = ZERO
        self._late_looks = self._again_bytes = 0
        self._behind_until: Lsn | None = None  # where the server was when the stream began
        self._is_letting_go = False
        self.checkpoint_requested = False

    async def changes(self, start: Lsn, server: WalServer) -> AsyncGenerator[Chunk, None]:
        """Yield the changes of transactions with commit_lsn >= `start`, the slot's or later.

        Call `server_is_at` first. Raises TransientError, OperatorError, ProtocolError.
        """
        self._slot_at = self._position = start
        self._lineage = self._advance.lineage = server.lineage
        self._encoding = encoding_of(server.encoding)
        self._server_at.begin()
        self._advance.begin(max(start, self._confirmed))
        while True:
            async with contextlib.aclosing(self._backlogs()) as chunks:
                async for chunk in chunks:
                    await self._server_at.ensure_reached(chunk.position, self._lineage)
                    yield self._deliver(chunk)
                    self._position = max(self._position, chunk.position)
            async with contextlib.aclosing(self._streamed(self._position, server)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _backlogs(self) -> AsyncGenerator[Chunk, None]:
        """Drain the backlog, and what was written meanwhile, for as long as that pays."""
        behind_bytes = self._flushed - self._position
        pays = self._catch_up.pays(behind_bytes, self._again_bytes)
        if behind_bytes > self._catch_up.above_bytes and self._catch_up.is_too_much(
            self._again_bytes, behind_bytes
        ):
            self._tell_rereading(self._again_bytes)
        while pays:
            begin, target = self._position, self._flushed
            async with contextlib.aclosing(self._backlog(begin, target)) as chunks:
                async for chunk in chunks:
                    yield chunk
            if self._position > begin:  # else the server refused
                self._want(self._position)
            is_drained = self._position >= target
            pays = is_drained and self._is_late_at(self._position)

    async def _streamed(self, start: Lsn, server: WalServer) -> AsyncGenerator[Chunk, None]:
        """Yield the changes as they arrive, until a backlog must be drained.

        Not before any has arrived: the server's work on a long transaction would be lost.
        """
        self._late_looks = 0
        self._behind_until = self._flushed if self._flushed > start else None
        takes_open = self._spool.takes_open_transactions
        try:
            stream = await self._begin_stream(start, server, takes_open=takes_open)
        except ProtocolError as error:
            raise self._placed(error, "stream", start) from error
        self._spool.connected()
        self._encoding = stream.encoding
        decoder, order = self._new_decoder(), self._new_order()
        try:
            yield self._deliver(decoder.idle(start) or idle_chunk(start))
            while True:
                await reach_async("capture.receive.before")
                collected = await stream.take()
                await reach_async("capture.receive.after")
                decoding = BlockDecoder(decoder, order, collected)
                while not decoding.is_done:
                    found = await asyncio.to_thread(decoding.some)
                    # Until something is confirmed: the pipeline checks only now and then.
                    asked = decoding.reply_requested
                    self.checkpoint_requested |= asked and decoder.position > self._confirmed
                    await self._server_at.ensure_reached(decoder.position, self._lineage)
                    stream.received(decoder.position)
                    for chunk in found:
                        yield self._deliver(chunk)
                self._want_what_was_behind(decoder.position)
                if decoding.ended is not None:
                    raise stream.fault(decoding.ended) from decoding.ended
                # Buffered open transactions would have to be sent again.
                if decoder.position > start and self._is_late(decoder) and not order.has_open:
                    self._position = decoder.position
                    return
        except (OperatorError, ProtocolError) as raised:
            fault = raised
            if isinstance(raised, ProtocolError):
                fault = self._placed(raised, "stream", decoder.position)
            meant = self._meant(fault, takes_open=takes_open)
            if meant is raised:
                raise
            raise meant from raised.__cause__ or raised
        finally:
            self._stream, self._is_letting_go = None, True
            try:
                await stream.close()
            finally:
                self._is_letting_go = False
                self._advance.begin(max(self._slot_at, self._confirmed))

    def _placed(self, error: ProtocolError, what: str, position: Lsn) -> ProtocolError:
        """Return the error with the place where it occurred."""
        return error.within(f"source {self._source}, {what}, after {position}")

    def _meant(self, error: OperatorError | ProtocolError, *, takes_open: bool) -> IngestdError:
        """Return what this end of the stream means for the next start; else the error itself."""
        cause = error.__cause__
        if self._is_of_publication(cause):
            fault = older_slot(self._slot, self._publication, f"source {self._source}, stream")
            if not self._is_managed:
                return fault
            self._past.lacks_publication = True  # `continuity` reports a gap
            return TransientError(fault.what, reason="publication_lost")
        if is_unsendable(cause):
            return OperatorError(error.what, remedy=self._past_it("its large column"))
        if takes_open:
            # Servers up to 18 fail at some transactions with DDL and savepoints whenever they send
            # them while open, and not after (could not map filenode ... to relation OID).
            self._spool.is_refused = True
            return TransientError(
                error.what,
                reason="open_transactions",
                remedy="nothing to do: the next connection has transactions sent after they commit",
            )
        if isinstance(cause, psycopg.DataError):
            remedy = f"correct it in its table; or {self._past_it('its column')}"
            return OperatorError(error.what, remedy=remedy)
        return error

    def _is_of_publication(self, fault: BaseException | None) -> bool:
        if not isinstance(fault, psycopg.errors.UndefinedObject):
            return False
        return f'"{self._publication}"' in (fault.diag.message_primary or "")

    async def _begin_stream(
        self, start: Lsn, server: WalServer, *, takes_open: bool
    ) -> ReplicationStream:
        async with self._slot_lock:
            await self._advance.settle()
            stream = await open_stream(
                self._dsn,
                self._slot,
                self._publication,
                start,
                max(self._slot_at, self._confirmed),
                takes_open=takes_open,
                messages=self._logs_ddl,
                where=f"source {self._source}, stream",
                limits=self._limits(server),
                lineage=self._lineage,
            )
            try:
                await self._ensure_not_moved(start)
            except BaseException:
                await stream.close()
                raise
            stream.begin_reporting()
            self._stream = stream
        return stream

    def _want_what_was_behind(self, position: Lsn) -> None:
        if self._behind_until is not None and position >= self._behind_until:
            self._behind_until = None
            self._want(position)

    def _want(self, position: Lsn) -> None:
        """Request a checkpoint at the end of a backlog: until then the slot keeps its WAL."""
        self._wanted = position
        self.checkpoint_requested |= position > self._confirmed

    async def _ensure_not_moved(self, start: Lsn) -> None:
        """Raise TransientError if the slot was moved beyond `start` before the stream took it.

        Until then any client could move it. The stream has not reported anything yet.
        """
        if (confirmed := await self._slot_position()) > start:
            raise moved_slot(self._slot, skipped(confirmed, start))

    @property
    def confirmed(self) -> Lsn:
        """The last confirmed position."""
        return self._confirmed

    def delivered(self, position: Lsn) -> None:
        """Record that everything below `position` is delivered by the rows of a snapshot."""
        self._delivered = max(self._delivered, position)

    def server_is_at(self, flushed: Lsn, again_bytes: int) -> None:
        """Record the server's position, now and then: a stream may stay far behind.

        `again_bytes`: see `Slot.again_bytes`.
        """
        self._flushed = max(self._flushed, flushed)
        self._again_bytes = again_bytes
        decoder = None if self._stream is None else self._decoder
        is_late = decoder is not None and self._is_late_at(decoder.position)
        self._late_looks = self._late_looks + 1 if is_late else 0

    def _is_late_at(self, position: Lsn) -> bool:
        return self._catch_up.is_late(self._flushed - position, self._again_bytes)

    def _is_late(self, decoder: PgoutputDecoder) -> bool:
        """Return whether to drain the backlog; not in the middle of a transaction.

        Nor after the only transaction of the backlog: the server would decode it once more.
        """
        if self._late_looks < LATE_LOOKS or decoder.is_open:
            return False
        return self._is_late_at(decoder.position)

    def resolve_again(self) -> None:
        """Record that other tables are captured from now on."""
        if self._decoder is not None:
            self._decoder.resolve_again()

    def begin_anew(self) -> None:
        """Record that the slot is a new one."""
        self._confirmed = ZERO

    async def confirm(self, position: Lsn) -> None:
        """Record the position, and report it by the stream or by moving the slot, now or later.

        Raises ValueError for a position beyond what was delivered.
        """
        if position > self._delivered:
            msg = f"confirm {position} is beyond what was delivered, {self._delivered}"
            raise ValueError(msg)
        if position <= self._confirmed:
            return
        self._confirmed = position
        self.checkpoint_requested = position < self._wanted
        await reach_async("capture.confirm.before")
        async with self._slot_lock:  # not while the stream takes the slot over
            if self._stream is not None:
                await self._stream.confirm(position)
            elif not self._is_letting_go:  # else the slot belongs to the stream being closed
                await self._advance.confirm(position)
        await reach_async("capture.confirm.after")

    async def close(self) -> None:
        """Close its connections. May be called at any time, and twice."""
        if self._stream is not None:
            await self._stream.close()
        if self._draining is not None:
            await self._draining.close()
        await self._advance.close()

    async def _backlog(self, start: Lsn, target: Lsn) -> AsyncGenerator[Chunk, None]:
        """Yield the transactions from `start` to about `target`, drained by SQL functions.

        If the server refuses, yield nothing: the backlog is streamed. If it fails later, the source
        restarts, and then drains in another way or streams.
        """
        decoder = self._new_decoder()
        decoder.idle(start)
        has_given = False
        try:
            async with contextlib.aclosing(self._drained(start, target, decoder)) as chunks:
                async for chunk in chunks:
                    has_given = True
                    yield chunk
        except PartFailedError as error:
            what = f"source {self._source}, catch-up: {error}"
            remedy = error.remedy
            raise TransientError(what, reason="catch_up_refused", remedy=remedy) from error
        except ProtocolError as error:
            raise self._placed(error, "catch-up", decoder.position) from error
        except psycopg.Error as error:
            self._refuse_to_drain(error, has_given=has_given)

    async def _drained(
        self, start: Lsn, target: Lsn, decoder: PgoutputDecoder
    ) -> AsyncGenerator[Chunk, None]:
        backlog = self._draining = await Drain.begin(
            self._dsn,
            self._slot,
            self._publication,
            self._catch_up,
            target - start,
            lineage=self._lineage,
            row_limit_bytes=self._row_limit_bytes,
        )
        try:
            async with contextlib.aclosing(backlog.chunks(start, target, decoder)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._draining = None
            await backlog.close()
        if backlog.again_bytes:
            self._catch_up.pause(PAUSE_S)
            self._tell_rereading(backlog.again_bytes)
        else:
            self._catch_up.finished()

    def _refuse_to_drain(self, error: psycopg.Error, *, has_given: bool) -> None:
        """Stream for a time. Raises TransientError if that can't continue from here."""
        pause_s = REFUSED_PAUSE_S
        fault = classify(error, f"source {self._source}, catch-up", self._dsn)
        if isinstance(fault, TransientError):
            if has_given or fault.reason != FULL:
                raise fault from error
            pause_s = PAUSE_S  # streaming takes fewer connections
        what, remedy = fault.what, fault.remedy
        self._catch_up.pause(pause_s)
        self._tell_streaming(what, remedy)
        if has_given:
            raise TransientError(what, reason="catch_up_refused", remedy=remedy) from error

    def _tell_rereading(self, again_bytes: int) -> None:
        reason = f"the server would re-read {again_bytes / 1e9:.1f} GB of WAL for each part"
        remedy = (
            "end long-running transactions: "
            "SELECT pid, xact_start, query FROM pg_catalog.pg_stat_activity ORDER BY xact_start;"
        )
        self._tell_streaming(f"{reason}, from the slot's restart_lsn on", remedy)

    def _tell_streaming(self, reason: str, remedy: str | None) -> None:
        """Log why a backlog is streamed."""
        log = structlog.get_logger("ingestd")
        log.warning("catch_up.refused", source=self._source, reason=reason, remedy=remedy)

    def _past_it(self, what: str) -> str:
        """Return how to get past a row that can't be sent: its table is not known here."""
        return (
            f"exclude {what} (`exclude_columns`), or its table. The server still "
            "sends what is in the WAL as it was written, so then: stop ingestd, SELECT "
            "pg_catalog.pg_drop_replication_slot("
            f"'{self._slot}'); and start it: all tables are re-read"
        )

    def _new_decoder(self) -> PgoutputDecoder:
        hold_bytes = min(8 << 20, self._memory_bytes // 8)
        self._decoder = PgoutputDecoder(
            self._relations.resolve,
            tell_partition=self._relations.tell_partition,
            tell_message=self._relations.tell_ddl,
            hold_bytes=hold_bytes,
            row_limit_bytes=self._row_limit_bytes,
            encoding=self._encoding,
        )
        return self._decoder

    def _new_order(self) -> StreamedTransactions:
        where = f"source {self._source}"
        return StreamedTransactions(
            OpenTransactions(self._spool, memory_bytes=self._memory_bytes // 8, where=where)
        )

    def _deliver(self, chunk: Chunk) -> Chunk:
        self.delivered(chunk.position)
        left_out = self._relations.take_left_out()
        return replace(chunk, left_out=left_out) if left_out else chunk

    def _limits(self, server: WalServer) -> StreamLimits:
        interval = STATUS_INTERVAL_S
        if server.sender_timeout_s > 0:
            interval = min(interval, server.sender_timeout_s / 4)
        return StreamLimits(
            limit_bytes=max(1 << 20, self._memory_bytes // _COLLECTED),
            status_interval_s=interval,
            row_limit_bytes=self._row_limit_bytes,
        )
