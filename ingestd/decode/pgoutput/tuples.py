"""Walking of tuples in many messages at once, column by column.

Source: PostgreSQL documentation, "Logical Replication Message Formats", TupleData; COPY, "Binary
Format", Tuples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from ingestd.decode.values.text_column import ByteBuffer, Field, TextColumn
from ingestd.model.errors import ProtocolError

_TEXT, _NULL, _UNCHANGED = ord("t"), ord("n"), ord("u")


@dataclass(frozen=True, slots=True)
class TupleRange:
    """Tuples of one relation: the start of each, the end of its message, the number of columns."""

    at: NDArray[np.int64]
    ends: NDArray[np.int64]
    columns: int


def walk_tuples(
    source: ByteBuffer, parts: Sequence[TupleRange]
) -> list[tuple[list[Field], NDArray[np.int64]]]:
    """Parse TupleData, all columns; return for each part the fields, and where each tuple stops.

    The n-th columns of all parts are read together, because a step's cost hardly depends on their
    number. No tuple reaches beyond its message's end. Raises ProtocolError.
    """
    if not parts:
        return []
    order = sorted(range(len(parts)), key=lambda n: parts[n].columns, reverse=True)
    widths = [parts[n].columns for n in order]
    bounds = list(accumulate((len(parts[n].at) for n in order), initial=0))
    rows_of = {n: slice(*ends) for n, ends in zip(order, pairwise(bounds), strict=True)}
    at = np.concatenate([parts[n].at for n in order])
    at = _check_counts(source, at, np.repeat(widths, np.diff(bounds)))
    found: list[list[Field]] = [[] for _ in parts]
    going_on = len(parts)
    for column in range(widths[0]):
        while widths[going_on - 1] <= column:
            going_on -= 1
        here = at[: bounds[going_on]]
        field = _walk_column(source, here)
        np.add(field.texts.starts, field.texts.lengths, out=here)
        for n in order[:going_on]:
            found[n].append(field[rows_of[n]])
    _check_ends(at, np.concatenate([parts[n].ends for n in order]))
    return [(fields, at[rows_of[n]]) for n, fields in enumerate(found)]


def _walk_column(source: ByteBuffer, at: NDArray[np.int64]) -> Field:
    heads = source.int64_at(at)  # the kind, the length, the first three bytes
    lengths = heads << 8
    lengths >>= 32
    starts = at + 5
    if (heads >> 48 == _TEXT << 8).all():  # all are texts shorter than 16 MB
        return Field(TextColumn(source, starts, lengths, heads=heads))
    kinds = heads >> 56
    is_text = kinds == _TEXT
    unchanged = kinds == _UNCHANGED
    if not (is_text | unchanged | (kinds == _NULL)).all():
        msg = "tuple column that is neither text, null nor unchanged"
        raise ProtocolError(msg)
    lengths = np.where(is_text, lengths, 0)
    _check_lengths(lengths)
    texts = TextColumn(source, np.where(is_text, starts, at + 1), lengths, is_text, heads)
    return Field(texts, unchanged if unchanged.any() else None)


def walk_copy_rows(
    source: ByteBuffer, at: NDArray[np.int64], ends: NDArray[np.int64], columns: int
) -> list[TextColumn]:
    """Parse rows of a binary COPY, which must end at `ends`. Raises ProtocolError."""
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
        found.append(TextColumn(source, at + 4, lengths, present, words >> 8))
        at = at + (lengths + 4)
    if (at != ends).any():
        msg = "row's values do not fill its message"
        raise ProtocolError(msg)
    return found


def _check_counts(
    source: ByteBuffer, at: NDArray[np.int64], columns: int | NDArray[np.int64]
) -> NDArray[np.int64]:
    """Check that every tuple has its relation's number of columns; return the first's position."""
    counts = source.int16_at(at)
    differs = counts != columns
    if differs.any():
        row = differs.argmax()
        wrong, columns = int(counts[row]), int(np.broadcast_to(columns, counts.shape)[row])
        msg = f"tuple of {wrong} columns where the relation has {columns}"
        raise ProtocolError(msg)
    return at + 2


def _check_lengths(lengths: NDArray[np.int64]) -> None:
    """Refuse negative lengths. Positions then ascend, so checking the last one is enough."""
    if len(lengths) and lengths.min() < 0:
        msg = "negative length of a value"
        raise ProtocolError(msg)


def _check_ends(at: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
    if (at > ends).any():
        msg = "value reaches beyond its message"
        raise ProtocolError(msg)
