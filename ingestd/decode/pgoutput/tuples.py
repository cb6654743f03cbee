"""Walking of tuples in many messages at once: by numpy, or by the compiled extension.

numpy (`walk_tuples`) locates the texts, column by column. The extension (`walk_typed`) also parses
simple types; it accepts the same values as `cast`, with the same results.

Source: PostgreSQL documentation, "Logical Replication Message Formats", TupleData; COPY, "Binary
Format", Tuples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingestd.decode import native
from ingestd.decode.change_batch import CastColumn, Tuples
from ingestd.decode.values.text_column import ByteBuffer, Field, TextColumn, bitmap
from ingestd.model.errors import ProtocolError
from ingestd.model.schema import TIMESTAMP, TIMESTAMP_NTZ, Column

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
    unfinished = len(parts)
    for column in range(widths[0]):
        while widths[unfinished - 1] <= column:
            unfinished -= 1
        here = at[: bounds[unfinished]]
        field = _walk_column(source, here)
        np.add(field.texts.starts, field.texts.lengths, out=here)
        for n in order[:unfinished]:
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


# --- by the compiled extension -----------------------------------------------------------------

# as in _native.c
_TEXTS, _INTEGER, _BOOLEAN, _DATE, _TIMESTAMP, _INSTANT, _DECIMAL = range(7)
_PRESENT, _ABSENT, _UNSENT, _ODD = range(4)

_NONE: NDArray[np.int64] = np.empty(0, np.int64)
_NONE_REFUSED = _NONE, TextColumn(ByteBuffer(b""), _NONE, _NONE)

_MOST_DIGITS = 18
"""Of a decimal, so that it fits 64 bits."""
_KINDS = {
    pa.int8(): _INTEGER,
    pa.int16(): _INTEGER,
    pa.int32(): _INTEGER,
    pa.int64(): _INTEGER,
    pa.bool_(): _BOOLEAN,
    pa.date32(): _DATE,
    TIMESTAMP_NTZ: _TIMESTAMP,
    TIMESTAMP: _INSTANT,
}


def walk_typed(
    source: ByteBuffer, part: TupleRange, wanted: Sequence[Column | None]
) -> tuple[Tuples, NDArray[np.int64]] | None:
    """Walk all tuples; return them, texts or cast, and where each one stops.

    `wanted`: one item per column of the relation, None to skip it. The result is None without the
    compiled extension, or for a malformed tuple; `walk_tuples` reports details.
    """
    if native.compiled is None:
        return None
    outputs = [None if column is None else _output(column, len(part.at)) for column in wanted]
    stops = _walk(native.compiled, source, part, outputs)
    if stops is None:
        return None
    typed = {n: o for n, o in enumerate(outputs) if o is not None and o.kind != _TEXTS}
    unsent = [n for n, output in typed.items() if output.has(_UNSENT)]
    odd = [n for n, output in typed.items() if output.has(_ODD) and not output.has(_UNSENT)]
    rows = _rows_with([typed[n].states == _ODD for n in odd])
    some = TupleRange(part.at[rows], part.ends[rows], part.columns)
    texts = _fields(native.compiled, source, part, unsent)
    refusable = _fields(native.compiled, source, some, odd)
    fields: dict[str, Field] = {}
    values: dict[str, CastColumn] = {}
    for n, (column, output) in enumerate(zip(wanted, outputs, strict=True)):
        if column is None or output is None:
            continue
        if output.kind == _TEXTS:
            fields[column.name] = output.field(source)
        elif n in texts:
            fields[column.name] = texts[n]
        else:
            refused = _NONE_REFUSED
            if n in refusable:
                own = np.flatnonzero(output.states[rows] == _ODD)
                refused = rows[own], refusable[n].texts[own]
            values[column.name] = CastColumn(output.array(column.type), *refused)
    return Tuples(fields, values=values), stops


@dataclass(slots=True)
class _Output:
    """The output of a column; bit n of `seen` is set if a value had state n."""

    kind: int
    values: NDArray[Any]
    states: NDArray[np.uint8]
    lengths: NDArray[np.int64] | None = None
    precision: int = 0
    scale: int = 0
    seen: int = 0

    @property
    def argument(self) -> native.Output:
        size = self.values.itemsize * (2 if self.kind == _DECIMAL else 1)
        return (
            *(self.kind, size, self.precision, self.scale),
            *(self.values, self.lengths, self.states),
        )

    def has(self, state: int) -> bool:
        return bool(self.seen >> state & 1)

    @property
    def present(self) -> NDArray[np.bool_] | None:
        return None if self.seen <= 1 << _PRESENT else self.states == _PRESENT

    def field(self, source: ByteBuffer) -> Field:
        assert self.lengths is not None
        unchanged = self.states == _UNSENT if self.has(_UNSENT) else None
        return Field(TextColumn(source, self.values, self.lengths, self.present), unchanged)

    def array(self, to: pa.DataType) -> pa.Array:
        present = self.present
        validity = None if present is None else bitmap(present)
        is_bits = self.kind == _BOOLEAN
        data = bitmap(self.values.view(np.bool_)) if is_bits else pa.py_buffer(self.values)
        return pa.Array.from_buffers(to, len(self.states), [validity, data])


def _output(column: Column, rows: int) -> _Output:
    to = column.type
    if column.mask is not None or column.is_override:
        return _texts(rows)
    states = np.empty(rows, np.uint8)
    if pa.types.is_decimal128(to) and 0 <= to.scale <= to.precision <= _MOST_DIGITS:
        values = np.empty((rows, 2), np.int64)
        return _Output(_DECIMAL, values, states, precision=to.precision, scale=to.scale)
    if to not in _KINDS:
        return _texts(rows)
    width = 1 if pa.types.is_boolean(to) else to.bit_width // 8
    return _Output(_KINDS[to], np.empty(rows, f"i{width}"), states)


def _texts(rows: int) -> _Output:
    starts, lengths = np.empty(rows, np.int64), np.empty(rows, np.int64)
    return _Output(_TEXTS, starts, np.empty(rows, np.uint8), lengths)


def _walk(
    compiled: native.NativeFunctions,
    source: ByteBuffer,
    part: TupleRange,
    outputs: Sequence[_Output | None],
) -> NDArray[np.int64] | None:
    """Fill the outputs, and return where each tuple ends; None if one is malformed."""
    at = np.ascontiguousarray(part.at, np.int64)
    ends = np.ascontiguousarray(part.ends, np.int64)
    stops = np.empty_like(at)
    arguments = [None if output is None else output.argument for output in outputs]
    malformed, seen = compiled.walk(source.buffer, at, ends, stops, arguments)
    if malformed >= 0:
        return None
    for output, states in zip(outputs, seen, strict=True):
        if output is not None:
            output.seen = states
    return stops


def _fields(
    compiled: native.NativeFunctions, source: ByteBuffer, part: TupleRange, columns: Sequence[int]
) -> dict[int, Field]:
    """Return these columns' texts for tuples that have been walked before."""
    if not columns:
        return {}
    found = {n: _texts(len(part.at)) for n in columns}
    _walk(compiled, source, part, [found.get(n) for n in range(part.columns)])
    return {n: output.field(source) for n, output in found.items()}


def _rows_with(masks: Sequence[NDArray[np.bool_]]) -> NDArray[np.int64]:
    return np.flatnonzero(np.logical_or.reduce(masks)) if masks else _NONE
