"""The changes of one relation in a feed, or a few of several relations, walked together.

A TRUNCATE names several relations: `PgoutputDecoder._find_truncates` lists it for each of them, and
here it becomes a `t` row.

Source: PostgreSQL documentation, "Logical Replication Message Formats", Insert, Update, Delete,
Truncate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ingestd.decode.change_batch import (
    CdcColumns,
    Fields,
    Tuples,
    Wanted,
    cast_batched,
    table_batch,
)
from ingestd.decode.pgoutput.messages import (
    DELETE,
    INSERT,
    TRUNCATE,
    UPDATE,
    Ints,
    Messages,
    Transactions,
)
from ingestd.decode.pgoutput.relation import Relation
from ingestd.decode.pgoutput.tuples import TupleRange, walk_tuples, walk_typed
from ingestd.decode.values.text_column import ByteBuffer, Field
from ingestd.model.changes import TableBatch
from ingestd.model.errors import ProtocolError
from ingestd.model.schema import Column, Table

_NEW, _KEY, _OLD = (ord(c) for c in "NKO")
TUPLE = 5
"""Offset of the first tuple's kind, after the type byte and the relation's OID."""

_ops = np.zeros(256, np.uint8)
for _type, _op in ((INSERT, "c"), (UPDATE, "u"), (DELETE, "d"), (TRUNCATE, "t")):
    _ops[_type] = ord(_op)


_Walked = tuple[Tuples, Tuples | None]
"""The `new` and `old` tuples of `table_batch`."""


@dataclass(frozen=True, slots=True)
class TableChanges:
    """One table's captured changes, in a range of messages with one definition of its relation.

    `messages` (ascending): that of each change. `rank`: its place among the captured relations of
    that message (0 except for truncates).
    """

    relation: Relation
    table: Table
    messages: Ints
    rank: Ints


def change_batch(
    messages: Messages, transactions: Transactions, first_seq: Ints, changes: TableChanges
) -> TableBatch:
    """Decode the changes of a table. Raises ProtocolError.

    `first_seq`: for each message, the `_cdc_seq` of its first change.
    """
    [walked] = _walk_changes(messages, [changes], may_copy=True)
    return _batch(messages, transactions, first_seq, changes, walked)


def change_batches(
    messages: Messages, transactions: Transactions, first_seq: Ints, changes: Sequence[TableChanges]
) -> list[TableBatch]:
    """Decode the few changes of each of these tables together. Raises ProtocolError."""
    walked = _walk_changes(messages, changes, may_copy=False)
    wanted: list[Wanted] = []
    for each, (new, old) in zip(changes, walked, strict=True):
        wanted.append((new, each.table.columns))
        if old is not None:
            wanted.append((old, each.table.before_columns))
    found = iter(cast_batched(wanted))
    cast = [(next(found), None if old is None else next(found)) for _, old in walked]
    return [
        _batch(messages, transactions, first_seq, each, tuples)
        for each, tuples in zip(changes, cast, strict=True)
    ]


def _batch(
    messages: Messages,
    transactions: Transactions,
    first_seq: Ints,
    changes: TableChanges,
    walked: _Walked,
) -> TableBatch:
    new, old = walked
    at = changes.messages
    of = transactions.of.take(at)
    places = CdcColumns(
        _ops.take(messages.types.take(at)),
        transactions.commit_lsns.take(of),
        first_seq.take(at) + changes.rank,
        transactions.xids.take(of),
        transactions.commit_times.take(of),
    )
    return table_batch(changes.table, places, new, old, messages.nbytes(at))


def _walk_changes(
    messages: Messages, changes: Sequence[TableChanges], *, may_copy: bool
) -> list[_Walked]:
    """Locate the columns. `may_copy`: see `Messages.only`; not for several tables."""
    rows = [_tuple_rows(messages.types[each.messages]) for each in changes]
    with_tuples = [
        (messages.only(c.messages if r is None else c.messages[r], may_copy=may_copy), c)
        for c, r in zip(changes, rows, strict=True)
    ]
    return [
        (_among(new, at), None if old is None else _among(old, at))
        for at, (new, old) in zip(rows, _walk(with_tuples), strict=True)
    ]


def _tuple_rows(types: NDArray[np.uint8]) -> Ints | None:
    """Return the changes that have tuples, all except truncates; None for all."""
    has_none = types == TRUNCATE
    return np.flatnonzero(~has_none) if has_none.any() else None


def _among(tuples: Tuples, rows: Ints | None) -> Tuples:
    """Return tuples that are numbered within `rows` with their rows among all."""
    if rows is None:
        return tuples
    return replace(tuples, rows=rows if tuples.rows is None else rows[tuples.rows])


def _walk(parts: Sequence[tuple[Messages, TableChanges]]) -> list[_Walked]:
    """Return the main tuples (new ones; for deletes, old ones), and those for `_cdc_before`.

    The messages of all parts have the same source.
    """
    source = parts[0][0].source
    starts = [_TupleStarts.from_messages(messages, changes) for messages, changes in parts]
    _walk_old(source, [start for start in starts if len(start.old)])
    found = []
    for start, (tuples, stops) in zip(starts, _walk_main(source, starts), strict=True):
        if (stops != start.messages.ends).any():
            msg = f"bytes after the tuple in a change of {start.relation.id}"
            raise ProtocolError(msg)
        found.append((tuples, start.before))
    return found


def _walk_main(source: ByteBuffer, starts: Sequence[_TupleStarts]) -> list[tuple[Tuples, Ints]]:
    """Return the main tuples, and where each stops. For a single relation, values may be cast."""
    parts = [start.main_part() for start in starts]
    if len(starts) == 1:
        typed = walk_typed(source, parts[0], starts[0].wanted(starts[0].table.columns))
        if typed is not None:
            return [typed]
    walked = zip(starts, walk_tuples(source, parts), strict=True)
    return [(Tuples(_named(s.relation, fields)), stops) for s, (fields, stops) in walked]


def _walk_old(source: ByteBuffer, starts: Sequence[_TupleStarts]) -> None:
    """Store the tuples for `_cdc_before`, and where updates continue."""
    parts = [start.old_part() for start in starts]
    if len(starts) == 1:
        [start], [part] = starts, parts
        whole = walk_typed(source, part, start.wanted(()))
        if whole is not None:
            _, stops = whole
            sent = start.take_stops(stops)
            if len(sent):
                part = TupleRange(part.at[sent], part.ends[sent], part.columns)
                typed = walk_typed(source, part, start.wanted(start.table.before_columns))
                assert typed is not None  # it has been walked before
                before, _ = typed
                start.before = replace(before, rows=start.old[sent])
            return
    for start, (fields, stops) in zip(starts, walk_tuples(source, parts), strict=True):
        sent = start.take_stops(stops)
        if len(sent):
            sliced = _named(start.relation, [field[sent] for field in fields])
            start.before = Tuples(sliced, start.old[sent])


@dataclass(slots=True)
class _TupleStarts:
    """The positions of the tuples in one relation's changes.

    `old`: the messages that begin with an old tuple. `main`: the start of the main tuple; for
    updates with an old one it is set by `take_stops`. `before`: the tuples for `_cdc_before`, once
    walked.
    """

    messages: Messages
    relation: Relation
    table: Table
    kinds: NDArray[np.uint8]
    old: Ints
    main: Ints
    before: Tuples | None = None

    @classmethod
    def from_messages(cls, messages: Messages, changes: TableChanges) -> _TupleStarts:
        types = messages.types
        kinds = (messages.heads >> 16).astype(np.uint8)
        is_new = kinds == _NEW
        is_old = (kinds == _KEY) | (kinds == _OLD)
        good = np.where(types == INSERT, is_new, np.where(types == DELETE, is_old, is_new | is_old))
        if not good.all():
            msg = f"unexpected kind of tuple in a change of {changes.relation.id}"
            raise ProtocolError(msg)
        main = messages.starts + TUPLE + 1
        old = np.flatnonzero(is_old)
        return cls(messages, changes.relation, changes.table, kinds, old, main)

    def wanted(self, columns: Sequence[Column]) -> list[Column | None]:
        """Return for each column of the relation the one of these with its name, or None."""
        by_name = {column.name: column for column in columns}
        return [by_name.get(column.name) for column in self.relation.columns]

    def old_part(self) -> TupleRange:
        ends = self.messages.ends[self.old]
        return TupleRange(self.main[self.old], ends, len(self.relation.columns))

    def main_part(self) -> TupleRange:
        return TupleRange(self.main, self.messages.ends, len(self.relation.columns))

    def take_stops(self, stops: Ints) -> Ints:
        """Record where updates' new tuples start; return which of `old` go to `_cdc_before`."""
        messages, old = self.messages, self.old
        updated = messages.types[old] != DELETE
        follows, ends = stops[updated], messages.ends[old][updated]
        if (follows >= ends).any() or (messages.source.bytes_at(follows) != _NEW).any():
            msg = f"update of {self.relation.id} without a new tuple"
            raise ProtocolError(msg)
        self.main[old[updated]] = follows + 1
        return np.flatnonzero(updated | (self.kinds[old] == _OLD))


def _named(relation: Relation, fields: list[Field]) -> Fields:
    return {c.name: f for c, f in zip(relation.columns, fields, strict=True)}
