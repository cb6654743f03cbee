"""The fields of a binary COPY, row by row; each message is one row.

Source: PostgreSQL documentation, COPY, "Binary Format".
"""

from __future__ import annotations

import struct

from ingestd.model.errors import ProtocolError

_SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_HEADER = struct.Struct(">11sii")
_COUNT = struct.Struct(">h")
_LENGTH = struct.Struct(">i")
_TRAILER = -1

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
            if width == _TRAILER:
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
