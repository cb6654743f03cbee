"""Walking of one relation's tuples with the compiled extension, which also parses simple types.

It accepts the same values as `cast`, with the same results. What it can't parse is left to `cast`
and to `walk_tuples`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingestd.decode import native
from ingestd.decode.change_batch import CastColumn
from ingestd.decode.pgoutput.tuples import TupleRange
from ingestd.decode.values.text_column import ByteBuffer, Field, TextColumn, bitmap
from ingestd.model.schema import TIMESTAMP, TIMESTAMP_NTZ, Column

# as in _native.c
_TEXT, _INTEGER, _BOOLEAN, _DATE, _TIMESTAMP, _INSTANT, _DECIMAL = range(7)
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


@dataclass(slots=True)
class TypedTuples:
    """Columns by name: as texts, or cast. `stops` (int64): where each tuple ends."""

    stops: NDArray[np.int64]
    fields: dict[str, Field] = field(default_factory=dict)
    values: dict[str, CastColumn] = field(default_factory=dict)


def walk_typed(
    source: ByteBuffer, part: TupleRange, wanted: Sequence[Column | None]
) -> TypedTuples | None:
    """Walk all tuples. `wanted`: one item per column of the relation, None to skip it.

    None without the compiled extension, or for a malformed tuple; `walk_tuples` reports details.
    """
    if native.compiled is None:
        return None
    outputs = [None if column is None else _output(column, len(part.at)) for column in wanted]
    stops = _walk(native.compiled, source, part, outputs)
    if stops is None:
        return None
    typed = {n: o for n, o in enumerate(outputs) if o is not None and o.kind != _TEXT}
    unsent = [n for n, output in typed.items() if output.has(_UNSENT)]
    odd = [n for n, output in typed.items() if output.has(_ODD) and not output.has(_UNSENT)]
    rows = _rows_with([typed[n].states == _ODD for n in odd])
    some = TupleRange(part.at[rows], part.ends[rows], part.columns)
    texts = _fields(native.compiled, source, part, unsent)
    refusable = _fields(native.compiled, source, some, odd)
    found = TypedTuples(stops)
    for n, (column, output) in enumerate(zip(wanted, outputs, strict=True)):
        if column is None or output is None:
            continue
        if output.kind == _TEXT:
            found.fields[column.name] = output.field(source)
        elif n in texts:
            found.fields[column.name] = texts[n]
        else:
            refused = _NONE_REFUSED
            if n in refusable:
                own = np.flatnonzero(output.states[rows] == _ODD)
                refused = rows[own], refusable[n].texts[own]
            found.values[column.name] = CastColumn(output.array(column.type), *refused)
    return found


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
    return _Output(_TEXT, starts, np.empty(rows, np.uint8), lengths)


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
