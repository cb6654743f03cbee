"""One relation's changes in a feed, walked together in message order.

Source: PostgreSQL documentation, "Logical Replication Message Formats", Insert, Update, Delete.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ingestd.changes import TableBatch
from ingestd.decode.joint import Wanted, cast_jointly
from ingestd.decode.messages import DELETE, INSERT, TRUNCATE, UPDATE, Ints, Messages, Transactions
from ingestd.decode.relation import Relation
from ingestd.decode.rows import Fields, Places, Tuples, table_batch
from ingestd.decode.tuples import Field, walk_tuples
from ingestd.errors import ProtocolError
from ingestd.schema import Table

_NEW, _KEY, _OLD = (ord(c) for c in "NKO")
_TEXT = ord("t")
_COUNT, _LENGTH = struct.Struct(">h"), struct.Struct(">i")
_TUPLE = 5
"""Offset of the first tuple's kind: type byte and relation OID come before."""

_ops = np.zeros(256, np.uint8)
for _type, _op in ((INSERT, "c"), (UPDATE, "u"), (DELETE, "d"), (TRUNCATE, "t")):
    _ops[_type] = ord(_op)


@dataclass(frozen=True, slots=True)
class Changes:
    """Captured changes of one table: message of each (ascending), and its place in transaction."""

    messages: Ints
    seq: Ints


@dataclass(frozen=True, slots=True)
class Walked:
    """One table's changes, their columns found: `new` and `old` as in `table_batch`."""

    table: Table
    places: Places
    new: Tuples
    old: Tuples | None
    nbytes: int

    def batch(self) -> TableBatch:
        """Cast what is not cast yet, and build the rows."""
        return table_batch(self.table, self.places, self.new, self.old, self.nbytes)


def walk_changes(
    messages: Messages,
    transactions: Transactions,
    relation: Relation,
    table: Table,
    changes: Changes,
    *,
    is_small: bool,
) -> Walked:
    """Find the columns of these changes; if `is_small`, in `messages` itself (`only`).

    Raises ProtocolError.
    """
    at = changes.messages
    types = messages.types[at]
    of = transactions.of[at]
    places = Places(
        _ops[types],
        transactions.commit_lsns[of],
        changes.seq,
        transactions.xids[of],
        transactions.commit_times[of],
    )
    nbytes = messages.nbytes(at)
    rows = None
    if (types == TRUNCATE).any():
        rows = np.flatnonzero(types != TRUNCATE)
        at = at[rows]
    new, old = _walk(messages.only(at, may_copy=not is_small), relation)
    if rows is not None:
        new = Tuples(new.fields, rows)
        if old is not None and old.rows is not None:
            old = Tuples(old.fields, rows[old.rows])
    return Walked(table, places, new, old, nbytes)


def batches_of(small: Sequence[Walked]) -> list[TableBatch]:
    """Build the rows of small tables: their columns are cast together."""
    wanted: list[Wanted] = []
    for walked in small:
        table = walked.table
        wanted.append((walked.new, table.columns))
        if walked.old is not None:
            wanted.append((walked.old, [table.column(name) for name in table.before]))
    cast = iter(cast_jointly(wanted))
    return [
        replace(w, new=next(cast), old=None if w.old is None else next(cast)).batch() for w in small
    ]


def captured_bytes(messages: Messages, index: int, is_captured: Sequence[bool]) -> int:
    """Add up the values of a change, old and new ones, in columns that are captured.

    For a few large messages. Raises ProtocolError.
    """
    buffer, end = messages.source.buffer, int(messages.ends[index])
    at, total = int(messages.starts[index]) + _TUPLE, 0
    try:
        while at < end:
            (count,) = _COUNT.unpack_from(buffer, at + 1)
            at += 3
            for wanted in is_captured[:count]:
                if buffer[at] != _TEXT:
                    at += 1
                    continue
                (length,) = _LENGTH.unpack_from(buffer, at + 1)
                at += 5 + max(length, 0)
                total += length if wanted else 0
    except (struct.error, IndexError) as error:
        msg = "value reaches beyond its message"
        raise ProtocolError(msg) from error
    return total


def _walk(messages: Messages, relation: Relation) -> tuple[Tuples, Tuples | None]:
    """Give the main tuples (new ones; of deletes, old ones), and those for `_cdc_before`."""
    source, count = messages.source, len(relation.columns)
    types, ends = messages.types, messages.ends
    first = messages.starts + _TUPLE
    kinds = (messages.heads >> 16).astype(np.uint8)
    is_new = kinds == _NEW
    is_old = (kinds == _KEY) | (kinds == _OLD)
    is_delete = types == DELETE
    good = np.where(types == INSERT, is_new, np.where(is_delete, is_old, is_new | is_old))
    if not good.all():
        msg = f"unexpected kind of tuple in a change of {relation.id}"
        raise ProtocolError(msg)
    main, old = first + 1, None
    if is_old.any():
        which = np.flatnonzero(is_old)
        fields, stops = walk_tuples(source, first[which] + 1, ends[which], count)
        updated = ~is_delete[which]
        follows = stops[updated]
        if (follows >= ends[which][updated]).any() or (source.bytes_at(follows) != _NEW).any():
            msg = f"update of {relation.id} without a new tuple"
            raise ProtocolError(msg)
        main[which[updated]] = follows + 1
        sent = np.flatnonzero(updated | (kinds[which] == _OLD))
        if len(sent):
            old = Tuples(_named(relation, [f[sent] for f in fields]), which[sent])
    fields, stops = walk_tuples(source, main, ends, count)
    if (stops != ends).any():
        msg = f"bytes after the tuple in a change of {relation.id}"
        raise ProtocolError(msg)
    return Tuples(_named(relation, fields)), old


def _named(relation: Relation, fields: list[Field]) -> Fields:
    return {c.name: f for c, f in zip(relation.columns, fields, strict=True)}
