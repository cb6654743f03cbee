"""The messages of a replication stream: those in CopyData, and pgoutput's in their data.

Source: PostgreSQL documentation, "Streaming Replication Protocol": XLogData ('w'), Primary
keepalive message ('k'), Standby status update ('r'); "Logical Replication Message Formats": Begin,
Commit, Message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingestd.decode.pgoutput.shortening import SHORTENED
from ingestd.decode.values.encodings import Encoding
from ingestd.decode.values.text_column import ByteBuffer, TextColumn
from ingestd.model.errors import ProtocolError
from ingestd.model.lsn import Lsn

# --- in CopyData -------------------------------------------------------------------------------

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


# --- in their data: a feed's messages as arrays --------------------------------------------------

Ints = NDArray[np.int64]

BEGIN, COMMIT, RELATION, TRUNCATE, ORIGIN = (ord(c) for c in "BCRTO")
INSERT, UPDATE, DELETE = (ord(c) for c in "IUD")
MESSAGE = ord("M")
TYPE = ord("Y")

LENGTHS = {BEGIN: 21, COMMIT: 26}
"""The fixed length of these message types, including the type byte."""
_LEAST_LENGTHS = LENGTHS | {
    RELATION: 10,
    TRUNCATE: 6,
    INSERT: 8,
    UPDATE: 8,
    DELETE: 8,
    TYPE: 7,
    ORIGIN: 10,
    MESSAGE: 1,
    SHORTENED: 5,
    ord("A"): 9,  # Stream Abort: PostgreSQL 18 sends it for unsent transactions; ignored
}
_least = np.full(256, np.iinfo(np.int64).max)
for _type, _length in _LEAST_LENGTHS.items():
    _least[_type] = _length

SPARSE = 4

IS_CHANGE = np.zeros(256, np.bool_)
"""By type byte: whether the message is a change of one row."""
IS_CHANGE[[INSERT, UPDATE, DELETE]] = True

_FIRST_US = -62_135_596_800_000_000
_END_US = 253_402_300_800_000_000
"""Years 1 to 9999 in us since 1970: the range of a raw table's timestamps."""


@dataclass(frozen=True, slots=True)
class Messages:
    """Complete messages in one buffer: `starts` to `ends`, with `types` (the first byte of each).

    `heads`: the first eight bytes of each as a number. `sparse`: messages that take less than one
    part in so many of their buffer are better copied together.
    """

    source: ByteBuffer
    starts: Ints
    ends: Ints
    types: NDArray[np.uint8]
    heads: Ints
    sparse: int = SPARSE

    @property
    def oids(self) -> Ints:
        """The relation's OID, in RELATION messages and changes; undefined in others."""
        return oids_of(self.heads)

    def __len__(self) -> int:
        return len(self.starts)

    def only(self, at: Ints, *, may_copy: bool = True) -> Messages:
        """Return these messages (ascending).

        If most of the buffer lies between them, they are copied without it: Arrow's `take` reserves
        memory by it for each column, so the few values of each of many tables would be far apart,
        on separate pages. Never if `may_copy` is False: all messages then share one source.
        """
        starts, ends = self.starts[at], self.ends[at]
        source, lengths = self.source, ends - starts
        if may_copy and 0 < self.sparse * int(lengths.sum()) < len(source.buffer):
            content = TextColumn(source, starts, lengths).gather().buffers()[2].to_pybytes()
            source = ByteBuffer(content, source.encoding)
            ends = np.cumsum(lengths)
            starts = ends - lengths
        return Messages(source, starts, ends, self.types[at], self.heads[at], self.sparse)

    def nbytes(self, at: Ints) -> int:
        """Return the total size of these messages in bytes."""
        return int((self.ends[at] - self.starts[at]).sum())

    def content(self, index: int) -> bytes:
        """Return one message, including the type byte."""
        return self.source.buffer[int(self.starts[index]) : int(self.ends[index])]


def oids_of(heads: Ints) -> Ints:
    """Return the OIDs in `Messages.heads`; see `Messages.oids`."""
    return heads >> 24 & 0xFFFFFFFF


def read_messages(
    buffer: bytes,
    starts: Ints,
    ends: Ints,
    encoding: Encoding | None = None,
    *,
    sparse: int = SPARSE,
) -> Messages:
    """Check that these are messages of known types. Raises ProtocolError."""
    source = ByteBuffer(buffer, encoding)
    heads = source.int64_at(starts)
    types = (heads >> 56).astype(np.uint8)
    least, lengths = _least.take(types), ends - starts
    short = lengths < least
    short |= ((types == BEGIN) | (types == COMMIT)) & (lengths != least)
    if short.any():
        i = int(short.argmax())
        msg = f"unknown or malformed message {bytes(types[i : i + 1])!r} of {lengths[i]} bytes"
        raise ProtocolError(msg)
    return Messages(source, starts, ends, types, heads, sparse)


@dataclass(frozen=True, slots=True)
class Transaction:
    """The contents of a Begin; `commit_time` in us since 1970. `changes`: captured ones so far.

    `is_replicated`: it has a replication origin, which set the commit time.
    """

    commit_lsn: int
    commit_time: int
    xid: int
    changes: int = 0
    is_replicated: bool = False


@dataclass(frozen=True, slots=True)
class Transactions:
    """The transactions of a feed, in order; item 0 is the one open before it (zeros if none).

    `of`: the item of each message. `ended`: the items that end here, with `end_lsns`. `begun`: the
    message that begins each item from 1 on. `are_replicated`: see `Transaction`.
    """

    commit_lsns: Ints
    commit_times: Ints
    xids: Ints
    of: Ints
    begun: Ints
    ended: Ints
    end_lsns: Ints
    ends_in_transaction: bool
    are_replicated: NDArray[np.bool_]

    def commit_of(self, message: int) -> tuple[Lsn, int]:
        """Return the commit position and the id of a message's transaction."""
        item = self.of[message]
        return Lsn(int(self.commit_lsns[item])), int(self.xids[item])


def read_transactions(messages: Messages, carried: Transaction | None) -> Transactions:
    """Find the transactions; `carried` is open before the first message. Raises ProtocolError."""
    types, source, starts = messages.types, messages.source, messages.starts
    is_begin, is_commit = types == BEGIN, types == COMMIT
    steps = is_begin.view(np.int8) - is_commit.view(np.int8)
    depth = np.cumsum(steps, dtype=np.int8) + np.int8(carried is not None)  # by one at a time
    if ((depth < 0) | (depth > 1)).any():
        msg = "Begin inside a transaction, or Commit outside of one"
        raise ProtocolError(msg)
    if ((IS_CHANGE.take(types) | (types == TRUNCATE)) & (depth == 0)).any():
        msg = "change outside a transaction"
        raise ProtocolError(msg)
    begun, committed = np.flatnonzero(is_begin), np.flatnonzero(is_commit)
    before = carried or Transaction(0, 0, 0)
    b = starts[begun]
    commit_lsns = np.append([before.commit_lsn], source.int64_at(b + 1))
    bounds = np.concatenate(([0], begun, [len(types)]))
    of = np.repeat(np.arange(len(begun) + 1), np.diff(bounds))
    c, ended = starts[committed], of[committed]
    are_replicated = np.zeros(len(commit_lsns), np.bool_)
    are_replicated[0] = before.is_replicated
    are_replicated[of[np.flatnonzero(types == ORIGIN)]] = True
    found = Transactions(
        commit_lsns,
        np.append([before.commit_time], _unix_times(source.int64_at(b + 9))),
        np.append([before.xid], source.int32_at(b + 17) & 0xFFFFFFFF),
        of,
        begun,
        ended,
        source.int64_at(c + 10),
        ends_in_transaction=bool(depth[-1]),
        are_replicated=are_replicated,
    )
    _check_positions(found, source.int64_at(c + 2))
    return found


def _unix_times(times: Ints) -> Ints:
    """Convert us since 2000 to us since 1970, clipped to the range of a raw table.

    A client that replays transactions may set their times to any timestamptz, even infinity.
    """
    first, last = _FIRST_US - POSTGRES_EPOCH_US, _END_US - 1 - POSTGRES_EPOCH_US
    return np.clip(times, first, last) + POSTGRES_EPOCH_US


def _check_positions(transactions: Transactions, commit_lsns: Ints) -> None:
    lsns = transactions.commit_lsns
    if (lsns < 0).any() or (transactions.end_lsns < 0).any():
        msg = "position beyond what a raw table can hold"
        raise ProtocolError(msg)
    if (commit_lsns != lsns[transactions.ended]).any() or (
        transactions.end_lsns < commit_lsns
    ).any():
        msg = "Commit does not match its Begin"
        raise ProtocolError(msg)
    if (np.diff(lsns) <= 0).any():
        msg = "transactions not in commit order"
        raise ProtocolError(msg)


# --- logical messages, which any role may write with pg_logical_emit_message, with any content ---

OWN_PREFIX = b"ingestd\0"
"""The prefix of messages that only make the WAL grow."""
DDL_PREFIX = b"ingestd.ddl\0"
MOST_DDL_BYTES = 1 << 20
"""A larger message with the prefix was not written by ingestd's triggers."""

ReportMessage = Callable[[bytes, Lsn, int], bool]
"""Called with the content of a message with the prefix `ingestd.ddl`, its transaction's commit
position, and the transaction's id. Returns whether the content is valid."""

_HEAD = struct.Struct(">cBQ")
_LENGTH = struct.Struct(">i")
_TRANSACTIONAL = 1


def report_messages(messages: Messages, transactions: Transactions, report: ReportMessage) -> int:
    """Pass on the DDL messages, in order. Return the number of other messages.

    Any content is valid, because any role may write messages. Only messages passed on are copied.
    """
    ignored = 0
    for i in np.flatnonzero(messages.types == MESSAGE).tolist():
        start, end = int(messages.starts[i]), int(messages.ends[i])
        at = start + _HEAD.size
        head = messages.source.buffer[start : at + len(DDL_PREFIX)]
        if head[_HEAD.size :].startswith(OWN_PREFIX):
            continue
        content = at + len(DDL_PREFIX) + _LENGTH.size
        is_ours = head.endswith(DDL_PREFIX) and content <= end <= content + MOST_DDL_BYTES
        if not (is_ours and head[1] & _TRANSACTIONAL):
            ignored += 1
            continue
        lsn, xid = transactions.commit_of(i)
        ignored += not report(messages.source.buffer[content:end], lsn, xid)
    return ignored
