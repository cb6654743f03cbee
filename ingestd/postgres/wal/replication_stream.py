"""A START_REPLICATION stream, read ahead of its consumer.

Source: PostgreSQL documentation, "Streaming Replication Protocol" and "Logical Streaming
Replication Protocol".

A task reads while earlier input is decoded elsewhere. It stops when enough is collected (the server
then waits), but a separate timer continues the status updates: a slow lake never trips
wal_sender_timeout.

A server with nothing to send sends nothing. After a long silence it is asked for a reply, and the
stream is given up if none arrives (`LivenessCheckedConnection` decides when). A server that decodes
a transaction of which it sends nothing does not reply either, for as long as that takes; the stream
waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
from psycopg import sql

from ingestd.decode.pgoutput.messages import standby_status
from ingestd.decode.pgoutput.shortening import StreamedChange
from ingestd.decode.values.encodings import Encoding
from ingestd.failpoints import reach_async
from ingestd.model.errors import IngestdError, OperatorError, TransientError
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.row_checks import UNLIMITED_BYTES, change_limit_bytes, kept_bytes
from ingestd.postgres.connection.errors import classify, lost
from ingestd.postgres.connection.liveness import LivenessCheckedConnection, LivenessPolicy
from ingestd.postgres.connection.session import (
    connect,
    query_bytes,
    read_bytes_as_they_are,
    sent_encoding,
)
from ingestd.postgres.transport.channels.choice import Channels
from ingestd.postgres.transport.copy_reader import CopyReader, ReceivedBytes
from ingestd.postgres.wal.decoding_memory import raise_decoding_memory
from ingestd.postgres.wal.server import refuse_other
from ingestd.postgres.wal.slots.slot import vanished_slot

STATUS_INTERVAL_S = 10.0
_GLANCE_S = 0.2
"""The interval at which to check whether the reply has arrived."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How long to wait for more input once some has arrived, and at how much reading stops.

    A change of more than `row_limit_bytes` arrives shortened (`decode.pgoutput.shortening`).
    `liveness`: another policy than the default.
    """

    limit_bytes: int
    linger_s: float = 0.05
    status_interval_s: float = STATUS_INTERVAL_S
    row_limit_bytes: int = UNLIMITED_BYTES
    liveness: LivenessPolicy | None = None


class ReplicationStream:
    """A running START_REPLICATION. Created by `open_stream`; always `close` it.

    It reports nothing to the server before `begin_reporting`. If the slot was moved meanwhile, the
    first status makes older servers move it back (16.2 does, 16.14 does not), and the skipped
    changes could no longer be detected.
    """

    def __init__(
        self,
        connection: LivenessCheckedConnection,
        reader: CopyReader,
        where: str,
        limits: StreamLimits,
    ) -> None:
        self._connection = connection
        self._reader = reader
        self._where = where
        self._limits = limits
        self._nbytes = 0
        self._is_full = False
        self._ready = asyncio.Event()
        self._room = asyncio.Event()
        self._received = self._confirmed = ZERO
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def encoding(self) -> Encoding | None:
        """The encoding of the texts; None for UTF-8."""
        return sent_encoding(self._connection)

    async def start(
        self,
        slot: str,
        publication: str,
        after: Lsn,
        confirmed: Lsn,
        *,
        streams_in_progress: bool = False,
        messages: bool = False,
    ) -> None:
        """Send the command and start to read."""
        protocol = (
            "proto_version '2', streaming 'on'" if streams_in_progress else "proto_version '1'"
        )
        protocol += ", messages 'true'" if messages else ""
        command = sql.SQL("START_REPLICATION SLOT {} LOGICAL {} ({}, publication_names {})").format(
            sql.Identifier(slot),
            sql.SQL(str(after)),
            sql.SQL(protocol),
            sql.Literal(_quoted_name(publication)),
        )
        with self._errors(), self._connection.expecting():
            await self._reader.start(query_bytes(self._connection, command))
        self._confirmed, self._received = confirmed, after
        self._tasks = [asyncio.create_task(self._read_messages())]

    def begin_reporting(self) -> None:
        """Start to report the position to the server, and to check that it still answers."""
        self._tasks += [asyncio.create_task(each) for each in (self._report(), self._watch())]

    async def receive(self) -> ReceivedBytes:
        """Return what has been collected; wait for the first. Raises what ended the stream."""
        while (collected := await self._receive_next()) is None:
            pass
        return collected

    async def _receive_next(self) -> ReceivedBytes | None:
        waiter = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait([waiter, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
        collected = self._reader.read_nowait()
        if collected is None:
            for task in self._tasks:
                if task.done():
                    task.result()
        self._nbytes = 0
        self._ready.clear()
        self._room.set()
        return collected

    def fault(self, ended: psycopg.Error) -> IngestdError:
        """Return the error for the server's end of the stream."""
        return classify(ended, self._where)

    def set_received(self, position: Lsn) -> None:
        """Record how far the stream has been read, for the next status update."""
        self._received = max(self._received, position)

    async def report_durable(self, position: Lsn) -> None:
        """Report to the server that everything below `position` is durable."""
        self._confirmed = max(self._confirmed, position)
        self.set_received(position)
        await self.send_status()

    async def send_status(self, *, reply: bool = False) -> None:
        """Send a standby status update now; `reply`: ask the server to answer."""
        now_us = time.time_ns() // 1000
        with self._errors():
            await self._reader.send(
                standby_status(
                    self._received, self._confirmed, self._confirmed, now_us, reply=reply
                )
            )

    async def close(self) -> None:
        """End the stream, even if cancelled meanwhile. The server then frees the slot."""
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            try:
                await self._reader.close()
            finally:
                await self._connection.close()

    async def _read_messages(self) -> None:
        while True:
            with self._errors():
                nbytes = await self._reader.collect(self._limits.linger_s)
            if nbytes:
                self._nbytes += nbytes
                self._ready.set()
            if self._nbytes >= self._limits.limit_bytes:
                self._room.clear()
                self._is_full = True
                await self._room.wait()
                self._reader.heard_s = time.monotonic()
                self._is_full = False

    async def _report(self) -> None:
        while True:
            await self.send_status()
            await asyncio.sleep(self._limits.status_interval_s)

    async def _watch(self) -> None:
        ask_after_s = self._connection.liveness.ask_after_s
        while True:
            await asyncio.sleep(max(_GLANCE_S, ask_after_s - self._silent_s()))
            if self._silent_s() < ask_after_s:
                continue
            await self.send_status(reply=True)
            with self._errors(), self._connection.expecting():
                while self._silent_s() >= ask_after_s and not self._connection.why_lost:  # noqa: ASYNC110
                    await asyncio.sleep(_GLANCE_S)

    def _silent_s(self) -> float:
        """Return the seconds without input while the stream was read."""
        return 0.0 if self._is_full else time.monotonic() - self._reader.heard_s

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise classify(error, self._where) from error
        except (EOFError, OSError) as error:
            why = self._connection.why_lost or lost(error)
            raise TransientError(f"{self._where}: {why}", reason="connection_lost") from error


async def open_stream(
    dsn: str,
    slot: str,
    publication: str,
    after: Lsn,
    confirmed: Lsn,
    *,
    queried_id: str,
    streams_in_progress: bool = False,
    messages: bool = False,
    where: str,
    limits: StreamLimits,
) -> ReplicationStream:
    """Connect and start to stream transactions with commit_lsn >= `after`.

    `confirmed` is reported in the first status update: a durable position, not above `after`.
    `streams_in_progress`: large transactions must be sent while they are open
    (`decode.pgoutput.streamed_transactions`). `messages`: include logical messages. `queried_id`:
    see `refuse_other`. Raises TransientError (the slot is active for another pid, the server is
    unreachable), OperatorError.
    """
    await reach_async("capture.stream_begin.before")
    try:
        connection = await connect(dsn, replication=True, claim=slot, liveness=limits.liveness)
    except psycopg.Error as error:
        raise classify(error, where, dsn) from error
    try:
        await refuse_other(connection, queried_id)
        await read_bytes_as_they_are(connection)
        if not streams_in_progress:  # else what exceeds the memory is sent while it is open
            await raise_decoding_memory(connection)
        reader = CopyReader(
            await Channels(connection).open(),
            limit_bytes=change_limit_bytes(limits.row_limit_bytes),
            shortener=lambda: StreamedChange(kept_bytes(limits.row_limit_bytes)),
        )
        stream = ReplicationStream(connection, reader, where, limits)
    except psycopg.Error as error:
        await connection.close()
        raise classify(error, where) from error
    except BaseException:
        await connection.close()
        raise
    try:
        try:
            await stream.start(
                slot,
                publication,
                after,
                confirmed,
                streams_in_progress=streams_in_progress,
                messages=messages,
            )
        except OperatorError as error:
            if isinstance(error.__cause__, psycopg.errors.UndefinedObject):
                raise vanished_slot(slot) from error
            raise
        await reach_async("capture.stream_begin.after")
    except BaseException:
        await stream.close()
        raise
    return stream


def _quoted_name(publication: str) -> str:
    # publication_names is a list of identifiers, which the server unquotes.
    return sql.Identifier(publication).as_string(None)
