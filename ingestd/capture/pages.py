"""Reads a split: COPY at an exported snapshot, decoded to Arrow.

Source: PostgreSQL documentation, COPY ("Binary Format") and "Message Flow", COPY Operations. Each
column is read as the text of its type's output function, which is what the stream sends (design
section 8.4); binary format, because it needs no escaping and says how long each value is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from numpy.typing import NDArray
from psycopg import AsyncConnection, sql
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult

from ingestd.capture.session import connect
from ingestd.capture.splits import enter_snapshot, read_error
from ingestd.changes import TableBatch
from ingestd.decode.copy import CopyDecoder
from ingestd.errors import ProtocolError
from ingestd.ports import Split
from ingestd.positions import ZERO, Lsn
from ingestd.schema import Column, Table

BLOCK_BYTES = 4 << 20
"""How much is collected before it is decoded. At most two blocks are held."""
BLOCK_ROWS = 1 << 16
"""Each row is an object while it is collected, which outweighs a narrow row."""
INPUT_BUFFER_BYTES = 1 << 20
"""What libpq's input buffer is grown to, so that one wake-up reads many rows."""
_TURN_ROWS = 4096
"""So many rows are collected before other tasks have their turn (some ms)."""
_CANCEL_LIMIT_S = 2.0

_TEXT_AS_IS = frozenset({19, 25, 114, 1042, 1043})  # name, text, json, bpchar, varchar
"""Types whose binary form is the text of the output function."""
_TEXT_BY_CAST = frozenset(
    {17, 20, 21, 23, 26, 700, 701, 1082, 1083, 1114, 1184, 1186, 1266, 1700, 2950, 3802}
)
"""Built-in types that have no cast to text but by their output function."""


def as_text(column: Column) -> sql.Composable:
    """Give the SQL of the text that the type's output function has for a column.

    A plain ``::text`` is another function for bool, char(n), inet, xml and whatever a user has made
    a cast for; ``concat`` always takes the output function. (IS NULL would be true for a composite
    value of nulls.)
    """
    name = sql.Identifier(column.name)
    if column.type_oid in _TEXT_AS_IS:
        return name
    if column.type_oid in _TEXT_BY_CAST:
        return sql.SQL("{}::pg_catalog.text").format(name)
    return sql.SQL("CASE WHEN {0} IS DISTINCT FROM NULL THEN pg_catalog.concat({0}) END").format(
        name
    )


def copy_statement(table: Table, where: str) -> sql.Composed:
    """Give the COPY of the table's columns; `where` is of a `Split`, which CtidSplits composed."""
    columns = sql.SQL(", ").join(map(as_text, table.columns))
    return sql.SQL("COPY (SELECT {} FROM {}) TO STDOUT (FORMAT binary)").format(
        columns,
        sql.SQL(where),  # not a literal, but quoted when it was made
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """CopyData messages joined in one buffer."""

    buffer: bytes
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    is_last: bool


class TablePages:
    """A split's rows as `r` rows at (`point`, 0), read at time `at`. Close it always; not reusable.

    Its connection lives from the first batch to `close`. Raises TableError if the table is the
    reason, TransientError, OperatorError, ProtocolError.
    """

    def __init__(self, dsn: str, split: Split, point: Lsn, at: datetime) -> None:
        self._dsn = dsn
        self._split = split
        self._table = split.table
        self._decoder = CopyDecoder(split.table, point, at)
        self._connection: AsyncConnection[Any] | None = None
        self._reading: asyncio.Task[_Block] | None = None

    async def batches(self) -> AsyncGenerator[TableBatch, None]:
        """Give the rows; while a block is decoded or in the caller's hands the next is read."""
        try:
            await self._start()
            while self._reading is not None:
                block = await self._reading
                self._reading = None if block.is_last else asyncio.create_task(self._read_block())
                batch = await asyncio.to_thread(
                    self._decoder.feed, block.buffer, block.starts, block.ends
                )
                if batch is not None:
                    yield batch
            self._decoder.finish()
        except psycopg.Error as error:
            raise read_error(error, self._table.id) from error
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop the COPY, if it still runs, and close the connection. Twice is fine."""
        reading, self._reading = self._reading, None
        connection, self._connection = self._connection, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        if connection is None:
            return
        try:
            if reading is not None:
                with contextlib.suppress(psycopg.Error):  # the server may be gone as well
                    await connection.cancel_safe(timeout=_CANCEL_LIMIT_S)
        finally:
            await connection.close()

    # --- inside ------------------------------------------------------------------------------

    async def _start(self) -> None:
        connection = self._connection = await connect(self._dsn, autocommit=False)
        await enter_snapshot(connection, self._split.snapshot)
        await connection.execute(f"SELECT repeat('x', {INPUT_BUFFER_BYTES})")
        statement = copy_statement(self._table, self._split.where)
        pg = connection.pgconn
        pg.send_query(statement.as_bytes(connection))
        while pg.flush():
            await _ready(pg.socket, for_writing=True)
        while pg.is_busy():
            await _ready(pg.socket)
            pg.consume_input()
        result = pg.get_result()
        if result is None or result.status != ExecStatus.COPY_OUT:
            raise self._fault(result)
        self._reading = asyncio.create_task(self._read_block())

    async def _read_block(self) -> _Block:
        assert self._connection is not None
        pg = self._connection.pgconn
        take = pg.get_copy_data
        messages: list[Any] = []
        append = messages.append
        nbytes, turn = 0, _TURN_ROWS
        while nbytes < BLOCK_BYTES and len(messages) < BLOCK_ROWS:
            size, message = take(1)
            if size > 0:
                append(message)
                nbytes += size
                if len(messages) >= turn:
                    turn += _TURN_ROWS
                    await asyncio.sleep(0)
            elif size == 0:
                await _ready(pg.socket)
                pg.consume_input()
            else:
                await self._end()
                return await asyncio.to_thread(_join, messages, is_last=True)
        return await asyncio.to_thread(_join, messages, is_last=False)

    async def _end(self) -> None:
        """Take what follows the data: an error, or the command's end."""
        assert self._connection is not None
        pg = self._connection.pgconn
        while True:
            while pg.is_busy():
                await _ready(pg.socket)
                pg.consume_input()
            result = pg.get_result()
            if result is None:
                return
            if result.status != ExecStatus.COMMAND_OK:
                raise self._fault(result)

    def _fault(self, result: PGresult | None) -> Exception:
        if result is not None and result.status == ExecStatus.FATAL_ERROR:
            return error_from_result(result, encoding="utf-8")
        return ProtocolError(f"table {self._table.id}: no COPY follows the command")


async def _ready(socket: int, *, for_writing: bool = False) -> None:
    """Return when the socket can be read (or written)."""
    loop = asyncio.get_running_loop()
    add, remove = (
        (loop.add_writer, loop.remove_writer)
        if for_writing
        else (loop.add_reader, loop.remove_reader)
    )
    ready = asyncio.Event()
    add(socket, ready.set)
    try:
        await ready.wait()
    finally:
        remove(socket)


def _join(messages: Sequence[memoryview], *, is_last: bool) -> _Block:
    lengths = np.fromiter(map(len, messages), np.int64, len(messages))
    ends = np.cumsum(lengths)
    return _Block(b"".join(messages), ends - lengths, ends, is_last)


class CopyPageSource:
    """A split's rows in lake types, for readers other than the daemon.

    See `ingestd.ports.PageSource`. It accepts no predicates: all come back as `remaining`.
    """

    def __init__(
        self,
        dsn: str,
        split: Split,
        columns: Sequence[str] | None = None,
        predicates: Sequence[str] = (),
    ) -> None:
        table = split.table
        if columns is not None:
            table = replace(table, columns=tuple(map(table.column, columns)), key=(), before=())
        self._columns = [c.name for c in table.columns]
        self._remaining = tuple(predicates)
        self._pages = TablePages(dsn, replace(split, table=table), ZERO, datetime.now(UTC))

    @property
    def remaining(self) -> Sequence[str]:
        """All predicates."""
        return self._remaining

    async def batches(self) -> AsyncIterator[pa.RecordBatch]:
        """Give the columns asked for, and `_cdc_raw`."""
        async with contextlib.aclosing(self._pages.batches()) as batches:
            async for batch in batches:
                yield batch.rows.select([*self._columns, "_cdc_raw"])

    async def close(self) -> None:
        """Stop reading."""
        await self._pages.close()
