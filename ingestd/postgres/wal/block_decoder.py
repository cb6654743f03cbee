"""A block of the stream, decoded a few chunks at a time, in a thread."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg

from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.decode.pgoutput.frames import split_frames
from ingestd.decode.pgoutput.streamed_transactions import StreamedTransactions
from ingestd.model.changes import Chunk
from ingestd.model.lsn import Lsn
from ingestd.postgres.transport.copy_reader import ReceivedBytes
from ingestd.postgres.wal.drain.drain import timed_feed

GIVEN_BYTES = 16 << 20
"""A buffered transaction may be of any size: this much of it is decoded at a time."""


class BlockDecoder:
    """One block's chunks.

    Set by the first `some`: `reply_requested`, the server waits for a reply; `ended`, the error
    with which it ended the stream after these chunks.
    """

    def __init__(
        self, decoder: PgoutputDecoder, order: StreamedTransactions, collected: ReceivedBytes
    ) -> None:
        self._decoder = decoder
        self._chunks = self._decode(order, collected)
        self.reply_requested = False
        self.ended: psycopg.Error | None = None
        self.is_done = False

    def some(self) -> list[Chunk]:
        """Return the next chunks, up to about `GIVEN_BYTES`. Raises ProtocolError."""
        found, nbytes = [], 0
        for chunk in self._chunks:
            found.append(chunk)
            nbytes += chunk.nbytes
            if nbytes >= GIVEN_BYTES:
                return found
        self.is_done = True
        return found

    def _decode(self, order: StreamedTransactions, collected: ReceivedBytes) -> Iterator[Chunk]:
        block = collected.block()
        self.ended = block.ended
        frames = split_frames(block.buffer, block.starts, block.ends)
        self.reply_requested = frames.reply_requested
        for buffer, starts, ends in order.feed(block.buffer, frames.starts, frames.ends):
            yield from timed_feed(self._decoder, buffer, starts, ends)
        if frames.keepalive is not None:
            idle = self._decoder.idle(Lsn(frames.keepalive))
            if idle is not None:
                yield idle
