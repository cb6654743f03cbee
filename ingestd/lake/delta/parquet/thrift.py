"""The Thrift structures of a Parquet file, read without building what they describe.

Three bytes of a footer may be 800 bytes in memory, so they are measured before pyarrow builds them.

Generated readers, such as pyarrow's, are lax: they wrap the number of a field to 16 bits, skip a
field of another type than the format's, let a repeated one replace the first, and read the values
of a list as those that the format has there, whatever the list says. So what they see could differ
from what is measured here. All of that is refused: no writer produces it.
Source: Thrift, "Compact protocol encoding"; Parquet format, `FileMetaData` and `PageHeader`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BOOL, I32, BINARY = 1, 5, 8
_FALSE, _BYTE, _I16, _I64, _DOUBLE, _LIST, _STRUCT = 2, 3, 4, 6, 7, 9, 12
_FIXED = {BOOL: 1, _FALSE: 1, _BYTE: 1, _DOUBLE: 8}
_BITS = {_I16: 16, I32: 32, _I64: 64}
_FIELDS = range(1, 1 << 15)
Shape = Mapping[int, Any]
"""The type of fields by id: a number of BOOL to BINARY, the Shape of a structure, or a list of one
of these: a list of such values. It has all lists of the format; other fields may have any type."""
_MOST_DEPTH = 16
_MOST_BITS = 70
_NUMBER_BYTES, _TEXT_BYTES, _STRUCT_BYTES, _INNER_BYTES = 8, 32, 800, 128
"""In memory. Measured with pyarrow 26: a column of a row group takes 730 bytes."""
_OUTER = 2
"""A footer has lists of row groups, and these of columns; lists inside these have small parts."""


class FootprintError(ValueError):
    """The structures take more memory than they may."""


class Structures:
    """Thrift structures in `content` that may take `most_bytes` in memory.

    `collected`: the Shape of those in a list that `found` has. `located`: the Shape of the lists
    that `places` has.
    """

    def __init__(
        self,
        content: bytes,
        most_bytes: int,
        collected: Shape | None = None,
        located: list[Shape] | None = None,
    ) -> None:
        self._content = content
        self._left = most_bytes
        self._collected = collected
        self._located = located
        self.found: list[dict[int, Any]] = []
        """The fields of the structures with that very Shape, in their order."""
        self.places: list[tuple[int, int]] = []
        """Where the lists with that very Shape begin and end."""

    def read(
        self, at: int, shape: Shape, depth: int = 0, lists: int = 0
    ) -> tuple[dict[int, Any], int]:
        """Return the fields of a structure by id, and where it ends.

        These are its numbers and structures, and the lengths of its lists and texts.
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
            expected = shape.get(field)
            if field in found or field not in _FIELDS:
                msg = f"the field {field}, which is repeated or out of range"
                raise ValueError(msg)
            if expected is not None:
                _ensure_kind(BOOL if kind == _FALSE else kind, expected)
            if _BYTE < kind <= _I64:
                number = content[at]
                at += 1
                if number > 127:  # noqa: PLR2004 - more bytes follow
                    number, at = self._varint(at - 1, _BITS[kind])
                found[field] = (number >> 1) ^ -(number & 1)
            elif kind == _STRUCT:
                found[field], at = self.read(at, expected or {}, depth + 1, lists)
            elif kind <= _FALSE:
                found[field] = kind == BOOL
            else:
                found[field] = self._length(kind, at)
                at = self._skip(kind, at, expected, depth + 1, lists)
        return found, at + 1

    def _skip(self, kind: int, at: int, expected: Any, depth: int, lists: int) -> int:  # noqa: ANN401
        """Return where a value ends that is no field's boolean. `expected`: see `Shape`."""
        if kind in _FIXED:
            self._take(_NUMBER_BYTES)
            return at + _FIXED[kind]
        if kind in _BITS:
            self._take(_NUMBER_BYTES)
            return self._varint(at)[1]
        if kind == BINARY:
            nbytes, at = self._varint(at)
            self._take(_TEXT_BYTES + nbytes)
            return at + nbytes
        if kind == _STRUCT:
            self._take(_STRUCT_BYTES if lists <= _OUTER else _INNER_BYTES)
            found, at = self.read(at, expected or {}, depth, lists)
            if expected is not None and expected is self._collected:
                self.found.append(found)
            return at
        if kind == _LIST:
            return self._skip_list(at, expected, depth, lists)
        msg = f"a value of the type {kind}"  # a set or a map; Parquet has none
        raise ValueError(msg)

    def _skip_list(self, at: int, expected: Any, depth: int, lists: int) -> int:  # noqa: ANN401
        begin, head = at, self._content[at]
        count, at = self._count(at)
        if count > len(self._content) - at:
            raise IndexError
        inner = expected[0] if expected else None
        if count and inner is not None:
            _ensure_kind(head & 15, inner)
        for _ in range(count):
            at = self._skip(head & 15, at, inner, depth + 1, lists + 1)
        if expected is not None and expected is self._located:
            self.places.append((begin, at))
        return at

    def _length(self, kind: int, at: int) -> int:
        """Return how many values a list has, or bytes a text; 0 for others."""
        if kind == _LIST:
            return self._count(at)[0]
        return self._varint(at)[0] if kind == BINARY else 0

    def _count(self, at: int) -> tuple[int, int]:
        """Return how many values a list has, and where they begin."""
        count = self._content[at] >> 4
        return (count, at + 1) if count < 15 else self._varint(at + 1)  # noqa: PLR2004 - it follows

    def _take(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            raise FootprintError

    def _varint(self, at: int, most_bits: int = _MOST_BITS) -> tuple[int, int]:
        number = bits = 0
        while True:
            byte = self._content[at]
            at += 1
            number |= (byte & 127) << bits
            bits += 7
            if (byte > 127 and bits >= _MOST_BITS) or number >> most_bits:  # noqa: PLR2004
                msg = "a number that is too large"
                raise ValueError(msg)
            if byte < 128:  # noqa: PLR2004 - the last one
                return number, at


def _ensure_kind(kind: int, expected: Any) -> None:  # noqa: ANN401 - see Shape
    """Raise ValueError for a value of another type than the format's."""
    wanted = (
        expected if isinstance(expected, int) else _LIST if isinstance(expected, list) else _STRUCT
    )
    if kind != wanted:
        msg = f"a value of the type {kind} in place of {wanted}"
        raise ValueError(msg)
