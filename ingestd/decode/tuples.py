"""Tuples of many messages walked at once, column by column.

Source: PostgreSQL documentation, "Logical Replication Message Formats", TupleData; COPY, "Binary
Format", Tuples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingestd.decode.texts import Source, Texts
from ingestd.errors import ProtocolError

_TEXT, _NULL, _UNCHANGED = ord("t"), ord("n"), ord("u")


@dataclass(frozen=True, slots=True)
class Field:
    """One column of the tuples: its texts, and where an unchanged TOAST value was not sent."""

    texts: Texts
    unchanged: NDArray[np.bool_] | None = None

    def __getitem__(self, rows: NDArray[np.int64]) -> Field:
        unchanged = None if self.unchanged is None else self.unchanged[rows]
        return Field(self.texts[rows], unchanged)


def walk_tuples(
    source: Source, at: NDArray[np.int64], ends: NDArray[np.int64], columns: int
) -> tuple[list[Field], NDArray[np.int64]]:
    """Read TupleData at `at`, all of `columns` columns; give the fields and where each stops.

    No tuple reaches beyond its message's end. Raises ProtocolError.
    """
    at = _check_counts(source, at, columns)
    fields = []
    for _ in range(columns):
        heads = source.int64_at(at)  # the kind, the length, the first three bytes
        lengths = heads << 8
        lengths >>= 32
        starts = at + 5
        if (heads >> 48 == _TEXT << 8).all():  # each a text shorter than 16 MB
            fields.append(Field(Texts(source, starts, lengths, heads=heads)))
            at = starts + lengths
            continue
        kinds = heads >> 56
        is_text = kinds == _TEXT
        unchanged = kinds == _UNCHANGED
        if not (is_text | unchanged | (kinds == _NULL)).all():
            msg = "tuple column that is neither text, null nor unchanged"
            raise ProtocolError(msg)
        lengths = np.where(is_text, lengths, 0)
        _check_lengths(lengths)
        texts = Texts(source, np.where(is_text, starts, at + 1), lengths, is_text, heads)
        fields.append(Field(texts, unchanged if unchanged.any() else None))
        at = texts.starts + lengths
    _check_ends(at, ends)
    return fields, at


def walk_copy_rows(
    source: Source, at: NDArray[np.int64], ends: NDArray[np.int64], columns: int
) -> list[Texts]:
    """Read rows of COPY in binary format, which must end at `ends`. Raises ProtocolError."""
    at = _check_counts(source, at, columns)
    found = []
    for _ in range(columns):
        words = source.int64_at(at)  # the length, the first four bytes
        lengths = words >> 32
        present = None
        if len(lengths) and lengths.min() < 0:
            present = lengths != -1
            lengths = np.where(present, lengths, 0)
            _check_lengths(lengths)
        found.append(Texts(source, at + 4, lengths, present, words >> 8))
        at = at + (lengths + 4)
    if (at != ends).any():
        msg = "row's values do not fill its message"
        raise ProtocolError(msg)
    return found


def _check_counts(source: Source, at: NDArray[np.int64], columns: int) -> NDArray[np.int64]:
    """Every tuple must have the relation's number of columns; give where the first begins."""
    counts = source.int16_at(at)
    if (counts != columns).any():
        wrong = int(counts[(counts != columns).argmax()])
        msg = f"tuple of {wrong} columns where the relation has {columns}"
        raise ProtocolError(msg)
    return at + 2


def _check_lengths(lengths: NDArray[np.int64]) -> None:
    """Positions then only grow, so that checking the last one is enough."""
    if len(lengths) and lengths.min() < 0:
        msg = "negative length of a value"
        raise ProtocolError(msg)


def _check_ends(at: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
    if (at > ends).any():
        msg = "value reaches beyond its message"
        raise ProtocolError(msg)
