"""Reordering, into commit order, of transactions that are sent before they commit.

Source: PostgreSQL documentation, "Logical Replication Message Formats" (protocol version 2: Stream
Start, Stop, Commit, Abort) and "Logical Streaming Replication Protocol"; pgoutput.c,
maybe_send_schema and cleanup_rel_sync_cache, for the meaning of RELATION messages.

With `streaming 'on'` the server sends segments of open transactions once they exceed
logical_decoding_work_mem. A change's row needs the commit's LSN, so the segments wait in a `Spool`
until Stream Commit; then they are returned as an ordinary transaction: Begin, messages, Commit. The
output of `StreamedTransactions` is what the slot would have sent without streaming, so the decoder
needs no knowledge of it. States::

    outside --Stream Start--> in a segment of xid --Stream Stop--> outside
    transaction: absent --first segment--> open --Stream Commit--> given, absent
                                           open --Stream Abort of itself--> absent

**No position moves here.** An open transaction commits above the position of any keepalive: its
commit record follows everything that the server has read. So a keepalive's position may be
confirmed while one is open: the slot sends the transaction again to the next client that streams
from there. The spool is not durable state.

**Sub-transactions.** In a segment each message carries the id of its sub-transaction. Ids are
assigned in the order in which sub-transactions first write, a parent's before its children's. From
then until it ends, a session writes only under it or its descendants. So at Stream Abort of
`subxid` everything to undo is at the end of the spool: the messages after the last one with an
earlier id. (If a descendant's abort is sent first, and an ancestor's message follows in the spool,
nothing is dropped yet: the same abort record also names the ancestor, whose abort comes next.) A
subscriber does the same with offsets.

**Logical messages.** Only they carry the id of the top-level transaction (pgoutput_message). Each
is attributed to the sub-transaction that wrote before it, so that it does not prevent the undoing
of earlier messages. One at the start of a sub-transaction may remain when that is undone.

**RELATION messages.** The server tracks for each relation whether it has sent the definition,
separately for each streamed transaction. There it sends it again before the first change, after the
abort of any sub-transaction (the message may be undone, or may describe DDL that is undone), and
whenever the relation may have changed. So an open transaction's messages include every definition
they need, in place. At its commit the server also considers the relation as sent to ordinary
transactions, unless it may have changed in between. So the definition that holds afterwards is the
newest *as sent*, not the last of the transaction. If another transaction has sent a newer one
since, that message is repeated at the end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ingestd.decode.pgoutput.messages import MESSAGE, RELATION, Ints
from ingestd.decode.pgoutput.shortening import SHORTENED
from ingestd.model.errors import ProtocolError

START, STOP, STREAM_COMMIT, ABORT = (ord(c) for c in "SEcA")
ORIGIN = ord("O")
IS_CONTROL = np.zeros(256, np.bool_)
"""Whether a message of this type controls segments, rather than being inside or outside one."""
IS_CONTROL[[START, STOP, STREAM_COMMIT, ABORT]] = True
_HAS_XID = np.zeros(256, np.bool_)
_HAS_XID[[*(ord(c) for c in "RYIUDTM"), SHORTENED]] = True
_XID_BYTES = 4
MOST_OPEN = 1 << 17
"""Limit for open transactions with segments: no server has so many sessions in use."""
_MOST_ORIGIN_BYTES = 1 << 10
"""Source: MAX_RONAME_LEN (src/include/replication/origin.h), 512."""

START_FORM = struct.Struct(">cIB")
COMMIT_FORM = struct.Struct(">cIBQQq")
ABORT_FORM = struct.Struct(">cII")
_RELATION_OID = struct.Struct(">I")
_ORDINARY_BEGIN = struct.Struct(">cQqI")
_ORDINARY_COMMIT = struct.Struct(">cBQQq")

MessageRun = tuple[bytes | memoryview, Ints, Ints]
"""A buffer and the starts and ends of its messages: the arguments of `PgoutputDecoder.feed`."""
Xids = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class OpenMessages:
    """Messages of one open transaction, in the format that they have outside of a segment.

    `xids`: the sub-transaction of each. `number`: of the first, among all messages sent.
    """

    buffer: bytes | memoryview
    starts: Ints
    ends: Ints
    xids: Xids
    number: int

    def __len__(self) -> int:
        return len(self.starts)

    def first(self, count: int) -> OpenMessages:
        """Return the first `count` of them, at least one; no memory of the others is kept."""
        ends = self.ends[:count]
        buffer = bytes(self.buffer[: int(ends[-1])])
        return OpenMessages(buffer, self.starts[:count], ends, self.xids[:count], self.number)

    def relations(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield each RELATION message: the relation's OID, the message's number, the message."""
        types = np.frombuffer(self.buffer, np.uint8)[self.starts]
        for i in np.flatnonzero(types == RELATION).tolist():
            message = bytes(self.buffer[int(self.starts[i]) : int(self.ends[i])])
            yield relation_oid(message), self.number + i, message


class Spool(Protocol):
    """The buffer of open transactions. All arguments `xid` are top-level."""

    def append_messages(self, xid: int, messages: OpenMessages) -> None:
        """Append messages that follow those appended before."""

    def abort(self, xid: int, subxid: int) -> None:
        """Drop what the abort of a sub-transaction undoes (`count_before`); possibly nothing."""

    def drop(self, xid: int) -> None:
        """Drop all messages of a transaction; there may be none."""

    def pop_transaction(self, xid: int) -> Iterator[OpenMessages]:
        """Yield the messages of a transaction, in order, and drop them."""


def is_from(xids: Xids, subxid: int) -> NDArray[np.bool_]:
    """Return a mask of the ids that are `subxid` or were assigned after it."""
    return (xids - np.uint32(subxid)) < np.uint32(1 << 31)


def count_before(xids: Xids, subxid: int) -> int:
    """Return how many messages stay if `subxid` aborts: up to the last with an earlier id."""
    earlier = np.flatnonzero(~is_from(xids, subxid))
    return int(earlier[-1]) + 1 if len(earlier) else 0


LastRelations = dict[int, tuple[int, bytes]]
"""By the relation's OID: the number of its last RELATION message, and the message."""


class NewestRelations:
    """The definitions that hold after the commit of a streamed transaction."""

    def __init__(self) -> None:
        self._newest: LastRelations = {}

    def record(self, oid: int, number: int, message: bytes) -> None:
        """Record a RELATION message sent outside of segments while a transaction is open."""
        self._newest[oid] = (number, message)

    def committed(self, relations: LastRelations) -> list[bytes]:
        """Return the newer messages to repeat at the end of a transaction that sent these."""
        newer = []
        for oid, last in relations.items():
            newest = max(last, self._newest.get(oid, last))
            self._newest[oid] = newest
            if newest is not last:
                newer.append(newest[1])
        return newer

    def clear(self) -> None:
        """Record that no transaction is open any more."""
        self._newest.clear()


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """The message at the end of a streamed transaction."""

    xid: int
    flags: int
    lsn: int
    end_lsn: int
    time: int

    @classmethod
    def read(cls, message: bytes) -> StreamCommit:
        """Parse the message. Raises struct.error."""
        _, *fields = COMMIT_FORM.unpack(message)
        return cls(*fields)

    def begin_messages(self, *origin: bytes) -> MessageRun:
        """Return the Begin of the ordinary format, and the ORIGIN message if there is one."""
        return _joined(_ORDINARY_BEGIN.pack(b"B", self.lsn, self.time, self.xid), *origin)

    def commit_messages(self, newer: Sequence[bytes]) -> MessageRun:
        """Return the RELATION messages to repeat, and the Commit of the ordinary format."""
        last = _ORDINARY_COMMIT.pack(b"C", self.flags, self.lsn, self.end_lsn, self.time)
        return _joined(*newer, last)


class StreamedTransactions:
    """Processes one stream from its start. Not thread-safe; unusable after a ProtocolError."""

    def __init__(self, spool: Spool, *, most_open: int = MOST_OPEN) -> None:
        self._spool = spool
        self._most_open = most_open
        self._segment: int | None = None
        self._open: set[int] = set()
        self._last: dict[int, int] = {}
        self._origins: dict[int, bytes] = {}
        self._sent = 0
        self._newest = NewestRelations()

    @property
    def has_open(self) -> bool:
        """Return whether a partly sent transaction is open."""
        return bool(self._open)

    def feed(self, buffer: bytes, starts: Ints, ends: Ints) -> Iterator[MessageRun]:
        """Consume complete messages, yield those that are due: none, these, or far more than these.

        Exhaust the iterator before the next call. Raises ProtocolError.
        """
        if len(starts) == 0:
            return
        if int(starts[0]) < 0 or int(ends[-1]) > len(buffer) or (starts >= ends).any():
            msg = "messages empty or outside their buffer"
            raise ProtocolError(msg)
        types = np.frombuffer(buffer, np.uint8)[starts]
        at = 0
        for i in np.flatnonzero(IS_CONTROL[types]).tolist():
            yield from self._reorder_segment(buffer, starts[at:i], ends[at:i], types[at:i])
            yield from self._control(buffer[int(starts[i]) : int(ends[i])])
            at = i + 1
        yield from self._reorder_segment(buffer, starts[at:], ends[at:], types[at:])

    def _reorder_segment(
        self, buffer: bytes, starts: Ints, ends: Ints, types: NDArray[np.uint8]
    ) -> Iterator[MessageRun]:
        """Process messages of one segment, or outside of any."""
        if len(starts) == 0:
            return
        number, self._sent = self._sent, self._sent + len(starts)
        if self._segment is None:
            if self._open:
                for i in np.flatnonzero(types == RELATION).tolist():
                    message = buffer[int(starts[i]) : int(ends[i])]
                    self._newest.record(relation_oid(message), number + i, message)
            yield buffer, starts, ends
            return
        with_xid = types != ORIGIN
        for i in np.flatnonzero(~with_xid).tolist():
            origin = buffer[int(starts[i]) : int(ends[i])]
            if len(origin) > _MOST_ORIGIN_BYTES:
                msg = f"ORIGIN message of {len(origin)} bytes"
                raise ProtocolError(msg)
            self._origins[self._segment] = origin
        if with_xid.any():
            starts, ends, types = starts[with_xid], ends[with_xid], types[with_xid]
            last = self._last.get(self._segment)
            messages = without_xids(buffer, starts, ends, types, number, last=last)
            self._last[self._segment] = int(messages.xids[-1])
            self._spool.append_messages(self._segment, messages)

    def _control(self, message: bytes) -> Iterator[MessageRun]:
        try:
            yield from self._controlled(message)
        except struct.error as error:
            msg = f"malformed message {message[:1]!r} of {len(message)} bytes"
            raise ProtocolError(msg) from error

    def _controlled(self, message: bytes) -> Iterator[MessageRun]:
        if (message[0] == STOP) == (self._segment is None):
            msg = f"message {message[:1]!r} in the wrong place among segments"
            raise ProtocolError(msg)
        if message[0] == START:
            self._begin_segment(message)
        elif message[0] == STOP:
            self._segment = None
        elif message[0] == ABORT:
            _, xid, subxid = ABORT_FORM.unpack(message)
            self._abort(xid, subxid)
        else:
            yield from self._commit(message)

    def _begin_segment(self, message: bytes) -> None:
        _, xid, is_first = START_FORM.unpack(message)
        if is_first:
            self._spool.drop(xid)
            self._close(xid)
            self._open.add(xid)
            ensure_few_open(len(self._open), self._most_open)
        elif xid not in self._open:
            msg = f"a segment of transaction {xid}, which has not begun"
            raise ProtocolError(msg)
        self._segment = xid

    def _abort(self, xid: int, subxid: int) -> None:
        if xid != subxid:
            self._spool.abort(xid, subxid)
            return
        self._spool.drop(xid)
        self._close(xid)

    def _commit(self, message: bytes) -> Iterator[MessageRun]:
        commit = StreamCommit.read(message)
        if commit.xid not in self._open:
            msg = f"commit of transaction {commit.xid}, which has not begun"
            raise ProtocolError(msg)
        origin = self._origins.get(commit.xid)
        yield commit.begin_messages(*([] if origin is None else [origin]))
        relations: LastRelations = {}
        for messages in self._spool.pop_transaction(commit.xid):
            relations |= {oid: (number, message) for oid, number, message in messages.relations()}
            yield messages.buffer, messages.starts, messages.ends
        newer = self._newest.committed(relations)
        self._close(commit.xid)
        yield commit.commit_messages(newer)

    def _close(self, xid: int) -> None:
        self._open.discard(xid)
        self._last.pop(xid, None)
        self._origins.pop(xid, None)
        if not self._open:  # later transactions send definitions newer than all of these
            self._newest.clear()


def ensure_few_open(count: int, most: int = MOST_OPEN) -> None:
    """Raise ProtocolError for an impossible number of open transactions: each takes memory."""
    if count > most:
        msg = f"segments of {count} open transactions"
        raise ProtocolError(msg)


def without_xids(
    buffer: bytes,
    starts: Ints,
    ends: Ints,
    types: NDArray[np.uint8],
    number: int,
    *,
    last: int | None = None,
) -> OpenMessages:
    """Return messages of a segment in the format outside of one. Raises ProtocolError.

    `last`: the sub-transaction of the message before them, if there is one.
    """
    if not _HAS_XID[types].all() or (ends - starts <= 1 + _XID_BYTES).any():
        msg = "unknown or malformed message in a segment of an open transaction"
        raise ProtocolError(msg)
    words = np.ndarray((len(buffer) - 3,), ">u4", buffer, 0, (1,))
    xids = _by_writer(words[starts + 1].astype(np.uint32), types, last)
    starts = starts + _XID_BYTES
    first, last = int(starts[0]), int(ends[-1])
    data = np.frombuffer(buffer, np.uint8, last - first, first).copy()
    data[starts - first] = types  # only the type byte moves, next to the content
    data.setflags(write=False)
    return OpenMessages(data.data, starts - first, ends - first, xids, number)


def _by_writer(xids: Xids, types: NDArray[np.uint8], last: int | None) -> Xids:
    """Return the ids; each logical message gets that of the message before it."""
    is_logical = types == MESSAGE
    if not is_logical.any():
        return xids
    before = np.maximum.accumulate(np.where(is_logical, -1, np.arange(len(xids))))
    first = xids[0] if last is None else np.uint32(last)
    return np.where(before < 0, first, xids[np.maximum(before, 0)])


def _joined(*messages: bytes) -> MessageRun:
    ends = np.cumsum([len(m) for m in messages], dtype=np.int64)
    return b"".join(messages), np.append([0], ends[:-1]), ends


def relation_oid(relation: bytes) -> int:
    """Return the OID in a RELATION message. Raises ProtocolError."""
    if len(relation) < 1 + _RELATION_OID.size:
        msg = f"RELATION message of {len(relation)} bytes"
        raise ProtocolError(msg)
    oid: int = _RELATION_OID.unpack_from(relation, 1)[0]
    return oid
