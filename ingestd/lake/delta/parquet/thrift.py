"""The Thrift structures of a Parquet file, read without building what they describe.

Three bytes of a footer may be 800 bytes in memory, so they are measured before pyarrow builds them.
Source: Thrift, "Compact protocol encoding"; Parquet format, `FileMetaData` and `PageHeader`.
"""

from __future__ import annotations

from typing import Any

_TRUE, _FALSE, _BYTE, _I64, _DOUBLE, _BINARY = 1, 2, 3, 6, 7, 8
_LIST, _SET, _MAP, _STRUCT, _UUID = 9, 10, 11, 12, 13
_FIXED = {_BYTE: 1, _DOUBLE: 8, _UUID: 16}
_MOST_DEPTH = 16
_MOST_BITS = 70
_NUMBER_BYTES, _TEXT_BYTES, _STRUCT_BYTES, _INNER_BYTES = 8, 32, 800, 128
"""In memory. Measured with pyarrow 26: a column of a row group takes 730 bytes."""
_OUTER = 2
"""A footer has lists of row groups, and these of columns; lists inside these have small parts."""


class FootprintError(ValueError):
    """The structures take more memory than they may."""


class Structures:
    """Thrift structures in `content` that may take `most_bytes` in memory."""

    def __init__(self, content: bytes, most_bytes: int) -> None:
        self._content = content
        self._left = most_bytes
        self.columns: list[dict[int, Any]] = []
        """Structures of lists that are in structures of a list, as columns in row groups are."""

    def read(self, at: int, depth: int = 0, lists: int = 0) -> tuple[dict[int, Any], int]:
        """Return the fields of a structure by id, and where it ends.

        These are its numbers and structures, and how many values its lists have.
        Raise IndexError if it is truncated, ValueError if it is damaged or too large.
        """
        if depth > _MOST_DEPTH:
            msg = "too deep"
            raise ValueError(msg)
        content = self._content
        found: dict[int, Any] = {}
        field = 0
        while kind := (head := content[at]) & 15:
            at += 1
            if head > 15:  # noqa: PLR2004 - the upper half is a difference
                field += head >> 4
            else:
                number, at = self._varint(at)
                field = (number >> 1) ^ -(number & 1)
            if _BYTE < kind <= _I64:
                number = content[at]
                at += 1
                if number > 127:  # noqa: PLR2004 - more bytes follow
                    number, at = self._varint(at - 1)
                found[field] = (number >> 1) ^ -(number & 1)
            elif kind == _STRUCT:
                found[field], at = self.read(at, depth + 1, lists)
            elif kind <= _FALSE:
                found[field] = kind == _TRUE
            else:
                if kind == _LIST:
                    found[field] = self._count(at)[0]
                at = self._skip(kind, at, depth + 1, lists)
        return found, at + 1

    def _skip(self, kind: int, at: int, depth: int, lists: int) -> int:
        """Return where a value ends that is no field's boolean."""
        if kind in _FIXED:
            return at + _FIXED[kind]
        if kind <= _I64:
            self._take(_NUMBER_BYTES)
            return self._varint(at)[1] if kind > _BYTE else at + 1
        if kind == _BINARY:
            nbytes, at = self._varint(at)
            self._take(_TEXT_BYTES + nbytes)
            return at + nbytes
        if kind == _STRUCT:
            self._take(_STRUCT_BYTES if lists <= _OUTER else _INNER_BYTES)
            found, at = self.read(at, depth, lists)
            if lists == _OUTER:
                self.columns.append(found)
            return at
        if kind not in {_LIST, _SET}:  # a map; Parquet has none
            msg = f"a value of the type {kind}"
            raise ValueError(msg)
        head = self._content[at]
        count, at = self._count(at)
        if count > len(self._content) - at:
            raise IndexError
        for _ in range(count):
            at = self._skip(head & 15, at, depth + 1, lists + 1)
        return at

    def _count(self, at: int) -> tuple[int, int]:
        """Return how many values a list has, and where they begin."""
        count = self._content[at] >> 4
        return (count, at + 1) if count < 15 else self._varint(at + 1)  # noqa: PLR2004 - it follows

    def _take(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            raise FootprintError

    def _varint(self, at: int) -> tuple[int, int]:
        number = bits = 0
        while True:
            byte = self._content[at]
            at += 1
            number |= (byte & 127) << bits
            if byte < 128:  # noqa: PLR2004 - the last one
                return number, at
            bits += 7
            if bits > _MOST_BITS:
                msg = "a number of too many bytes"
                raise ValueError(msg)
