"""The compiled part (`_native.c`), where it was built; without it numpy does the same, slower."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Output = tuple[int, int, int, int, NDArray[Any], Ints | None, NDArray[np.uint8]]
"""A column to write: kind, bytes of a value, precision and scale; values, lengths, states."""


_VERSION = 3
"""Of what is below. Another one was compiled from another checkout, and is not used."""


class NativeFunctions(Protocol):
    """What `_native.c` has. Arrays are contiguous.

    Raises ValueError where arrays are too short, values lie outside their buffer, or there is no
    such kind of column.
    """

    VERSION: int

    def follow(self, buffer: bytes, at: int, starts: Ints, ends: Ints, /) -> int:
        """Find the whole CopyData messages from `at` on, as many as there is room for: how many."""

    def walk(
        self, buffer: bytes, at: Ints, ends: Ints, stops: Ints, columns: list[Output | None], /
    ) -> tuple[int, bytes]:
        """Walk the tuples from `at`, which end at or before `ends`; write where, and the columns.

        Gives the first malformed row or -1; and for each column, which states were seen (bits).
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
        """Copy values to the buffer `to`, one after another; write where each begins in it."""

    def unhex(  # noqa: PLR0917 - as C has it
        self,
        buffer: bytes,
        starts: Ints,
        lengths: Ints,
        offsets: NDArray[np.int32],
        odd: NDArray[np.bool_],
        to: pa.Buffer,
        /,
    ) -> None:
        """Write what texts of bytea stand for, as `gather`; nothing for one that is none: odd."""

    def words(self, buffer: bytes, offsets: Ints, words: Ints, /) -> None:
        """Write the big-endian number of eight bytes at each offset; zeros follow the last byte."""


def _load() -> NativeFunctions | None:
    try:
        found = import_module("ingestd.decode._native")
    except ImportError:  # there was no C compiler, or no Python.h
        return None
    is_ours = getattr(found, "VERSION", None) == _VERSION
    return cast("NativeFunctions", found) if is_ours else None


compiled = _load()
