"""Messages that the server packed, many to a row: back to a buffer and the messages' ranges.

A row of the COPY has the messages joined, and the array of their lengths (not null, one dimension);
null instead of messages that are too large together.
Source: array_send (src/backend/utils/adt/arrayfuncs.c).
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from ingestd.decode.copy_fields import CopyFields, Span
from ingestd.errors import ProtocolError

_ARRAY = struct.Struct(">iiiii")  # dimensions, has nulls, element type, length, lower bound
_ELEMENT = np.dtype([("length", ">i4"), ("value", ">i4")])
_INT4, _INT4_BYTES = 23, 4


class PackedTooLargeError(ProtocolError):
    """The server left a row's messages out, because they are large: they are to be packed anew."""


class PackedMessages:
    """Unpacks one COPY. After a ProtocolError it can't go on."""

    def __init__(self) -> None:
        self._fields = CopyFields("packed messages", 2)

    def unpack(
        self, buffer: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Give where the messages begin and end in `buffer` (int64, ascending).

        `starts` and `ends` cut it into whole CopyData messages. Raises ProtocolError;
        PackedTooLargeError where messages were left out.
        """
        rows = [
            self._row(buffer, row)
            for at, end in zip(starts.tolist(), ends.tolist(), strict=True)
            if (row := self._fields.row(buffer, at, end)) is not None
        ]
        if not rows:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        first, last = zip(*rows, strict=True)
        return np.concatenate(first), np.concatenate(last)

    def finish(self) -> None:
        """Raise ProtocolError if the trailer did not come: messages may be missing."""
        self._fields.finish()

    def _row(self, buffer: bytes, row: list[Span]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        (at, size), (array_at, array_size) = row
        if array_size < _ARRAY.size:
            raise self._fields.malformed("no array of lengths")
        dimensions, has_nulls, element, count, _ = _ARRAY.unpack_from(buffer, array_at)
        if (
            (dimensions, has_nulls, element) != (1, 0, _INT4)
            or count < 1
            or array_size != _ARRAY.size + count * _ELEMENT.itemsize
        ):
            raise self._fields.malformed("not an array of lengths")
        elements = np.frombuffer(buffer, _ELEMENT, count, array_at + _ARRAY.size)
        lengths = elements["value"].astype(np.int64)
        if size < 0:
            msg = f"packed messages: {lengths.sum()} bytes in a row were left out"
            raise PackedTooLargeError(msg)
        if (
            (elements["length"] != _INT4_BYTES).any()
            or (lengths < 1).any()
            or lengths.sum() != size
        ):
            raise self._fields.malformed("lengths do not fill the messages")
        ends = at + np.cumsum(lengths)
        return ends - lengths, ends
