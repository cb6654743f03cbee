"""Reordering, into commit order, of transactions that SQL functions return before they commit.

With `streaming 'on'` (`decode/pgoutput/streamed_transactions.py`) a call returns large transactions
in segments, interleaved with others, so the server need not write them to disk while it decodes. It
has the complete result before the first row is sent, so a query can scan the result several times
(`wal/drain/queries.py`). First it returns, in their original order, all messages about segments and
relations: the announcement. Then follow the ordinary transactions up to the first Stream Commit,
that transaction's messages, and so on. So the reader knows each transaction's commit and its undone
parts before its first message, and buffers nothing. States::

    ahead --span 0 to the first commit--> ordinary --span of that commit's xid--> to come
    to come --Stream Start--> in a segment --Stream Stop--> between segments
    between segments --Stream Start--> in a segment; --Stream Commit--> given
    given --span from its commit to the next, or to the end--> ordinary

The output of `ReorderedDrain` is what the same call would have returned without streaming. A
message is undone if it precedes the abort of a sub-transaction and has its id or a later one. For
the reason, and for the RELATION messages that hold, see `streamed_transactions.py`.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ingestd.decode.pgoutput.messages import Ints
from ingestd.decode.pgoutput.streamed_transactions import (
    ABORT_FORM,
    IS_CONTROL,
    ORIGIN,
    START,
    START_FORM,
    STOP,
    STREAM_COMMIT,
    LastRelations,
    MessageRun,
    NewestRelations,
    StreamCommit,
    ensure_few_open,
    is_from,
    relation_oid,
    without_xids,
)
from ingestd.model.errors import ProtocolError

AHEAD = 0
"""The first byte of an announced message, which no other message begins with."""
MOST_SEGMENTED = 6
"""A result may have at most this many transactions in segments: each costs a scan of it."""
SPAN = b"<"
"""The first byte of a message that defines which messages follow: ordinary, or of one xid."""
_XID = struct.Struct(">I")
_SPAN = struct.Struct(">cIQQ")
_MOST_NUMBER = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class _Span:
    """The messages of transaction `xid`, or (0) those with numbers between `low` and `high`.

    `high`: the number of its Stream Commit, or of the one that they precede.
    """

    xid: int
    low: int
    high: int

    @property
    def is_last(self) -> bool:
        """Return whether it contains all messages sent after the last Stream Commit."""
        return not self.xid and self.high == _MOST_NUMBER


@dataclass(slots=True)
class _Committed:
    """A transaction that must be returned. `newer`: the result of `NewestRelations.committed`.

    `undone`: for each abort still expected, the last first, the earliest sub-transaction undone by
    it or by a later one.
    """

    commit: StreamCommit
    newer: list[bytes]
    undone: list[int]


@dataclass(slots=True)
class _Open:
    """An announced transaction: its aborts, and its RELATION messages that are not undone.

    For each of these: the sub-transaction's id, the relation's OID, its number, the message.
    """

    aborts: list[int] = field(default_factory=list)
    relations: list[tuple[int, int, int, bytes]] = field(default_factory=list)


class _Ahead:
    """Reads the announcement, in its original order."""

    def __init__(self) -> None:
        self.committed: dict[int, _Committed] = {}
        self._newest = NewestRelations()
        self._open: dict[int, _Open] = {}
        self._segment: _Open | None = None
        self._count = 0

    def add_message(self, message: bytes) -> None:
        """Record the next message. Raises ProtocolError, struct.error."""
        self._count += 1
        kind = message[:1]
        if kind == b"S":
            _, xid, is_first = START_FORM.unpack(message)
            if is_first:
                self._open[xid] = _Open()
                ensure_few_open(len(self._open))
            self._segment = self._of(xid)
        elif kind == b"E":
            self._segment = None
        elif kind == b"R":
            self._relation(message)
        elif kind == b"A":
            _, xid, subxid = ABORT_FORM.unpack(message)
            if xid == subxid:
                self._close(xid)
            elif xid in self._open:
                self._undo(self._open[xid], subxid)
        elif kind == b"c":
            self._commit(StreamCommit.read(message))
        else:
            msg = f"unexpected message {kind!r} in an announcement"
            raise ProtocolError(msg)

    def _of(self, xid: int) -> _Open:
        if xid not in self._open:
            msg = f"a segment of transaction {xid}, which has not begun"
            raise ProtocolError(msg)
        return self._open[xid]

    def _relation(self, message: bytes) -> None:
        if self._segment is not None:
            subxid = _XID.unpack_from(message, 1)[0]
            message = message[:1] + message[1 + _XID.size :]
            entry = (subxid, relation_oid(message), self._count, message)
            self._segment.relations.append(entry)
        elif self._open:
            self._newest.record(relation_oid(message), self._count, message)

    def _undo(self, one: _Open, subxid: int) -> None:
        one.aborts.append(subxid)
        while one.relations and _is_from(one.relations[-1][0], subxid):
            one.relations.pop()

    def _commit(self, commit: StreamCommit) -> None:
        one = self._of(commit.xid)
        relations: LastRelations = {
            oid: (number, message) for _, oid, number, message in one.relations
        }
        undone: list[int] = []
        for subxid in reversed(one.aborts):
            is_earliest = not undone or _is_from(undone[-1], subxid)
            undone.append(subxid if is_earliest else undone[-1])
        self.committed[commit.xid] = _Committed(commit, self._newest.committed(relations), undone)
        self._close(commit.xid)

    def _close(self, xid: int) -> None:
        self._open.pop(xid, None)
        if not self._open:
            self._newest.clear()


class ReorderedDrain:
    """Processes one result. After a ProtocolError it can't continue. Not thread-safe.

    `most_segmented`: a result may have at most this many transactions in segments. `count`: how
    many of them were yielded.
    """

    def __init__(self, most_segmented: int = MOST_SEGMENTED) -> None:
        self._most = most_segmented
        self.count = 0
        self._ahead = _Ahead()
        self._span: _Span | None = None
        self._given: _Committed | None = None
        self._is_in_segment = False
        self._last: int | None = None

    def feed(self, buffer: bytes, starts: Ints, ends: Ints) -> Iterator[MessageRun]:
        """Consume complete messages, yield those that are due. Raises ProtocolError."""
        if len(starts) == 0:
            return
        types = np.frombuffer(buffer, np.uint8)[starts]
        at = 0
        for i in np.flatnonzero(IS_CONTROL[types] | (types == AHEAD)).tolist():
            yield from self._messages(buffer, starts[at:i], ends[at:i], types[at:i])
            message = buffer[int(starts[i]) : int(ends[i])]
            with _malformed(message[:2]):
                if message[0] == AHEAD:
                    self._record_announcement(message[1:])
                else:
                    yield from self._control(message)
            at = i + 1
        yield from self._messages(buffer, starts[at:], ends[at:], types[at:])

    def finish(self) -> None:
        """Raise ProtocolError if announced messages are missing, or the end is."""
        announced = len(self._ahead.committed)
        if self._span is None and announced > self._most:
            msg = f"{announced} transactions were sent in segments, more than {self._most}"
            raise ProtocolError(msg)
        if announced or self._given is not None or self._span is None or not self._span.is_last:
            msg = "the server did not send all of a result"
            raise ProtocolError(msg)

    def _record_announcement(self, message: bytes) -> None:
        if message[:1] != SPAN:
            self._expect(self._span is None, message)
            self._ahead.add_message(message)
            return
        _, *fields = _SPAN.unpack(message)
        span, last = _Span(*fields), self._span
        if last is None:
            follows = span.low == 0 and not span.xid
        elif last.xid:
            follows = span.low == last.high and not span.xid
        else:
            next_xid = next(iter(self._ahead.committed), 0)
            follows = next_xid != 0 and span == replace(last, xid=next_xid)
        self._expect(follows and self._given is None and not self._is_in_segment, message)
        self._span = span

    def _control(self, message: bytes) -> Iterator[MessageRun]:
        if message[0] == START:
            _, xid, _ = START_FORM.unpack(message)
            if self._given is None:
                self._given, self._last = self._taken(xid, message), None
                yield self._given.commit.begin_messages()
            self._expect(self._given.commit.xid == xid and not self._is_in_segment, message)
            self._is_in_segment = True
        elif message[0] == STOP:
            self._expect(self._is_in_segment, message)
            self._is_in_segment = False
        elif message[0] == STREAM_COMMIT:
            given, self._given = self._given, None
            self._expect(given is not None and not self._is_in_segment, message)
            assert given is not None
            self._expect(given.commit == StreamCommit.read(message) and not given.undone, message)
            self.count += 1
            yield given.commit.commit_messages(given.newer)
        elif self._given is not None:  # else its transaction did not commit
            self._expect(bool(self._given.undone) and not self._is_in_segment, message)
            self._given.undone.pop()

    def _messages(
        self, buffer: bytes, starts: Ints, ends: Ints, types: NDArray[np.uint8]
    ) -> Iterator[MessageRun]:
        """Process messages of one segment, or outside of any."""
        if len(starts) == 0:
            return
        if not self._is_in_segment:
            is_ordinary = self._span is not None and not self._span.xid
            self._expect(is_ordinary, buffer[int(starts[0]) : int(ends[0])])
            yield buffer, starts, ends
            return
        assert self._given is not None
        kept = types != ORIGIN
        if not kept.all():  # only the first segment has it, before anything else
            yield buffer, starts[~kept], ends[~kept]
        if not kept.any():
            return
        messages = without_xids(buffer, starts[kept], ends[kept], types[kept], 0, last=self._last)
        self._last = int(messages.xids[-1])
        starts, ends = messages.starts, messages.ends
        if self._given.undone:
            kept = ~is_from(messages.xids, self._given.undone[-1])
            starts, ends = starts[kept], ends[kept]
        if len(starts):
            yield messages.buffer, starts, ends

    def _taken(self, xid: int, message: bytes) -> _Committed:
        self._expect(self._span is not None and self._span.xid == xid, message)
        self._expect(xid in self._ahead.committed, message)
        return self._ahead.committed.pop(xid)

    def _expect(self, is_so: bool, message: bytes) -> None:  # noqa: FBT001
        if not is_so:
            msg = f"message {message[:1]!r} in the wrong place among segments"
            raise ProtocolError(msg)


def _is_from(xid: int, subxid: int) -> bool:
    return (xid - subxid) % (1 << 32) < 1 << 31


@contextlib.contextmanager
def _malformed(kind: bytes) -> Iterator[None]:
    try:
        yield
    except struct.error as error:
        msg = f"malformed message {kind!r}"
        raise ProtocolError(msg) from error
