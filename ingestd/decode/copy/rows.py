"""Decoding of COPY ... TO STDOUT (FORMAT binary): text columns to `r` rows; fields row by row.

Source: PostgreSQL documentation, COPY, "Binary Format". Each column of a query for `CopyDecoder`
must be the text of its type's output function, so that snapshots and the stream share one mapping
of types.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
from numpy.typing import NDArray

from ingestd.decode.change_batch import CdcColumns, Tuples, table_batch
from ingestd.decode.pgoutput.tuples import walk_copy_rows
from ingestd.decode.values.encodings import Encoding
from ingestd.decode.values.text_column import ByteBuffer, Field, TextColumn
from ingestd.model.changes import SNAPSHOT, SNAPSHOT_SEQ, TableBatch
from ingestd.model.errors import ProtocolError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table

_SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_HEADER = struct.Struct(">11sii")
_TRAILER = b"\xff\xff"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Rows of a COPY: their number, their size in bytes, and their columns."""

    count: int
    nbytes: int
    columns: list[TextColumn]


class CopyRows:
    """Cuts one COPY of `columns` texts per row into fields. Unusable after a ProtocolError.

    `what` names the copied object in errors. `encoding`: of texts, None for UTF-8.
    """

    def __init__(self, what: str, columns: int, encoding: Encoding | None = None) -> None:
        self._encoding = encoding
        self._what = what
        self._columns = columns
        self._begun = self._ended = False

    def feed(
        self, buffer: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> CopiedRows | None:
        """Parse complete CopyData messages, one row each; return None if there is no row.

        The header arrives with the first message, or alone. Raises ProtocolError.
        """
        if len(starts) == 0:
            return None
        if (
            starts[0] < 0
            or ends[-1] > len(buffer)
            or (starts >= ends).any()
            or (starts[1:] < ends[:-1]).any()
            or len(buffer) >= 1 << 31
        ):
            msg = "COPY messages empty, overlapping or outside their buffer"
            raise ProtocolError(msg)
        if self._ended:
            msg = "COPY data after its trailer"
            raise ProtocolError(msg)
        view = memoryview(buffer)  # a row may be as large as memory allows
        if not self._begun:
            starts = starts.copy()
            starts[0] += _header_length(view[int(starts[0]) : int(ends[0])])
            self._begun = True
            if starts[0] == ends[0]:
                starts, ends = starts[1:], ends[1:]
        if len(starts) and view[int(starts[-1]) : int(ends[-1])] == _TRAILER:
            self._ended = True
            starts, ends = starts[:-1], ends[:-1]
        if not len(starts):
            return None
        columns = walk_copy_rows(ByteBuffer(buffer, self._encoding), starts, ends, self._columns)
        return CopiedRows(len(starts), int((ends - starts).sum()), columns)

    def finish(self) -> None:
        """Raise ProtocolError if the trailer is missing: rows may be missing, too."""
        if not self._ended:
            msg = f"COPY of {self._what} ended without its trailer"
            raise ProtocolError(msg)


class CopyDecoder:
    """Decodes one COPY of a table's columns, in the table's order, read at `point` and time `at`.

    `at` is aware. After a ProtocolError it can't continue.
    """

    def __init__(
        self, table: Table, point: Lsn, at: datetime, encoding: Encoding | None = None
    ) -> None:
        self._table = table
        self._point = int(point)
        self._at_us = microseconds(at)
        self._rows = CopyRows(str(table.id), len(table.columns), encoding)

    def feed(
        self, buffer: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> TableBatch | None:
        """Decode complete CopyData messages; see `CopyRows.feed`."""
        rows = self._rows.feed(buffer, starts, ends)
        if rows is None:
            return None
        count = rows.count
        fields = {c.name: Field(t) for c, t in zip(self._table.columns, rows.columns, strict=True)}
        places = CdcColumns(
            np.full(count, ord(SNAPSHOT), np.uint8),
            np.full(count, self._point),
            np.full(count, SNAPSHOT_SEQ),
            None,
            np.full(count, self._at_us),
        )
        return table_batch(self._table, places, Tuples(fields), None, rows.nbytes)

    def finish(self) -> None:
        """Raise ProtocolError if the trailer is missing: rows may be missing, too."""
        self._rows.finish()


def microseconds(at: datetime) -> int:
    """Return an aware time as microseconds since 1970 UTC."""
    return (at - _EPOCH) // timedelta(microseconds=1)


def _header_length(message: memoryview) -> int:
    """Check the header and return its length. Flags in the upper half are critical and unknown."""
    try:
        signature, flags, extension = _HEADER.unpack_from(message)
    except struct.error as error:
        msg = "COPY data without its header"
        raise ProtocolError(msg) from error
    length: int = _HEADER.size + extension
    if signature != _SIGNATURE or flags >> 16 or extension < 0 or length > len(message):
        msg = "malformed header of COPY data"
        raise ProtocolError(msg)
    return length


# --- fields, row by row --------------------------------------------------------------------------

_COUNT = struct.Struct(">h")
_LENGTH = struct.Struct(">i")
_TRAILER_COUNT = -1

Span = tuple[int, int]
"""The offset and length of a field; length -1 for null."""


class CopyFields:
    """Locates the fields of one COPY, message by message. `width`: the number of columns.

    `what` names it in errors. `has_begun`: the header has arrived; `has_ended`: the trailer has.
    After a ProtocolError it can't continue.
    """

    def __init__(self, what: str, width: int) -> None:
        self._what = what
        self._width = width
        self.has_begun = self.has_ended = False

    def row(self, buffer: bytes, at: int, end: int) -> list[Span] | None:
        """Return the fields of the message in `buffer[at:end]`; None if it has no row."""
        if self.has_ended:
            raise self.malformed("data after the trailer")
        try:
            if not self.has_begun:
                at = self._after_header(buffer, at)
            if at == end:
                return None
            (width,) = _COUNT.unpack_from(buffer, at)
            at += _COUNT.size
            if width == _TRAILER_COUNT:
                self.has_ended = True
                return None
            if width != self._width:
                raise self.malformed("wrong number of fields")
            spans = []
            for _ in range(width):
                (length,) = _LENGTH.unpack_from(buffer, at)
                at += _LENGTH.size
                spans.append((at, length))
                at += max(length, 0)
        except struct.error as error:
            raise self.malformed("cut short") from error
        if at != end or any(length < -1 for _, length in spans):
            raise self.malformed("fields do not fill the message")
        return spans

    def finish(self) -> None:
        """Raise ProtocolError if the trailer is missing: rows may be missing, too."""
        if not self.has_ended:
            raise self.malformed("no trailer")

    def malformed(self, what: str) -> ProtocolError:
        """Return the error for malformed data."""
        return ProtocolError(f"{self._what}: {what}")

    def _after_header(self, buffer: bytes, at: int) -> int:
        signature, flags, extension = _HEADER.unpack_from(buffer, at)
        if signature != _SIGNATURE or flags >> 16 or extension < 0:
            raise self.malformed("wrong header")
        self.has_begun = True
        return at + _HEADER.size + int(extension)
