"""Arrow's casts of text, and detection of the values that make a cast fail."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.decode.values.text_column import TextColumn

Flags = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]
Suspects = Callable[[Bytes, Offsets], Flags]
"""Flags, given values' bytes and offsets, those that the kernel will refuse: ideally most of them.
Called only after the kernel has refused some."""


def parse(
    texts: TextColumn, to: pa.DataType, odd: Flags, suspects: Suspects | None = None
) -> tuple[pa.Array, Flags]:
    """Cast all except the odd ones with Arrow; add those that it refuses to a copy of `odd`."""
    values = texts.without(odd).gather()
    try:
        return _cast(values, to), odd
    except pa.ArrowInvalid:
        pass
    if suspects is not None:
        found = suspects(*contents(values))
        if texts.present is not None:
            found &= texts.present
        if found.any():
            return parse(texts, to, odd | found)
    odd = odd.copy()
    odd[_refused(values, to)] = True
    return _cast(texts.without(odd).gather(), to), odd


def _cast(values: pa.BinaryArray, to: pa.DataType) -> pa.Array:
    """Cast an array without offset. Kernels that read only ASCII need no UTF-8 check first."""
    if pa.types.is_string(to):
        return values.cast(to)
    validity, offsets, data = values.buffers()
    return pa.StringArray.from_buffers(len(values), offsets, data, validity).cast(to)


def _refused(values: pa.BinaryArray, to: pa.DataType) -> list[int]:
    """Find the values that the kernel refuses, by bisection: cheap if they are few."""
    found, pending = [], [(0, len(values))]
    while pending:
        start, end = pending.pop()
        try:
            values.slice(start, end - start).cast(pa.string()).cast(to)
        except pa.ArrowInvalid:
            if end - start == 1:
                found.append(start)
            else:
                middle = (start + end) // 2
                pending += [(start, middle), (middle, end)]
    return found


def blanked(array: pa.Array, odd: Flags) -> pa.Array:
    """Replace the odd ones by null."""
    if not odd.any():
        return array
    return pc.if_else(pa.array(odd), pa.scalar(None, array.type), array)


def numbers(array: pa.Array, kind: type[np.generic]) -> NDArray[np.generic]:
    """Return a view of a fixed-width array's values; undefined where it is null."""
    return np.frombuffer(array.buffers()[1], kind, len(array), array.offset * kind().itemsize)


def contents(values: pa.BinaryArray) -> tuple[Bytes, Offsets]:
    """Return views of an array's bytes and of its values' bounds. The array must have no offset."""
    _, offsets, data = values.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(values) + 1).astype(np.int64)
    return np.frombuffer(data or b"", np.uint8)[: bounds[-1]], bounds


def byte_table(letters: bytes) -> Flags:
    """Return a table of 256 flags that are set for these bytes."""
    found = np.zeros(256, np.bool_)
    found[np.frombuffer(letters, np.uint8)] = True
    return found


def any_within(flags: Flags, offsets: Offsets) -> Flags:
    """Return for each pair of neighboring offsets whether any flag between them is set."""
    return any_at(np.flatnonzero(flags), offsets)


def any_at(places: NDArray[np.int64], offsets: Offsets) -> Flags:
    """Return for each pair of neighboring offsets whether any of the places is between them.

    Every place must be between two offsets; they may be in any order.
    """
    found = np.zeros(len(offsets) - 1, np.bool_)
    if len(places):
        found[np.searchsorted(offsets, places, "right") - 1] = True
    return found


def foreign(*letters: bytes) -> Suspects:
    """Return a function that flags values with bytes other than these."""
    table = ~byte_table(b"".join(letters))

    def suspects(data: Bytes, offsets: Offsets) -> Flags:
        return any_within(table[data], offsets)

    return suspects
