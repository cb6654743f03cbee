"""Unpacking of a binary COPY with one replication message per row (a drain), vectorized.

Source: PostgreSQL documentation, COPY, "Binary Format".
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from ingestd.decode.copy.rows import CopyFields

Ints = NDArray[np.int64]

_ROW = struct.Struct(">hi")  # the number of fields, the length of the only one


class MessageRows:
    """Unpacks one COPY. After a ProtocolError it can't continue."""

    def __init__(self) -> None:
        self._fields = CopyFields("messages", 1)

    def unpack(self, buffer: bytes, starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
        """Return the starts and ends of the messages in `buffer` (int64, ascending).

        `starts` and `ends` delimit complete CopyData messages. Raises ProtocolError.
        """
        begins = starts + _ROW.size
        found = _are_rows(buffer, starts, ends)
        if not self._fields.has_begun:
            found[:1] = False
        if self._fields.has_ended:
            found[:] = False
        for n in np.flatnonzero(~found).tolist():  # the first has the header, the last has no row
            row = self._fields.row(buffer, int(starts[n]), int(ends[n]))
            if row is not None:
                [(begins[n], length)] = row
                if length < 1:
                    raise self._fields.malformed("an empty message")
                found[n] = True
            elif self._fields.has_ended and n + 1 < len(starts):
                raise self._fields.malformed("a row after the trailer")
        return begins[found], ends[found]

    def finish(self) -> None:
        """Raise ProtocolError if the trailer is missing: messages may be missing, too."""
        self._fields.finish()


def _are_rows(buffer: bytes, starts: Ints, ends: Ints) -> NDArray[np.bool_]:
    """Return a mask of the CopyData messages that are exactly a row of one field."""
    whole = ends - starts > _ROW.size
    at = starts[whole]
    counts = np.ndarray((max(len(buffer) - 1, 0),), ">i2", buffer, 0, (1,))[at]
    lengths = np.ndarray((max(len(buffer) - 3, 0),), ">i4", buffer, 0, (1,))[at + 2]
    whole[whole] = (counts == 1) & (lengths == ends[whole] - at - _ROW.size)
    return whole
