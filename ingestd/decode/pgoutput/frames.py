"""Messages of the streaming replication protocol inside CopyData.

Source: PostgreSQL documentation, "Streaming Replication Protocol": XLogData ('w'), Primary
keepalive message ('k'), Standby status update ('r').
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingestd.model.errors import ProtocolError
from ingestd.model.lsn import Lsn

POSTGRES_EPOCH_US = 946_684_800_000_000
"""2000-01-01 UTC, the epoch of Postgres timestamps, in us since 1970."""

_XLOG_DATA, _KEEPALIVE = ord("w"), ord("k")
_XLOG_DATA_HEADER = 25
_KEEPALIVE_LENGTH = 18
_KEEPALIVE_BODY = struct.Struct(">QqB")
_STATUS = struct.Struct(">cQQQqB")


@dataclass(frozen=True, slots=True)
class Frames:
    """The contents of a block of CopyData messages.

    `starts`, `ends` (int64): each XLogData's payload in the buffer. `keepalive`: the highest
    position in a keepalive after the last data, so that nothing captured precedes it; None if there
    is none. `reply_requested`: the server waits for a status update.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    keepalive: int | None
    reply_requested: bool


def split_frames(buffer: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Frames:
    """Locate the data in CopyData messages, which ascend in `buffer`. Raises ProtocolError."""
    if len(ends) == 0:
        return Frames(ends, ends, None, reply_requested=False)
    lengths = ends - starts
    if lengths.min() <= 0 or starts[0] < 0 or ends[-1] > len(buffer):
        msg = "CopyData messages empty or outside their buffer"
        raise ProtocolError(msg)
    kinds = np.frombuffer(buffer, np.uint8)[starts]
    is_data = kinds == _XLOG_DATA
    if (lengths[is_data] < _XLOG_DATA_HEADER).any():
        msg = "XLogData message without its header"
        raise ProtocolError(msg)
    others = np.flatnonzero(~is_data)
    last_data = len(kinds) - 1 - int(is_data[::-1].argmax()) if is_data.any() else -1
    idle, asked = None, False
    for i in others.tolist():  # keepalives are seconds apart
        wal_end, wants_reply = _keepalive(buffer[int(starts[i]) : int(ends[i])])
        asked |= wants_reply
        if i > last_data:
            idle = max(wal_end, idle or 0)
    if len(others):
        starts, ends = starts[is_data], ends[is_data]
    return Frames(starts + _XLOG_DATA_HEADER, ends, idle, reply_requested=asked)


def _keepalive(message: bytes) -> tuple[int, bool]:
    if message[0] != _KEEPALIVE or len(message) != _KEEPALIVE_LENGTH:
        msg = f"unknown replication message {message[:1]!r} of {len(message)} bytes"
        raise ProtocolError(msg)
    wal_end, _, reply = _KEEPALIVE_BODY.unpack_from(message, 1)
    if wal_end >= 1 << 63:
        msg = f"position {wal_end:#x} beyond what a raw table can hold"
        raise ProtocolError(msg)
    return wal_end, bool(reply)


def standby_status(received: Lsn, flushed: Lsn, applied: Lsn, now_us: int, *, reply: bool) -> bytes:
    """Build a status update. `now_us`: us since 1970; `reply`: request an immediate keepalive."""
    return _STATUS.pack(b"r", received, flushed, applied, now_us - POSTGRES_EPOCH_US, reply)
