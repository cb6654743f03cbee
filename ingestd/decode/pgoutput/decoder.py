"""Decoding of pgoutput messages to change sets of complete transactions; a large one has several.

Source: PostgreSQL documentation, "Logical Streaming Replication Protocol" and "Logical Replication
Message Formats", protocol version 1, values as text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ingestd.decode.pgoutput.changes import TableChanges, change_batch, change_batches
from ingestd.decode.pgoutput.messages import (
    BEGIN,
    COMMIT,
    IS_CHANGE,
    LENGTHS,
    RELATION,
    SPARSE,
    TRUNCATE,
    TYPE,
    Ints,
    Messages,
    ReportMessage,
    Transaction,
    Transactions,
    oids_of,
    read_messages,
    read_transactions,
    report_messages,
)
from ingestd.decode.pgoutput.relation import (
    Relation,
    ReportPartition,
    ResolveRelation,
    parse_relation,
)
from ingestd.decode.pgoutput.row_limit import RowLimit
from ingestd.decode.values.encodings import Encoding
from ingestd.model.changes import ChangeSet, TableBatch, idle_change_set
from ingestd.model.errors import ProtocolError
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.row_checks import UNLIMITED_BYTES
from ingestd.model.schema import Table, TableId

_MAX_FEED_BYTES = 1 << 31
"""Arrow binary arrays have 32-bit offsets."""
_TRUNCATED = struct.Struct(">iB")


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """Which tables of a feed are decoded together.

    `small_rows`, `small_bytes`: a table with at most this many changes is decoded together with
    others. `values`, `nbytes`: limits per group; a value takes up to 100 bytes until its column is
    cast, its text twice. `sparse`: see `Messages`.
    """

    small_rows: int = 512
    small_bytes: int = 1 << 20
    values: int = 50_000
    nbytes: int = 4 << 20
    sparse: int = SPARSE


GROUPS = GroupPolicy()


@dataclass(frozen=True, slots=True)
class _Known:
    """A relation's definition, its table if captured, and the message from which it holds."""

    relation: Relation
    table: Table | None
    since: int = -1


class PgoutputDecoder:
    """Decodes one stream from its start. After a ProtocolError it can't continue.

    Messages after a feed's last Commit are buffered until their transaction ends, so that change
    sets end with transactions. More than `hold_bytes` of them are returned as an open change set,
    and so is what precedes a buffer of that size. A change with more than `row_limit_bytes` in
    captured columns is dropped, and its table is reported in `ChangeSet.refused`.
    `report_partition` is called repeatedly, `report_message` before the change set is returned.
    `encoding`: of texts and names, None for UTF-8. `groups`: which tables are decoded together. Not
    thread-safe.
    """

    def __init__(
        self,
        resolve: ResolveRelation,
        *,
        report_partition: ReportPartition = lambda *_: None,
        report_message: ReportMessage = lambda *_: False,
        hold_bytes: int = 8 << 20,
        row_limit_bytes: int = UNLIMITED_BYTES,
        encoding: Encoding | None = None,
        groups: GroupPolicy = GROUPS,
    ) -> None:
        self._groups = groups
        self._encoding = encoding
        self._resolve = resolve
        self._report_partition = report_partition
        self._report_message = report_message
        self._ignored = 0
        self._hold_bytes = hold_bytes
        self._row_limit = RowLimit(row_limit_bytes)
        self._position = ZERO
        self._has_ended_transaction = False
        self._known: dict[int, _Known] = {}
        self._open: Transaction | None = None
        self._last_lsn = -1
        self._held: list[tuple[bytes | memoryview, Ints]] = []
        self._held_bytes = 0
        self._is_stale = False
        self._trailing_relation: Relation | None = None
        self._partitions: set[int] = set()

    @property
    def position(self) -> Lsn:
        """Every captured change of transactions that commit below it has been returned."""
        return self._position

    @property
    def has_ended_transaction(self) -> bool:
        """Return whether a transaction has been returned with its end."""
        return self._has_ended_transaction

    @property
    def is_in_transaction(self) -> bool:
        """Return whether a transaction has been returned in part, without its end."""
        return self._open is not None

    def relations(self) -> tuple[dict[int, TableId], frozenset[int]]:
        """Return all relations received, by OID, and the OIDs of those that no message follows.

        Not partitions whose changes were received as their root's. Raises ProtocolError.
        """
        every = {
            oid: known.relation.id
            for oid, known in self._known.items()
            if oid not in self._partitions
        }
        last = set[int]()
        newest = None
        if (trailing := self._trailing_relation) is not None:
            every[trailing.oid] = trailing.id
            last.add(trailing.oid)
        for piece, (starts, ends) in self._held:
            messages = read_messages(bytes(piece), starts, ends, self._encoding)
            kinds, oids = messages.types.tolist(), messages.oids.tolist()
            for kind, oid, start, end in zip(kinds, oids, starts, ends, strict=True):
                if kind == RELATION:
                    message = bytes(piece[start:end])
                    every[oid] = parse_relation(message, self._encoding).id
                    last.add(oid)
                    newest = oid
                elif kind != TYPE:
                    if newest not in {None, oid} and IS_CHANGE[kind]:
                        every.pop(newest, None)
                    last.clear()
                    newest = None
        return every, frozenset(last)

    def resolve_again(self) -> None:
        """Resolve the tables of all relations again: others may be captured now.

        Thread-safe. It takes effect before the next messages are decoded.
        """
        self._is_stale = True

    def idle(self, position: Lsn) -> ChangeSet | None:
        """Advance to a keepalive's wal_end: nothing that remains to be decoded precedes it.

        None while a transaction is open or buffered: its changes do precede it.
        """
        if self._open is not None or self._held:
            return None
        self._position = max(self._position, position)
        return idle_change_set(self._position)

    def feed(
        self, buffer: bytes | memoryview, starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> list[ChangeSet]:
        """Decode complete messages, `starts[i]` to `ends[i]` (ascending) in `buffer`.

        A memoryview is not copied: its memory must not change. Returns at most one change set of
        complete transactions, then up to two open ones: buffered messages are returned before a
        large buffer. Raises ProtocolError.
        """
        if len(starts) == 0:
            return []
        _check_ranges(buffer, starts, ends)
        whole = self._whole_messages(buffer, starts, ends)
        change_sets = []
        if whole and not self._held:
            change_sets += self._decode_all(bytes(buffer), starts[:whole], ends[:whole])
        elif whole:
            self._hold(memoryview(buffer), starts[:whole], ends[:whole])
            change_sets += self._release()
        if whole < len(starts):
            if len(buffer) > self._hold_bytes:  # e.g. a large message: avoid a copy to join it
                change_sets += self._release()
            self._hold(buffer, starts[whole:], ends[whole:])
            if self._held_bytes > self._hold_bytes:
                change_sets += self._release()
        return change_sets

    def _whole_messages(self, buffer: bytes | memoryview, starts: Ints, ends: Ints) -> int:
        """Return how many of these messages end with the end of a transaction.

        They lie far apart in memory, so only those with the length of a Begin or a Commit are
        checked.
        """
        lengths, data = ends - starts, np.frombuffer(buffer, np.uint8)
        at = np.flatnonzero(lengths == LENGTHS[COMMIT])
        commits = at[data.take(starts[at]) == COMMIT]
        after = int(commits[-1]) + 1 if len(commits) else 0
        if after == 0 and (self._open is not None or self._held):
            return 0
        begins = starts[after:][lengths[after:] == LENGTHS[BEGIN]]
        if (data.take(begins) == BEGIN).any():
            return after
        return len(starts)  # the rest, if any, belongs to no transaction

    def _hold(self, buffer: bytes | memoryview, starts: Ints, ends: Ints) -> None:
        """Buffer the messages, and the bytes between them.

        They are copied, except from a memoryview, which has only these bytes, or is released at
        once.
        """
        first, last = int(starts[0]), int(ends[-1])
        if 2 * (last - first) > len(buffer):  # a copy would be nearly as large
            first, last = 0, len(buffer)
        piece = buffer[first:last]
        self._held.append((piece, np.stack((starts, ends)) - first))
        self._held_bytes += len(piece)

    def _release(self) -> list[ChangeSet]:
        """Decode all buffered messages, if any."""
        if not self._held:
            return []
        pieces, self._held, self._held_bytes = self._held, [], 0
        shifts = np.cumsum([0, *(len(p) for p, _ in pieces[:-1])])
        ranges = np.concatenate(
            [r + shift for (_, r), shift in zip(pieces, shifts, strict=True)], axis=1
        )
        buffer = b"".join(p for p, _ in pieces)
        del pieces  # decoding needs the memory
        return self._decode_all(buffer, ranges[0], ranges[1])

    def _decode_all(self, buffer: bytes, starts: Ints, ends: Ints) -> list[ChangeSet]:
        if len(buffer) >= _MAX_FEED_BYTES:
            msg = f"{len(buffer)} bytes of messages at once: more than can be decoded"
            raise ProtocolError(msg)
        change_set = self._decode(
            read_messages(buffer, starts, ends, self._encoding, sparse=self._groups.sparse)
        )
        return [] if change_set is None else [change_set]

    def _decode(self, messages: Messages) -> ChangeSet | None:
        transactions = read_transactions(messages, self._open)
        if len(transactions.begun):
            if transactions.commit_lsns[1] <= self._last_lsn:
                msg = "transactions not in commit order"
                raise ProtocolError(msg)
            self._last_lsn = int(transactions.commit_lsns[-1])
        counts = np.zeros(len(messages), np.int64)
        self._row_limit.begin_feed(messages)
        found = list(self._find(messages, transactions, counts))
        self._find_partitions(messages, transactions)
        self._ignored += report_messages(messages, transactions, self._report_message)
        total = np.cumsum(counts)
        # the count before each transaction began; negative for the open one
        carried = 0 if self._open is None else self._open.changes
        bases = np.append([-carried], total[transactions.begun])
        first_seq = total - bases[transactions.of] - counts + 1
        batches = _batches(messages, transactions, first_seq, found, self._groups)
        captured = np.diff(np.append(bases, total[-1]))
        return self._close(transactions, batches, captured)

    def _close(
        self, transactions: Transactions, batches: tuple[TableBatch, ...], captured: Ints
    ) -> ChangeSet | None:
        """Update the open transaction and the position. `captured`: changes per transaction."""
        last = len(captured) - 1
        self._open = None
        if transactions.ends_in_transaction:
            self._open = Transaction(
                int(transactions.commit_lsns[last]),
                int(transactions.commit_times[last]),
                int(transactions.xids[last]),
                int(captured[last]),
                bool(transactions.are_replicated[last]),
            )
        if len(transactions.end_lsns):
            self._has_ended_transaction = True
            self._position = max(self._position, Lsn(int(transactions.end_lsns.max())))
        elif not (batches or self._row_limit.refused):
            return None
        refused, self._row_limit.refused = tuple(self._row_limit.refused.values()), {}
        ignored, self._ignored = self._ignored, 0
        with_changes = np.flatnonzero(captured > 0)
        ended = transactions.ended[captured[transactions.ended] > 0]
        first = Lsn(int(transactions.commit_lsns[with_changes[0]])) if len(with_changes) else None
        return ChangeSet(
            batches,
            self._position,
            ends_in_transaction=transactions.ends_in_transaction,
            first_lsn=first,
            commit_times=transactions.commit_times[ended],
            are_replicated=transactions.are_replicated[ended],
            nbytes=sum(b.nbytes for b in batches),
            refused=refused,
            ignored_messages=ignored,
        )

    def _find(
        self, messages: Messages, transactions: Transactions, counts: Ints
    ) -> Iterator[TableChanges]:
        """Locate the captured changes; set `counts` to the number in each message."""
        if self._is_stale:
            self._is_stale = False
            self._known = {
                oid: replace(known, table=self._resolve(known.relation))
                for oid, known in self._known.items()
            }
        start = 0
        for i in np.flatnonzero(messages.types == RELATION).tolist():
            lsn, xid = transactions.commit_of(i)
            relation = parse_relation(messages.content(i), self._encoding)
            relation = replace(relation, lsn=lsn, xid=xid)
            known = self._known.get(relation.oid)
            if known is not None and known.relation == relation:
                continue
            if known is not None:
                yield from self._find_between(messages, transactions, start, i, counts)
                start = i
            self._known[relation.oid] = _Known(relation, self._resolve(relation), i)
        yield from self._find_between(messages, transactions, start, len(messages), counts)
        for oid, known in self._known.items():
            if known.since >= 0:
                self._known[oid] = replace(known, since=-1)

    def _find_partitions(self, messages: Messages, transactions: Transactions) -> None:
        """Find relations whose changes are sent as those of a captured table.

        pgoutput also sends a partition's RELATION message, right before the partition's first
        change.
        """
        types, heads = messages.types, messages.heads
        if self._trailing_relation is not None and len(types) and IS_CHANGE[types[0]]:
            self._report_if_partition(
                self._trailing_relation, int(oids_of(heads[:1])[0]), transactions, 0
            )
        at_relations = np.flatnonzero(types == RELATION)
        self._trailing_relation = None
        if len(at_relations) and at_relations[-1] == len(types) - 1:
            self._trailing_relation = parse_relation(
                messages.content(int(at_relations[-1])), self._encoding
            )
            at_relations = at_relations[:-1]
        oids, tables = oids_of(heads[at_relations]), oids_of(heads[at_relations + 1])
        is_partition = IS_CHANGE.take(types[at_relations + 1]) & (tables != oids)
        for i in at_relations[is_partition].tolist():
            relation = parse_relation(messages.content(i), self._encoding)
            self._report_if_partition(
                relation, int(oids_of(heads[i + 1 : i + 2])[0]), transactions, i + 1
            )

    def _report_if_partition(
        self, relation: Relation, table: int, transactions: Transactions, change: int
    ) -> None:
        if relation.oid != table:
            self._partitions.add(relation.oid)
        if relation.oid != table and self._known[table].table is not None:
            lsn, xid = transactions.commit_of(change)
            self._report_partition(replace(relation, lsn=lsn, xid=xid), table)

    def _find_between(
        self,
        messages: Messages,
        transactions: Transactions,
        start: int,
        end: int,
        counts: Ints,
    ) -> Iterator[TableChanges]:
        types = messages.types[start:end]
        truncated = self._find_truncates(
            messages, (np.flatnonzero(types == TRUNCATE) + start).tolist(), counts
        )
        at = np.flatnonzero(IS_CHANGE.take(types)) + start
        for oid, rows in _grouped(messages.oids[at], at):
            known = self._lookup(oid, int(rows[0]))
            if known.table is None:
                continue
            counts[rows] = 1
            taken = self._row_limit.keep_small(
                messages, transactions, known.relation, known.table, rows
            )
            truncates = truncated.pop(oid, [])
            if len(taken) or truncates:
                yield _with_truncates(known.relation, known.table, taken, truncates)
        for oid, places in truncated.items():
            known = self._known[oid]
            assert known.table is not None
            yield _with_truncates(known.relation, known.table, at[:0], places)

    def _find_truncates(
        self, messages: Messages, at: list[int], counts: Ints
    ) -> dict[int, list[tuple[int, int]]]:
        """Return, by OID of captured relations, the messages and the position in each."""
        found: dict[int, list[tuple[int, int]]] = {}
        for i in at:
            content = messages.content(i)
            count, _ = _TRUNCATED.unpack_from(content, 1)
            if count < 0 or len(content) != 6 + 4 * count:
                msg = f"TRUNCATE message of {len(content)} bytes for {count} relations"
                raise ProtocolError(msg)
            rank = 0
            for oid in struct.unpack_from(f">{count}I", content, 6):
                if self._lookup(oid, i).table is not None:
                    found.setdefault(oid, []).append((i, rank))
                    rank += 1
            counts[i] = rank
        return found

    def _lookup(self, oid: int, message: int) -> _Known:
        known = self._known.get(oid)
        if known is None or known.since > message:
            msg = f"change of relation {oid} before its RELATION message"
            raise ProtocolError(msg)
        return known


def _with_truncates(
    relation: Relation, table: Table, rows: Ints, truncates: list[tuple[int, int]]
) -> TableChanges:
    """Merge a table's truncates (message, rank) into its row changes, in message order."""
    ranks = np.zeros(len(rows), np.int64)
    if not truncates:
        return TableChanges(relation, table, rows, ranks)
    places = np.array(truncates, np.int64)
    messages, ranks = np.append(rows, places[:, 0]), np.append(ranks, places[:, 1])
    order = np.argsort(messages, kind="stable")
    return TableChanges(relation, table, messages[order], ranks[order])


def _batches(
    messages: Messages,
    transactions: Transactions,
    first_seq: Ints,
    table_changes: Sequence[TableChanges],
    policy: GroupPolicy,
) -> tuple[TableBatch, ...]:
    """Decode each table's changes; small ones together."""
    batches: list[TableBatch | None] = []
    small: list[TableChanges] = []
    for changes in table_changes:
        at = changes.messages
        if len(at) <= policy.small_rows and messages.nbytes(at) <= policy.small_bytes:
            small.append(changes)
            batches.append(None)
        else:
            batches.append(change_batch(messages, transactions, first_seq, changes))
    together = (
        batch
        for group in table_groups(messages, small, policy)
        for batch in change_batches(messages, transactions, first_seq, group)
    )
    return tuple(next(together) if batch is None else batch for batch in batches)


def table_groups(
    messages: Messages, small: Sequence[TableChanges], policy: GroupPolicy
) -> Iterator[list[TableChanges]]:
    """Group the tables; a group is full with the table that reaches a limit."""
    group: list[TableChanges] = []
    values = nbytes = 0
    for changes in small:
        group.append(changes)
        values += len(changes.messages) * len(changes.relation.columns)
        nbytes += messages.nbytes(changes.messages)
        if values >= policy.values or nbytes >= policy.nbytes:
            yield group
            group, values, nbytes = [], 0, 0
    if group:
        yield group


def _grouped(oids: Ints, at: Ints) -> Iterator[tuple[int, Ints]]:
    """Group the messages by relation, each group in message order."""
    if len(oids) == 0:
        return
    if (oids == oids[0]).all():
        yield int(oids[0]), at
        return
    order = np.argsort(oids, kind="stable")
    sorted_oids = oids[order]
    cuts = np.flatnonzero(np.diff(sorted_oids)) + 1
    for part in np.split(order, cuts):
        yield int(oids[part[0]]), at[part]


def _check_ranges(buffer: bytes | memoryview, starts: Ints, ends: Ints) -> None:
    bad = len(starts) != len(ends) or int(starts[0]) < 0 or int(ends[-1]) > len(buffer)
    if bad or (starts >= ends).any() or (starts[1:] < ends[:-1]).any():
        msg = "messages empty, overlapping or outside their buffer"
        raise ProtocolError(msg)
