"""Decoding of columns that the server packed (see `ingestd.decode.copy.packing`) to `r` rows.

Source: PostgreSQL documentation, COPY, "Binary Format"; array_send
(src/backend/utils/adt/arrayfuncs.c): number of dimensions, whether there are nulls, element type;
for each dimension its length and lower bound; each element preceded by its length, which is -1 for
a null.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingestd.decode.change_batch import CdcColumns, Tuples, table_batch
from ingestd.decode.copy.packing import (
    ABSENT,
    BETWEEN,
    ColumnForm,
    FixedType,
    Packing,
    fields_of,
    fixed,
    form_of,
    width,
)
from ingestd.decode.copy.rows import CopyFields, Span
from ingestd.decode.values.calendar import date_text, timestamp_text
from ingestd.decode.values.dates import END_US, FIRST_DAY, FIRST_US
from ingestd.decode.values.encodings import Encoding
from ingestd.decode.values.text_column import ByteBuffer, Field, TextColumn, bitmap, texts_of
from ingestd.model.changes import SNAPSHOT, SNAPSHOT_SEQ, TableBatch
from ingestd.model.errors import ProtocolError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Column, Table

_LENGTH = struct.Struct(">i")
_INT8 = struct.Struct(">q")
_BETWEEN, _ABSENT = ord(BETWEEN), ord(ABSENT)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_DAYS_TO_2000 = 10_957
_US_TO_2000 = 946_684_800_000_000
_END_DAY = END_US // 86_400_000_000


class AmbiguousMarkError(ProtocolError):
    """A value looks like a mark, or is null in a column without nulls: its table was altered.

    Re-read from `next_block` on with Packing.MEASURED.
    """


@dataclass(frozen=True, slots=True)
class _Run:
    """One row of the COPY."""

    first_block: int
    rows: int
    fields: Sequence[Span]


_Places = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_] | None]
"""Starts and lengths of a run's values, and a mask of those present; None: all."""


class ColumnarDecoder:
    """Decodes one COPY of a table's packed columns, read at `point` and time `at` (aware).

    `next_block`: every row of the blocks below it has been returned. After an error it can't
    continue.
    """

    def __init__(
        self,
        table: Table,
        point: Lsn,
        at: datetime,
        blocks_per_run: int,
        packing: Packing,
        *,
        encoding: Encoding | None = None,
    ) -> None:
        self._encoding = encoding
        self._table = table
        self._point = int(point)
        self._at_us = (at - _EPOCH) // timedelta(microseconds=1)
        self._blocks_per_run = blocks_per_run
        self._packing = packing
        self._fields = CopyFields(f"packed columns of {table.id}", fields_of(table, packing))
        self.next_block = 0

    def feed(
        self, buffer: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> TableBatch | None:
        """Decode complete CopyData messages; return None if they have no row.

        Raises ProtocolError, AmbiguousMarkError.
        """
        if len(buffer) >= 1 << 31:  # Arrow's offsets
            raise self._malformed("buffer too large")
        runs = []
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            run = self._run(buffer, start, end)
            if run is not None:
                runs.append(run)
        if not runs:
            return None
        batch = self._rows(buffer, runs, int((ends - starts).sum()))
        self.next_block = runs[-1].first_block + self._blocks_per_run
        return batch

    def finish(self) -> None:
        """Raise ProtocolError if the trailer is missing: rows may be missing, too."""
        self._fields.finish()

    # --- framing -----------------------------------------------------------------------------

    def _run(self, buffer: bytes, at: int, end: int) -> _Run | None:
        fields = self._fields.row(buffer, at, end)
        if fields is None:
            return None
        try:
            (first_block,) = _INT8.unpack_from(buffer, fields[0][0])
            (rows,) = _LENGTH.unpack_from(buffer, fields[1][0])
        except struct.error as error:
            raise self._malformed("cut short") from error
        if rows <= 0:
            raise self._malformed("run without rows")
        return _Run(first_block, rows, fields[2:])

    def _malformed(self, what: str) -> ProtocolError:
        return self._fields.malformed(what)

    # --- columns -----------------------------------------------------------------------------

    def _rows(self, buffer: bytes, runs: Sequence[_Run], nbytes: int) -> TableBatch:
        table, count = self._table, sum(run.rows for run in runs)
        source = ByteBuffer(buffer, self._encoding)
        fields: dict[str, Field] = {}
        arrays: dict[str, pa.Array] = {}
        at = 0
        for column in table.columns:
            form = form_of(column)
            if form is ColumnForm.FIXED:
                numbers, absent = self._numbers(buffer, runs, at, column)
                array, refused = _fixed_array(column, numbers, absent)
                arrays[column.lake_name] = array
                if refused is not None:
                    fields[column.name] = Field(refused)
            elif column.mask is None or column.mask.kind != "null":
                texts = self._texts(source, runs, at, column)
                if form is ColumnForm.TEXT:
                    fields[column.name] = Field(texts)
                else:
                    arrays[column.lake_name] = texts.gather()
            at += width(column, self._packing)
        places = CdcColumns(
            np.full(count, ord(SNAPSHOT), np.uint8),
            np.full(count, self._point),
            np.full(count, SNAPSHOT_SEQ),
            None,
            np.full(count, self._at_us),
        )
        batch = table_batch(table, places, Tuples(fields), None, nbytes)
        if not arrays:
            return batch
        columns = [
            arrays.get(f.name, batch.rows.column(i)) for i, f in enumerate(batch.rows.schema)
        ]
        rows = pa.RecordBatch.from_arrays(columns, schema=batch.rows.schema)
        return TableBatch(table, rows, nbytes)

    def _numbers(
        self, buffer: bytes, runs: Sequence[_Run], field: int, column: Column
    ) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
        """Return a field of all runs as native numbers, and a mask of its nulls."""
        kind = fixed(column)
        if self._packing is Packing.MEASURED:
            parts = [self._array(buffer, run, field, np.dtype(kind.dtype)) for run in runs]
        else:
            parts = [self._marked(buffer, run, field, column, kind) for run in runs]
        numbers = np.concatenate([part.numbers for part in parts])
        return numbers, _all_of([part.absent for part in parts], runs, otherwise=False)

    def _array(self, buffer: bytes, run: _Run, field: int, kind: np.dtype[Any]) -> FixedArray:
        at, length = run.fields[field]
        try:
            return fixed_array(buffer, at, length, run.rows, kind)
        except ValueError as error:
            raise self._malformed(str(error)) from error

    def _marked(
        self, buffer: bytes, run: _Run, field: int, column: Column, kind: FixedType
    ) -> FixedArray:
        at, nbytes = run.fields[field]
        if nbytes != run.rows * kind.size:
            if not column.nullable and nbytes < run.rows * kind.size:
                raise self._ambiguous(column)
            raise self._malformed("values of another length")
        numbers = np.frombuffer(buffer, kind.dtype, run.rows, at)
        native = numbers.astype(numbers.dtype.newbyteorder("="))
        if not column.nullable or (count := self._count(buffer, run, field + 1)) == run.rows:
            return FixedArray(native, None)
        absent = numbers.view(f">u{kind.size}") == int.from_bytes(kind.mark)
        if np.count_nonzero(absent) != run.rows - count:
            raise self._ambiguous(column)
        native[absent] = 0
        return FixedArray(native, absent)

    def _count(self, buffer: bytes, run: _Run, field: int) -> int:
        at, nbytes = run.fields[field]
        count: int = _LENGTH.unpack_from(buffer, at)[0] if nbytes == _LENGTH.size else -1
        if not 0 <= count <= run.rows:
            raise self._malformed("another number of values than rows")
        return count

    def _texts(
        self, source: ByteBuffer, runs: Sequence[_Run], field: int, column: Column
    ) -> TextColumn:
        """Return the values of a column that has no fixed size, without copying."""
        is_marked = self._packing is Packing.MARKED and form_of(column) is ColumnForm.TEXT
        if is_marked:
            parts = [self._separated(source, run, field, column) for run in runs]
        else:
            parts = [self._measured(source, run, field) for run in runs]
        starts, lengths, present = zip(*parts, strict=True)
        kept = _all_of(present, runs, otherwise=True)
        return TextColumn(source, np.concatenate(starts), np.concatenate(lengths), kept)

    def _separated(self, source: ByteBuffer, run: _Run, field: int, column: Column) -> _Places:
        at, nbytes = run.fields[field]
        count = self._count(source.buffer, run, field + 1)
        if nbytes < 0:
            raise self._malformed("no texts")
        between = np.flatnonzero(source.data[at : at + nbytes] == _BETWEEN)
        if len(between) != run.rows - 1:
            raise self._ambiguous(column)
        starts = np.empty(run.rows, np.int64)
        starts[0], starts[1:] = at, between + (at + 1)
        lengths = np.append(between + at, at + nbytes) - starts
        if count == run.rows:
            return starts, lengths, None
        absent = (lengths == 1) & (source.bytes_at(starts) == _ABSENT)
        if np.count_nonzero(absent) != run.rows - count:
            raise self._ambiguous(column)
        return starts, np.where(absent, 0, lengths), ~absent

    def _measured(self, source: ByteBuffer, run: _Run, field: int) -> _Places:
        at, nbytes = run.fields[field]
        found = self._array(source.buffer, run, field + 1, np.dtype(">i4"))
        lengths = found.numbers.astype(np.int64)
        ends = np.cumsum(lengths)
        if lengths.min() < 0 or ends[-1] != max(nbytes, 0):
            raise self._malformed("lengths do not fill the values")
        return at + ends - lengths, lengths, None if found.absent is None else ~found.absent

    def _ambiguous(self, column: Column) -> AmbiguousMarkError:
        what = f"a value of {column.name!r} looks like a mark, or is null"
        return AmbiguousMarkError(f"{self._table.id}: {what}")


def _all_of(
    masks: Sequence[NDArray[np.bool_] | None], runs: Sequence[_Run], *, otherwise: bool
) -> NDArray[np.bool_] | None:
    """Join the masks of runs; None if there are none."""
    if all(mask is None for mask in masks):
        return None
    pairs = zip(masks, runs, strict=True)
    return np.concatenate([np.full(r.rows, otherwise) if m is None else m for m, r in pairs])


# --- values of a fixed size ------------------------------------------------------------------


def _fixed_array(
    column: Column, numbers: NDArray[Any], absent: NDArray[np.bool_] | None
) -> tuple[pa.Array, TextColumn | None]:
    """Return the column, and the texts of values that it can't hold, absent elsewhere."""
    to = column.type
    if pa.types.is_boolean(to):
        validity = None if absent is None else bitmap(~absent)
        buffers = [validity, bitmap(numbers != 0)]
        return pa.BooleanArray.from_buffers(to, len(numbers), buffers), None
    if pa.types.is_date(to):
        low, high, shift = FIRST_DAY - _DAYS_TO_2000, _END_DAY - _DAYS_TO_2000, _DAYS_TO_2000
    elif pa.types.is_timestamp(to):
        low, high, shift = FIRST_US - _US_TO_2000, END_US - _US_TO_2000, _US_TO_2000
    else:
        return pa.array(numbers, mask=absent, from_pandas=False).cast(to), None
    refused = (numbers < low) | (numbers >= high)
    if absent is not None:
        refused &= ~absent
    texts = None
    if refused.any():
        texts = _texts_of_refused(column, numbers, refused)
        absent = refused if absent is None else refused | absent
        numbers = np.where(refused, 0, numbers)
    return pa.array(numbers + numbers.dtype.type(shift), mask=absent).view(to), texts


def _texts_of_refused(
    column: Column, numbers: NDArray[Any], refused: NDArray[np.bool_]
) -> TextColumn:
    """Format those values as the server would. Few are distinct, so each is formatted once."""
    distinct, index = np.unique(numbers[refused], return_inverse=True)
    written = pa.array([_text(column, int(n), numbers.dtype) for n in distinct], pa.string())
    places = np.zeros(len(numbers), np.int64)
    places[refused] = index
    values = written.cast(pa.binary()).take(pa.array(places, mask=~refused))
    return texts_of(values)


def _text(column: Column, number: int, dtype: np.dtype[Any]) -> str:
    limits = np.iinfo(dtype)
    if number in {limits.min, limits.max}:
        return "infinity" if number > 0 else "-infinity"
    if pa.types.is_date(column.type):
        return date_text(number + _DAYS_TO_2000)
    zone = "" if column.type.tz is None else "+00"
    return timestamp_text(number + _US_TO_2000, zone)


# --- arrays --------------------------------------------------------------------------------------

_HEADER = struct.Struct(">iiiii")
_LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class FixedArray:
    """Native numbers, 0 where `absent`. `absent`: None if no value is null."""

    numbers: NDArray[Any]
    absent: NDArray[np.bool_] | None


def fixed_array(buffer: bytes, at: int, length: int, rows: int, kind: np.dtype[Any]) -> FixedArray:
    """Parse the array of `rows` values in these `length` bytes. Raises ValueError."""
    if length < _HEADER.size:
        raise ValueError("array cut short")
    dimensions, _, _, elements, _ = _HEADER.unpack_from(buffer, at)
    at, length = at + _HEADER.size, length - _HEADER.size
    stride = _LENGTH_BYTES + kind.itemsize
    nulls, rest = divmod(rows * stride - length, kind.itemsize)
    if dimensions != 1 or elements != rows or rest or not 0 <= nulls <= rows:
        raise ValueError("array of another length")
    absent = None
    # Without nulls the stride is constant, so strided views suffice.
    lengths = np.ndarray((rows,), ">i4", buffer, at, (stride,)) if nulls == 0 else None
    if lengths is not None:
        numbers = np.ndarray((rows,), kind, buffer, at + _LENGTH_BYTES, (stride,))
        numbers = numbers.astype(kind.newbyteorder("="))
    else:
        absent = _absent(buffer, at, length, rows, kind.itemsize)
        if np.count_nonzero(absent) != nulls:
            raise ValueError("array with another number of nulls")
        starts = (at + _LENGTH_BYTES) + np.cumsum(np.where(absent, _LENGTH_BYTES, stride)) - stride
        starts = starts[~absent]
        lengths = np.ndarray((len(buffer) - 3,), ">i4", buffer, 0, (1,))[starts - _LENGTH_BYTES]
        numbers = np.zeros(rows, kind.newbyteorder("="))
        if len(starts):
            window = np.ndarray((len(buffer) - kind.itemsize + 1,), kind, buffer, 0, (1,))
            numbers[~absent] = window[starts]
    if (lengths != kind.itemsize).any():
        raise ValueError("element of another length")
    return FixedArray(numbers, absent)


def _absent(buffer: bytes, at: int, length: int, rows: int, size: int) -> NDArray[np.bool_]:
    """Return a mask of the null elements, those with length -1; takes one step per null.

    Any -1 may be a length, or part of a value. Between two nulls all elements have the same size,
    so the next null is the next -1 at a multiple of it.
    """
    unit = math.gcd(_LENGTH_BYTES, size)
    stride, null = (_LENGTH_BYTES + size) // unit, _LENGTH_BYTES // unit
    words = np.ndarray(((length - _LENGTH_BYTES) // unit + 1,), "=i4", buffer, at, (unit,))
    found = np.flatnonzero(words == -1)
    following = np.full(len(found) + 1, len(found))  # the last represents the start
    after = np.append(found + null, 0)
    for phase in range(stride):
        here = np.flatnonzero(found % stride == phase)
        asking = np.flatnonzero(after % stride == phase)
        following[asking] = np.append(here, len(found))[np.searchsorted(found[here], after[asking])]
    steps, nulls = following.tolist(), []
    step = steps[-1]
    while step < len(found):
        nulls.append(step)
        step = steps[step]
    absent = np.zeros(rows, np.bool_)
    numbers = np.arange(len(nulls))
    elements = numbers + (found[nulls] - numbers * null) // stride
    absent[elements[elements < rows]] = True
    return absent
