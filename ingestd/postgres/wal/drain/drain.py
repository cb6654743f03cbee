"""Drains a backlog through SQL functions, which is faster than a walsender.

A walsender sends each message separately, and decodes on one core. Here messages are rows of a
COPY, which the server sends by the buffer, and several temporary copies of the slot
(`slot_copy.DrainSlot`) decode parts of the backlog (`parts`) at the same time; a finished result
waits on the server until its turn. One task reads the blocks in the order of the parts, one ahead
of the decoder::

    slot 1   make part 1 | read 1 | make part 3 ...      | read 3
    slot 2   make part 2 ...      | read 2 | make part 4 ...
    decoder                part 1   part 2                 part 3

The main slot stays where it is confirmed. The caller continues with START_REPLICATION at the
decoder's position, which sends exactly the transactions that follow.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

import psycopg

from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.decode.pgoutput.reordered_drain import MOST_SEGMENTED
from ingestd.model.changes import ChangeSet
from ingestd.model.errors import ProtocolError
from ingestd.model.lsn import Lsn
from ingestd.model.row_checks import UNLIMITED_BYTES
from ingestd.postgres.connection.errors import is_of_a_row
from ingestd.postgres.connection.server_messages import loggable_message
from ingestd.postgres.transport.copy_out import LARGE_BLOCK_BYTES, CopyBlock
from ingestd.postgres.wal.block_decoder import timed_feed
from ingestd.postgres.wal.decoding_memory import DECODING_MEMORY
from ingestd.postgres.wal.drain.backlog_parts import (
    MOST_JOINED,
    SPARSE_RATIO,
    BacklogPart,
    PartQueue,
    cut,
)
from ingestd.postgres.wal.drain.slot_copy import RESULT_MEMORY, DrainSlot, Result
from ingestd.postgres.wal.slots.slot import moved_slot, skipped, vanished_slot
from ingestd.process.tasks import cancel_all

_T = TypeVar("_T")

_SMALLER = (
    "nothing to do: smaller parts are tried; to drain in large ones, raise the limit named above, "
    "or lower catch_up_part"
)
_WITHOUT_OPEN = "nothing to do: this backlog is drained without segments of open transactions"


@dataclass(slots=True)
class DrainPolicy:
    """When to drain, and how; a source has one policy for as long as the process runs.

    Draining pays with more than `above_bytes` of WAL to read. `slots`: the most that decode at a
    time. `part_bytes`: about how much WAL one call covers, or up to `most_joined` times that where
    the WAL holds little (`parts.PartQueue`); the server keeps one result per slot in temporary
    files, of about that size or of one transaction's.
    Both shrink if the server can't keep that much (temp_file_limit). `paused_until_s`: stream until
    then. `drained`: the number of backlogs drained.
    `streams_in_progress`: the server may send segments of transactions that exceed its memory
    before their commit; `open_bytes`: in parts of at least this much WAL, as smaller ones hardly
    have any. `messages`: include logical messages.

    Streaming is better if each call must re-read more WAL than `reread_parts` parts have, and more
    than `reread_bytes`. Decoding begins at restart_lsn: where the oldest transaction began that was
    open at the slot's position. A stream reads from there once, each part of a backlog again.

    `least_part_bytes`: the least size to which parts shrink when the server can't keep their
    results. `sparse_ratio`: see `PartQueue`. `result_memory`: what the server keeps of a result in
    memory (work_mem). `decoding_memory`: in which it may buffer transactions while it decodes.
    `large_block_bytes`: a block above this is not read ahead of. `most_segmented`: a result may
    have at most this many transactions in segments, because each costs a scan of it; `segmented`:
    the number of transactions that came in segments. `pause_s`: the pause before checking again
    whether calls still re-read much WAL, or whether a connection is free. `refused_pause_s`: the
    pause before retrying what the server refused: a slot may be free, a privilege granted.
    """

    above_bytes: int
    slots: int = 2
    part_bytes: int = 3_000_000_000
    most_joined: int = MOST_JOINED
    least_part_bytes: int = 64_000_000
    sparse_ratio: int = SPARSE_RATIO
    result_memory: str = RESULT_MEMORY
    decoding_memory: str = DECODING_MEMORY
    large_block_bytes: int = LARGE_BLOCK_BYTES
    most_segmented: int = MOST_SEGMENTED
    reread_bytes: int = 256 << 20
    reread_parts: int = 8
    pause_s: float = 300.0
    refused_pause_s: float = 3600.0
    drained: int = 0
    segmented: int = 0
    streams_in_progress: bool = True
    open_bytes: int = 256 << 20
    messages: bool = False
    monotonic: Callable[[], float] = time.monotonic
    paused_until_s: float = -inf

    def pays(self, behind_bytes: int, reread_bytes: int) -> bool:
        """Return whether to drain rather than stream; each call would re-read `reread_bytes`."""
        if self.is_paused or behind_bytes <= self.above_bytes:
            return False
        return not self.is_too_much(reread_bytes, behind_bytes)

    @property
    def is_paused(self) -> bool:
        """True to stream for now, however large the backlog is."""
        return self.monotonic() < self.paused_until_s

    def is_too_much(self, reread_bytes: int, behind_bytes: int) -> bool:
        """Return whether each part re-reads so much that streaming is better."""
        of_parts = self.reread_parts * min(behind_bytes, self.part_bytes)
        return reread_bytes > max(self.reread_bytes, of_parts)

    def pause(self, seconds: float) -> None:
        """Stream for a time: the obstacle may disappear."""
        self.paused_until_s = self.monotonic() + seconds

    def use_smaller_parts(self, failed: BacklogPart) -> bool:
        """Stop joining parts, or shrink them; return False if they are at their least size."""
        if failed.is_joined:
            self.most_joined = 1
        elif self.part_bytes > self.least_part_bytes:
            self.part_bytes = max(self.part_bytes // 4, self.least_part_bytes)
        else:
            return False
        return True

    def finished(self) -> None:
        """Record that a backlog was drained; the next one may differ."""
        self.drained += 1
        self.streams_in_progress = True

    def may_stream_in_progress(self, part: BacklogPart) -> bool:
        """Return whether the server may send segments of transactions before their commit.

        Not in joined parts: their number of messages could be reached before any commit.
        """
        return (
            self.streams_in_progress
            and not part.is_joined
            and part.end - part.begin >= self.open_bytes
        )

    def is_late(self, behind_bytes: int, reread_bytes: int) -> bool:
        """Return whether a source that already streams, or has drained, must drain again."""
        return behind_bytes > 0 and self.pays(behind_bytes, reread_bytes)


class PartFailedError(Exception):
    """A part can't be drained this way; the policy has recorded that, the next attempt differs."""

    def __init__(self, what: str, *, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


class Drain:
    """One drain of a slot's backlog. Created by `start`; always `close` it.

    Closing drops the temporary slots. Raises psycopg.Error; PartFailedError; ProtocolError.
    `reread_bytes`: nonzero if it was given up because each part would re-read so much.
    """

    def __init__(self, slot: str, slots: Sequence[DrainSlot], policy: DrainPolicy) -> None:
        self._slot = slot
        self._slots = slots
        self._policy = policy
        self._tasks: set[asyncio.Task[Any]] = set()
        self.reread_bytes = 0

    @classmethod
    async def start(
        cls,
        dsn: str,
        slot: str,
        publication: str,
        policy: DrainPolicy,
        behind_bytes: int,
        *,
        queried_id: str,
        row_limit_bytes: int = UNLIMITED_BYTES,
    ) -> Drain:
        """Copy the slot at least once, up to as often as the policy says and the server allows.

        `queried_id`: see `refuse_other`; `row_limit_bytes`: see `DrainSlot.open`. Raises
        TransientError if the slot does not exist.
        """
        parts = cut(Lsn(0), Lsn(behind_bytes), slots=policy.slots, part_bytes=policy.part_bytes)
        slots: list[DrainSlot] = []
        try:
            for _ in range(max(1, min(policy.slots, len(parts)))):
                try:
                    slots.append(
                        await DrainSlot.open(
                            dsn,
                            slot,
                            publication,
                            queried_id=queried_id,
                            messages=policy.messages,
                            row_limit_bytes=row_limit_bytes,
                            result_memory=policy.result_memory,
                            decoding_memory=policy.decoding_memory,
                            most_segmented=policy.most_segmented,
                        )
                    )
                except psycopg.OperationalError:  # no free slot or connection
                    if not slots:
                        raise
                    break
                except psycopg.errors.UndefinedObject as error:
                    raise vanished_slot(slot) from error
        except BaseException:
            for opened in slots:
                await opened.close()
            raise
        return cls(slot, slots, policy)

    async def change_sets(
        self, start: Lsn, target: Lsn, decoder: PgoutputDecoder
    ) -> AsyncGenerator[ChangeSet, None]:
        """Yield the transactions from `start` to `target`, or fewer if streaming becomes better.

        While a block is decoded the next is read, except for large blocks. After each part a change
        set without changes reports that everything before its end was yielded. Raises
        TransientError if the slot was beyond `start`.
        """
        for slot in self._slots:
            if slot.position > start:  # another client may move the slot that was copied
                raise moved_slot(self._slot, skipped(slot.position, start))
        parts = cut(start, target, slots=len(self._slots), part_bytes=self._policy.part_bytes)
        waiting = PartQueue(
            parts,
            part_bytes=self._policy.part_bytes,
            most_joined=self._policy.most_joined,
            sparse_ratio=self._policy.sparse_ratio,
        )
        blocks = self._blocks(waiting, target - start)
        try:
            reading = self._start(anext(blocks, None))
            while (found := await reading) is not None:
                del reading  # a task keeps its result
                block, result, end = found
                is_large = len(block.buffer) > self._policy.large_block_bytes
                if not is_large:
                    reading = self._start(anext(blocks, None))
                decoded = await self._decoded(decoder, result, block, waiting)
                del found, block
                for change_set in decoded:
                    yield change_set
                if is_large:
                    reading = self._start(anext(blocks, None))
                if end is not None:
                    self._policy.segmented += result.segmented
                    idle = decoder.idle(end)
                    if idle is not None:
                        yield idle
        finally:
            await self._stop()
            await blocks.aclose()

    async def _blocks(
        self, waiting: PartQueue, behind_bytes: int
    ) -> AsyncGenerator[tuple[CopyBlock, Result, Lsn | None], None]:
        """Yield the blocks of all parts in order; with the last block of each part its end."""
        making: deque[tuple[DrainSlot, BacklogPart, asyncio.Task[None]]] = deque()

        def make_next(slot: DrainSlot) -> None:
            if waiting and self._policy.is_too_much(slot.reread_bytes, behind_bytes):
                self.reread_bytes = slot.reread_bytes
                waiting.clear()
            if (part := waiting.next_part()) is not None:
                making.append((slot, part, self._make(slot, part)))

        for slot in self._slots:
            make_next(slot)
        while making:
            slot, part, made = making.popleft()
            block = await self._first_block(slot, part, made)
            result = slot.result()
            nbytes = len(block.buffer)
            while not block.is_last:
                given = [block]
                del block  # must not be kept while it is decoded
                yield given.pop(), result, None
                block = await slot.read_block()
                nbytes += len(block.buffer)
            end = await slot.complete_part(part)
            waiting.note_size(part.up_to(end), nbytes)
            if end < part.end:
                rest = part.after(end)
                making.appendleft((slot, rest, self._make(slot, rest)))
            else:
                make_next(slot)
            given = [block]
            del block
            yield given.pop(), result, end

    async def _first_block(
        self, slot: DrainSlot, part: BacklogPart, made: asyncio.Task[None]
    ) -> CopyBlock:
        """Return the first block of a part's result, which the server then has completely."""
        try:
            await made
            return await slot.read_block()
        except psycopg.Error as error:
            if is_of_a_row(error) and not slot.has_open:
                raise
            is_too_large = isinstance(error, psycopg.errors.ConfigurationLimitExceeded)
            remedy = _SMALLER
            if slot.has_open and (is_too_large or not isinstance(error, psycopg.OperationalError)):
                self._policy.streams_in_progress = False
                remedy = _WITHOUT_OPEN
            elif not is_too_large or not self._policy.use_smaller_parts(part):
                raise
            raise PartFailedError(loggable_message(error), remedy=remedy) from error

    async def _decoded(
        self, decoder: PgoutputDecoder, result: Result, block: CopyBlock, waiting: PartQueue
    ) -> list[ChangeSet]:
        try:
            return await asyncio.to_thread(_decode, decoder, result, block, waiting)
        except ProtocolError as error:
            if not result.has_open:
                raise
            self._policy.streams_in_progress = False
            raise PartFailedError(error.what, remedy=_WITHOUT_OPEN) from error

    def _make(self, slot: DrainSlot, part: BacklogPart) -> asyncio.Task[None]:
        in_progress = self._policy.may_stream_in_progress(part)
        return self._start(slot.make(part, streams_in_progress=in_progress))

    async def close(self) -> None:
        """Stop all tasks, drop the temporary slots. May be called while `change_sets` waits."""
        try:
            await self._stop()  # first: a task may be using a connection
        finally:
            closed = await asyncio.gather(*(s.close() for s in self._slots), return_exceptions=True)
        for fault in filter(None, closed):
            raise fault

    def _start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: often nothing awaits the task any more

    async def _stop(self) -> None:
        running = list(self._tasks)
        await cancel_all(*running)


def _decode(
    decoder: PgoutputDecoder, result: Result, block: CopyBlock, waiting: PartQueue
) -> list[ChangeSet]:
    change_sets: list[ChangeSet] = []
    for buffer, starts, ends in result.read(block):
        if len(starts):
            waiting.note_messages(len(starts), int(ends[-1] - starts[0]))
        change_sets += timed_feed(decoder, buffer, starts, ends)
    return change_sets
