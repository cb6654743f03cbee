"""The limit of a row: a change that exceeds it is dropped, and its table stops."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from ingestd.decode.pgoutput.changes import TUPLE
from ingestd.decode.pgoutput.messages import IS_CHANGE, Ints, Messages, Transactions
from ingestd.decode.pgoutput.relation import Relation
from ingestd.decode.pgoutput.shortening import SHORTENED, omitted_bytes
from ingestd.model.errors import ProtocolError, TableError
from ingestd.model.row_checks import kept_bytes, row_too_large
from ingestd.model.schema import Table, TableId

_TEXT = ord("t")
_COUNT, _LENGTH = struct.Struct(">h"), struct.Struct(">i")


class RowLimit:
    """Drops changes with more than `limit_bytes` in captured columns, or with a part left out.

    `refused`: the faults of their tables.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._has_shortened = False
        self.refused: dict[TableId, TableError] = {}

    def begin_feed(self, messages: Messages) -> None:
        """Note whether changes in these messages were shortened. Raises ProtocolError."""
        self._has_shortened = _has_shortened(messages)

    def keep_small(
        self,
        messages: Messages,
        transactions: Transactions,
        relation: Relation,
        table: Table,
        rows: Ints,
    ) -> Ints:
        """Return the changes that are small enough; record the tables of the others, which stop."""
        limit = self._limit_bytes
        large = messages.ends[rows] - messages.starts[rows] > limit
        if self._has_shortened:
            after = np.minimum(rows + 1, len(messages) - 1)
            large |= messages.types[after] == SHORTENED
        if not large.any():
            return rows
        captured = {c.name for c in table.columns}
        is_sent = [c.name in captured for c in relation.columns]
        over = []
        for i in np.flatnonzero(large).tolist():
            message = int(rows[i])
            nbytes = _captured_bytes(messages, message, is_sent)
            omitted = _omitted_bytes(messages, message, is_sent)
            if nbytes + omitted > limit or omitted:
                over.append(i)
                where = f"in the transaction that commits at {transactions.commit_of(message)[0]}"
                most = limit if nbytes + omitted > limit else kept_bytes(limit)
                error = row_too_large(table.id, nbytes + omitted, most, where)
                self.refused.setdefault(table.id, error)
        return np.delete(rows, over)


def _has_shortened(messages: Messages) -> bool:
    """Return whether changes were shortened. Raises ProtocolError for a misplaced one."""
    shortened = np.flatnonzero(messages.types == SHORTENED)
    if len(shortened) == 0:
        return False
    changes = shortened - 1
    if (
        changes[0] < 0
        or not (
            IS_CHANGE.take(messages.types[changes])
            & (messages.oids[changes] == messages.oids[shortened])
        ).all()
    ):
        msg = "a message about a shortened change does not follow the change"
        raise ProtocolError(msg)
    return True


def _omitted_bytes(messages: Messages, message: int, is_captured: Sequence[bool]) -> int:
    """Return the bytes of captured values that a shortened change lacks."""
    after = message + 1
    if after == len(messages) or messages.types[after] != SHORTENED:
        return 0
    found = omitted_bytes(messages.content(after))
    if any(column >= len(is_captured) for column in found):
        msg = "values left out of a change that has no such columns"
        raise ProtocolError(msg)
    return sum(nbytes for column, nbytes in found.items() if is_captured[column])


def _captured_bytes(messages: Messages, index: int, is_captured: Sequence[bool]) -> int:
    """Return the total size of a change's captured values, old and new.

    For a few large messages. Raises ProtocolError.
    """
    buffer, end = messages.source.buffer, int(messages.ends[index])
    at, total = int(messages.starts[index]) + TUPLE, 0
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
