"""A block of the stream, decoded a few change sets at a time, in a thread."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import psycopg
from numpy.typing import NDArray

from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.decode.pgoutput.messages import split_frames
from ingestd.decode.pgoutput.streamed_transactions import StreamedTransactions
from ingestd.failpoints import lost, reach
from ingestd.model.changes import ChangeSet
from ingestd.model.lsn import Lsn
from ingestd.postgres.transport.copy_reader import ReceivedBytes

GIVEN_BYTES = 16 << 20
"""A buffered transaction may be of any size: this much of it is decoded at a time."""


class BlockDecoder:
    """One block's change sets.

    Set by the first `decode_some`: `reply_requested`, the server waits for a reply; `ended`, the
    error with which it ended the stream after these change sets.
    """

    def __init__(
        self, decoder: PgoutputDecoder, reordering: StreamedTransactions, collected: ReceivedBytes
    ) -> None:
        self._decoder = decoder
        self._change_sets = self._decode(reordering, collected)
        self.reply_requested = False
        self.ended: psycopg.Error | None = None
        self.is_done = False

    def decode_some(self) -> list[ChangeSet]:
        """Return the next change sets, up to about `GIVEN_BYTES`. Raises ProtocolError."""
        found, nbytes = [], 0
        for change_set in self._change_sets:
            found.append(change_set)
            nbytes += change_set.nbytes
            if nbytes >= GIVEN_BYTES:
                return found
        self.is_done = True
        return found

    def _decode(
        self, reordering: StreamedTransactions, collected: ReceivedBytes
    ) -> Iterator[ChangeSet]:
        block = collected.block()
        self.ended = block.ended
        frames = split_frames(block.buffer, block.starts, block.ends)
        self.reply_requested = frames.reply_requested
        for buffer, starts, ends in reordering.feed(block.buffer, frames.starts, frames.ends):
            yield from timed_feed(self._decoder, buffer, starts, ends)
        if frames.keepalive is not None:
            idle = self._decoder.idle(Lsn(frames.keepalive))
            if idle is not None:
                yield idle


def timed_feed(
    decoder: PgoutputDecoder,
    buffer: bytes | memoryview,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> list[ChangeSet]:
    """Decode; record in the first change set how long it took."""
    reach("capture.decode.before", lost)
    began = time.perf_counter()
    change_sets = decoder.feed(buffer, starts, ends)
    if change_sets:
        change_sets[0] = replace(change_sets[0], decode_s=time.perf_counter() - began)
    reach("capture.decode.after", lost)
    return change_sets
