"""A temporary copy of the slot, drained through the SQL functions, part by part.

States; only this moves the temporary slot, and never the one that it was copied from::

    copied ----> moved to a part's begin ----> result made ----> read: it has passed the part's end
      ^ the server decodes from restart_lsn      |
      +------------ next part -------------------+

The server has the complete result of a call before its first row leaves: `make` returns then. A
row is a message.

Source: PostgreSQL documentation, "Replication Management Functions".
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
from psycopg import sql

from ingestd.decode.copy.message_rows import MessageRows
from ingestd.decode.pgoutput.reordered_drain import MOST_SEGMENTED, ReorderedDrain
from ingestd.decode.pgoutput.shortening import CopiedChange
from ingestd.decode.pgoutput.streamed_transactions import MessageRun
from ingestd.failpoints import reach_async
from ingestd.model.errors import ProtocolError
from ingestd.model.lsn import Lsn
from ingestd.model.row_checks import UNLIMITED_BYTES, change_limit_bytes, kept_bytes
from ingestd.postgres.connection.errors import cut_off
from ingestd.postgres.connection.liveness import LivenessCheckedConnection
from ingestd.postgres.connection.session import connect, end_without_client
from ingestd.postgres.transport.copy_out import CopyBlock, CopyOut
from ingestd.postgres.wal.decoding_memory import DECODING_MEMORY, raise_decoding_memory
from ingestd.postgres.wal.drain.backlog_parts import BacklogPart
from ingestd.postgres.wal.drain.queries import (
    CHANGES,
    CLEAR_SETTINGS,
    COMMITS_AHEAD,
    OPEN_OPTIONS,
    OPTIONS,
    SINGLE,
    WITH_MESSAGES,
)
from ingestd.postgres.wal.server import refuse_other
from ingestd.postgres.wal.slots.slot import temporary_name

RESULT_MEMORY = "32MB"

_POSITIONS = (
    "SELECT confirmed_flush_lsn::text, restart_lsn::text FROM pg_catalog.pg_replication_slots"
    " WHERE slot_name = %s"
)


class Result:
    """Reads the result of one call, block by block.

    `has_open`: with segments of transactions, of at most `most_segmented` transactions.
    """

    def __init__(self, *, has_open: bool, most_segmented: int = MOST_SEGMENTED) -> None:
        self.has_open = has_open
        self._messages = MessageRows()
        self._order = ReorderedDrain(most_segmented) if has_open else None

    @property
    def segmented(self) -> int:
        """The number of transactions read so far that came in segments."""
        return 0 if self._order is None else self._order.count

    def read(self, block: CopyBlock) -> Iterator[MessageRun]:
        """Yield the block's messages, in commit order. Raises ProtocolError."""
        starts, ends = self._messages.unpack(block.buffer, block.starts, block.ends)
        if block.is_last:
            self._messages.finish()
        if self._order is None:
            yield block.buffer, starts, ends
            return
        yield from self._order.feed(block.buffer, starts, ends)
        if block.is_last:
            self._order.finish()


class DrainSlot:
    """One temporary slot, on its own connection. Created by `open`; always `close` it.

    Raises psycopg.Error. One call at a time.
    """

    def __init__(
        self,
        connection: LivenessCheckedConnection,
        name: str,
        publication: str,
        *,
        messages: bool = False,
        row_limit_bytes: int = UNLIMITED_BYTES,
        most_segmented: int = MOST_SEGMENTED,
    ) -> None:
        self._connection = connection
        self._name = name
        self._publication = publication
        self._messages = messages
        self._most_segmented = most_segmented
        self._copy = CopyOut(
            connection,
            limit_bytes=change_limit_bytes(row_limit_bytes),
            shortener=lambda: CopiedChange(kept_bytes(row_limit_bytes)),
        )
        self._has_open = False
        self._position = self._restart = Lsn(0)

    @classmethod
    async def open(
        cls,
        dsn: str,
        slot: str,
        publication: str,
        *,
        queried_id: str,
        messages: bool = False,
        row_limit_bytes: int = UNLIMITED_BYTES,
        result_memory: str = RESULT_MEMORY,
        decoding_memory: str = DECODING_MEMORY,
        most_segmented: int = MOST_SEGMENTED,
    ) -> DrainSlot:
        """Connect and copy the slot. Closing drops the copy. `queried_id`: see `refuse_other`.

        `messages`: include logical messages. A change of more than `row_limit_bytes` arrives
        shortened (`decode.pgoutput.shortening`). `result_memory`, `decoding_memory`: what the
        server keeps in memory of a result, and of transactions while it decodes.
        """
        connection = await connect(dsn, claim=slot)
        try:
            name = temporary_name(slot, "catch_up")
            await end_without_client(connection)
            # A search in a result may depend on what was found in it before.
            await connection.execute("SET enable_memoize = off")
            await connection.execute(CLEAR_SETTINGS)
            await connection.execute(
                "SELECT pg_catalog.set_config('work_mem', %s, false)", (result_memory,)
            )
            await raise_decoding_memory(connection, decoding_memory)
            await refuse_other(connection, queried_id)
            await reach_async("capture.slot_copy.before", cut_off)
            await connection.execute(
                "SELECT pg_catalog.pg_copy_logical_replication_slot(%s, %s, true)", (slot, name)
            )
            await reach_async("capture.slot_copy.after", cut_off)
            drain = cls(
                connection,
                name,
                publication,
                messages=messages,
                row_limit_bytes=row_limit_bytes,
                most_segmented=most_segmented,
            )
            await drain._read_slot()
        except BaseException:
            await connection.close()
            raise
        return drain

    @property
    def position(self) -> Lsn:
        """The slot's position: everything that commits there or later is still to come."""
        return self._position

    @property
    def reread_bytes(self) -> int:
        """WAL that this or an earlier call has read and the next re-reads, in bytes."""
        return max(0, self._position - self._restart)

    async def make(self, part: BacklogPart, *, streams_in_progress: bool = False) -> None:
        """Start a part's result on the server; return when it is complete.

        `streams_in_progress`: the server may return segments of transactions that exceed its memory
        before their commit, so that they need not be spilled to its disk.
        """
        self._has_open = streams_in_progress
        if self._position < part.begin:
            await self._connection.execute(
                "SELECT pg_catalog.pg_replication_slot_advance(%s, %s::pg_lsn)",
                (self._name, str(part.begin)),
            )
        await reach_async("capture.drain.before", cut_off)
        await self._copy.start(self._query(part))

    @property
    def has_open(self) -> bool:
        """True if the last part that was made may have segments of transactions."""
        return self._has_open

    def result(self) -> Result:
        """Return a reader of the result that was made."""
        return Result(has_open=self._has_open, most_segmented=self._most_segmented)

    async def read_block(self) -> CopyBlock:
        """Return the next block of the result; `is_last` marks the last one."""
        return await self._copy.read_block()

    async def complete_part(self, part: BacklogPart) -> Lsn:
        """Record that a part's result is read; return its end, which may precede `part.end`.

        Raises ProtocolError if the result ends before it should.
        """
        await reach_async("capture.drain.after", cut_off)
        await self._read_slot()
        end = min(self._position, part.end)
        if end < part.end and (not part.most_messages or end <= part.begin):
            gave = f"returned changes up to {self._position}, not to {part.end}"
            msg = f"the server's temporary slot {self._name} {gave}"
            raise ProtocolError(msg)
        return end

    async def close(self) -> None:
        """Stop the running call and drop the slot. May be called twice, but not during a call."""
        await self._copy.close()

    def _query(self, part: BacklogPart) -> sql.Composed:
        options = OPEN_OPTIONS if self._has_open else OPTIONS
        changes = CHANGES.format(
            slot=sql.Literal(self._name),
            upto=sql.Literal(str(part.end)),
            most=sql.Literal(part.most_messages or None),
            options=options + WITH_MESSAGES if self._messages else options,
            # a list of identifiers, which the server unquotes
            publication=sql.Literal(sql.Identifier(self._publication).as_string(None)),
        )
        if self._has_open:
            rows = COMMITS_AHEAD.format(changes=changes, most=sql.Literal(self._most_segmented))
        else:
            rows = SINGLE.format(changes=changes)
        return sql.SQL("COPY ({}) TO STDOUT (FORMAT binary)").format(rows)

    async def _read_slot(self) -> None:
        cursor = await self._connection.execute(_POSITIONS, (self._name,))
        row = await cursor.fetchone()
        if row is None:
            raise psycopg.errors.UndefinedObject(f"temporary slot {self._name} does not exist")
        self._position, self._restart = Lsn.parse(row[0]), Lsn.parse(row[1])
