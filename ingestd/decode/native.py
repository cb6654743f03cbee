"""The compiled extension (`_native.c`), if it was built; otherwise numpy does the same, slower."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Output = tuple[int, int, int, int, NDArray[Any], Ints | None, NDArray[np.uint8]]
"""An output column: kind, bytes per value, precision and scale; values, lengths, states."""


VERSION = 3
"""The version of this interface. A module of another version is from another checkout: unused."""


class NativeFunctions(Protocol):
    """The functions of `_native.c`. Arrays are contiguous.

    Raises ValueError if arrays are too short, values lie outside their buffer, or a kind of column
    is unknown.
    """

    VERSION: int

    def follow(self, buffer: bytes, at: int, starts: Ints, ends: Ints, /) -> int:
        """Find complete CopyData messages from `at` on, up to the arrays' size; count them."""

    def walk(
        self, buffer: bytes, at: Ints, ends: Ints, stops: Ints, columns: list[Output | None], /
    ) -> tuple[int, bytes]:
        """Walk the tuples from `at`, which end at or before `ends`; write `stops` and the columns.

        Return the first malformed row or -1; and for each column, the states that occurred (bits).
        """

    def gather(
        self,
        buffer: bytes,
        starts: Ints,
        lengths: Ints,
        offsets: NDArray[np.int32],
        to: pa.Buffer,
        /,
    ) -> None:
        """Copy values to the buffer `to`, back to back; write the offset of each in it."""

    def unhex(  # noqa: PLR0917 - the signature in C
        self,
        buffer: bytes,
        starts: Ints,
        lengths: Ints,
        offsets: NDArray[np.int32],
        odd: NDArray[np.bool_],
        to: pa.Buffer,
        /,
    ) -> None:
        """Write the bytes of bytea texts, as `gather`; nothing for an invalid one, which is odd."""

    def words(self, buffer: bytes, offsets: Ints, words: Ints, /) -> None:
        """Write the big-endian eight-byte number at each offset; zeros follow the last byte."""


def load(version: int = VERSION) -> NativeFunctions | None:
    """Return the compiled functions of that version; None if there are none."""
    try:
        found = import_module("ingestd.decode._native")
    except ImportError:  # there was no C compiler, or no Python.h
        return None
    is_ours = getattr(found, "VERSION", None) == version
    return cast("NativeFunctions", found) if is_ours else None


compiled = load()
