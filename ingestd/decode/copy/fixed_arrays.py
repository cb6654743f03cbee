"""Arrays of fixed-size values, in the server's binary format, converted to numpy.

Source: array_send (src/backend/utils/adt/arrayfuncs.c): number of dimensions, whether there are
nulls, element type; for each dimension its length and lower bound; each element preceded by its
length, which is -1 for a null.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
