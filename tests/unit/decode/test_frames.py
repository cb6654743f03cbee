"""CopyData of a replication connection."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ingestd.decode.pgoutput.messages import Frames, split_frames, standby_status
from ingestd.model.errors import ProtocolError
from ingestd.model.lsn import Lsn


def data(payload: bytes) -> bytes:
    return struct.pack(">cQQq", b"w", 1, 2, 3) + payload


def keepalive(wal_end: int, *, reply: bool = False) -> bytes:
    return struct.pack(">cQqB", b"k", wal_end, 0, reply)


def split(*messages: bytes) -> tuple[Frames, list[bytes]]:
    buffer = b"".join(messages)
    bounds = np.cumsum([0, *map(len, messages)])
    frames = split_frames(buffer, bounds[:-1], bounds[1:])
    ranges = zip(frames.starts.tolist(), frames.ends.tolist(), strict=True)
    return frames, [buffer[s:e] for s, e in ranges]


def test_payloads_without_headers() -> None:
    frames, payloads = split(data(b"one"), keepalive(9, reply=True), data(b"w"), data(b"k2"))
    assert payloads == [b"one", b"w", b"k2"]
    assert frames.reply_requested


def test_idle_advances_only_by_a_keepalive_after_the_last_data() -> None:
    assert split(keepalive(9), data(b"x"))[0].keepalive is None
    assert split(data(b"x"), keepalive(9))[0].keepalive == 9
    assert split(keepalive(8), keepalive(9))[0].keepalive == 9
    assert split()[0].keepalive is None


@pytest.mark.parametrize(
    "message", [b"x" * 30, data(b"")[:24], keepalive(1) + b"x", b"k", keepalive(1 << 63)]
)
def test_unknown_messages_are_refused(message: bytes) -> None:
    with pytest.raises(ProtocolError):
        split(data(b"x"), message)


def test_messages_lie_inside_the_buffer() -> None:
    with pytest.raises(ProtocolError):
        split_frames(data(b"x"), np.array([0]), np.array([27]))
    with pytest.raises(ProtocolError):
        split_frames(data(b"x"), np.array([0, 26]), np.array([26, 26]))
    with pytest.raises(ProtocolError):
        split_frames(data(b"x"), np.array([-1]), np.array([26]))


def test_standby_status_counts_from_2000() -> None:
    message = standby_status(Lsn(3), Lsn(2), Lsn(1), 946_684_800_000_005, reply=True)
    assert struct.unpack(">cQQQqB", message) == (b"r", 3, 2, 1, 5, 1)
