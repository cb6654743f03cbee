"""Columns packed by the server (see `ingestd.decode.packing`) to `r` rows.

Source: PostgreSQL documentation, COPY, "Binary Format". The binary form of an array is that of
array_send (src/backend/utils/adt/arrayfuncs.c): number of dimensions, whether there are nulls,
element type; for each dimension its length and lower bound; each element behind its length.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingestd.changes import SNAPSHOT, SNAPSHOT_SEQ, TableBatch
from ingestd.decode.calendar import date_text, timestamp_text
from ingestd.decode.copy_fields import CopyFields, Span
from ingestd.decode.dates import END_US, FIRST_DAY, FIRST_US
from ingestd.decode.packing import BITS, Form, fixed, flag_fields, flagged, form_of
from ingestd.decode.rows import Places, Tuples, table_batch
from ingestd.decode.texts import Source, Texts, bitmap, texts_of
from ingestd.decode.tuples import Field
from ingestd.errors import ProtocolError
from ingestd.positions import Lsn
from ingestd.schema import Column, Table

_LENGTH = struct.Struct(">i")
_INT8 = struct.Struct(">q")
_ARRAY = struct.Struct(">iiiii")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_DAYS_TO_2000 = 10_957
_US_TO_2000 = 946_684_800_000_000
_END_DAY = END_US // 86_400_000_000


class UnexpectedNullError(ProtocolError):
    """A column that can't be null is null after all: its table was altered. Read rows instead."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One row of the COPY."""

    first_block: int
    rows: int
    fields: Sequence[Span]


class ColumnarDecoder:
    """Decodes one COPY of a table's packed columns, read at `point` and time `at` (aware).

    `next_block`: every row of the blocks below it has been given. After an error it can't go on.
    """

    def __init__(self, table: Table, point: Lsn, at: datetime, blocks_per_run: int) -> None:
        self._table = table
        self._point = int(point)
        self._at_us = (at - _EPOCH) // timedelta(microseconds=1)
        self._blocks_per_run = blocks_per_run
        self._flags = flag_fields(table)
        forms = [form_of(c) for c in table.columns]
        width = 2 + self._flags + sum(1 if f is Form.FIXED else 2 for f in forms)
        self._fields = CopyFields(f"packed columns of {table.id}", width)
        self.next_block = 0

    def feed(
        self, buffer: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> TableBatch | None:
        """Decode whole CopyData messages; None if they have no row.

        Raises ProtocolError, UnexpectedNullError.
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
        """Raise ProtocolError if the trailer did not come: rows may be missing."""
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
        nulls = self._nulls(buffer, runs)
        source = Source(buffer)
        fields: dict[str, Field] = {}
        arrays: dict[str, pa.Array] = {}
        at = self._flags
        for column in table.columns:
            form = form_of(column)
            if form is Form.FIXED:
                absent = nulls.get(column.name)
                raw = self._numbers(buffer, runs, at, fixed(column).dtype)
                array, refused = _fixed_array(column, raw, absent)
                arrays[column.lake_name] = array
                if refused is not None:
                    fields[column.name] = Field(refused)
                at += 1
                continue
            if column.mask is not None and column.mask.kind == "null":
                at += 2
                continue
            texts = self._texts(source, runs, at)
            if form is Form.TEXT:
                fields[column.name] = Field(texts)
            else:
                arrays[column.lake_name] = texts.gather()
            at += 2
        places = Places(
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

    def _nulls(self, buffer: bytes, runs: Sequence[_Run]) -> dict[str, NDArray[np.bool_]]:
        found = {}
        words = [self._numbers(buffer, runs, i, ">i4") for i in range(self._flags)]
        for i, column in enumerate(flagged(self._table)):
            flags = words[i // BITS] >> i % BITS & 1
            if flags.any():
                found[column.name] = flags.astype(np.bool_)
        return found

    def _numbers(self, buffer: bytes, runs: Sequence[_Run], field: int, dtype: str) -> NDArray[Any]:
        """Give a field of all runs as numbers of the machine's byte order."""
        kind = np.dtype(dtype)
        parts = [self._array(buffer, run.fields[field], run.rows, kind) for run in runs]
        return np.concatenate(parts, dtype=kind.newbyteorder("="))

    def _array(self, buffer: bytes, span: Span, rows: int, kind: np.dtype[Any]) -> NDArray[Any]:
        at, length = span
        stride = _LENGTH.size + kind.itemsize
        if length < _ARRAY.size:
            raise self._malformed("array cut short")
        dimensions, has_nulls, _, elements, _ = _ARRAY.unpack_from(buffer, at)
        if has_nulls:
            raise UnexpectedNullError(f"{self._table.id}: null in a column that is NOT NULL")
        if dimensions != 1 or elements != rows or length != _ARRAY.size + rows * stride:
            raise self._malformed("array of another length")
        at += _ARRAY.size
        lengths = np.ndarray((rows,), ">i4", buffer, at, (stride,))
        if (lengths != kind.itemsize).any():
            raise self._malformed("element of another length")
        return np.ndarray((rows,), kind, buffer, at + _LENGTH.size, (stride,))

    def _texts(self, source: Source, runs: Sequence[_Run], field: int) -> Texts:
        """Give the values of a column that has no fixed size; nothing is copied."""
        all_starts, all_lengths = [], []
        for run in runs:
            at, nbytes = run.fields[field]
            kind = np.dtype(">i4")
            lengths = self._array(source.buffer, run.fields[field + 1], run.rows, kind)
            lengths = lengths.astype(np.int64)
            sizes = np.maximum(lengths, 0)
            ends = np.cumsum(sizes)
            if lengths.min() < -1 or ends[-1] != max(nbytes, 0):
                raise self._malformed("lengths do not fill the values")
            all_starts.append(at + ends - sizes)
            all_lengths.append(lengths)
        lengths = np.concatenate(all_lengths)
        present = lengths >= 0
        if present.all():
            return Texts(source, np.concatenate(all_starts), lengths)
        return Texts(source, np.concatenate(all_starts), np.maximum(lengths, 0), present)


# --- values of a fixed size ------------------------------------------------------------------


def _fixed_array(
    column: Column, numbers: NDArray[Any], absent: NDArray[np.bool_] | None
) -> tuple[pa.Array, Texts | None]:
    """Give the column; and the texts of what it can't hold, absent elsewhere."""
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


def _texts_of_refused(column: Column, numbers: NDArray[Any], refused: NDArray[np.bool_]) -> Texts:
    """Write those values as the server would; a few distinct ones, so each is written once."""
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
