"""Logical messages: which are reported, with their transaction, and that no content is an error."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.decode.pgoutput.messages import MOST_DDL_BYTES
from ingestd.decode.pgoutput.streamed_transactions import count_before, without_xids
from ingestd.model.lsn import Lsn
from tests.unit.decode import pgoutput

DDL = b"ingestd.ddl"


def message(prefix: bytes, content: bytes, *, flags: int = 1) -> bytes:
    head = struct.pack(">cBQ", b"M", flags, 5)
    return head + prefix + b"\0" + struct.pack(">i", len(content)) + content


FOREIGN = [
    message(b"other", b"{}"),
    message(DDL, b"{}", flags=0),
    message(DDL + b"2", b"{}"),
    message(b"", b""),
    message(DDL, bytes(MOST_DDL_BYTES + 1)),
    message(DDL, b"refused"),
    b"M",
    b"M\1" + bytes(3),
    b"M\1" + bytes(8) + b"no end",
    b"M\1" + bytes(8) + DDL + b"\0",
]


@pytest.mark.parametrize("hold_bytes", [0, 1 << 20])
def test_own_messages_are_reported_and_others_counted(hold_bytes: int) -> None:
    told: list[tuple[bytes, Lsn, int]] = []

    def report(content: bytes, lsn: Lsn, xid: int) -> bool:
        told.append((content, lsn, xid))
        return content != b"refused"

    decoder = PgoutputDecoder(lambda _: None, report_message=report, hold_bytes=hold_bytes)
    ours, own = message(DDL, b'{"v": 1}'), message(b"ingestd", b"")
    stream = [
        message(b"other", b"", flags=0),
        pgoutput.begin(100, xid=41), own, ours, *FOREIGN, ours, pgoutput.commit(100, 110),
        pgoutput.begin(200, xid=42), ours, pgoutput.commit(200, 210),
    ]  # fmt: skip
    ignored = 0
    for each in stream:
        ignored += sum(c.ignored_messages for c in decoder.feed(*pgoutput.laid_out([each])))
    assert ignored == len(FOREIGN) + 1
    assert [t for t in told if t[0] != b"refused"] == [
        (b'{"v": 1}', 100, 41), (b'{"v": 1}', 100, 41), (b'{"v": 1}', 200, 42),
    ]  # fmt: skip
    assert decoder.position == 210


def test_in_a_segment_it_has_the_xid_of_the_preceding_message() -> None:
    """Pgoutput gives it the top-level id: that would keep what was rolled back before it."""

    def segment(*parts: tuple[bytes, int]) -> list[int]:
        messages = [m[:1] + struct.pack(">I", xid) + m[1:] for m, xid in parts]
        buffer, starts, ends = pgoutput.laid_out(messages)
        types = np.frombuffer(buffer, np.uint8)[starts]
        found = without_xids(buffer, starts, ends, types, 0, last=None)
        return [int(x) for x in found.xids]

    row, logical = pgoutput.insert(1, [b"1"]), message(DDL, b"{}")
    xids = segment((logical, 10), (row, 10), (row, 11), (logical, 10), (row, 11))
    assert xids == [10, 10, 11, 11, 11]
    assert count_before(np.array(xids, np.uint32), 11) == 2
