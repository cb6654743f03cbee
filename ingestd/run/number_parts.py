"""Rows of numbers, kept in parts that each fit memory: on disk what does not fit together."""

from __future__ import annotations

import tempfile
from types import TracebackType
from typing import IO, Self

import numpy as np
from numpy.typing import NDArray

from ingestd.errors import OperatorError
from ingestd.value_hashes import Hashes
from ingestd.verification import Matrix

_BYTES = 8
MAX_PARTS = 1 << 12


def parts_for(nbytes: int, limit_bytes: int) -> int:
    """Give how many parts make each of them fit: a power of two."""
    wanted = max(1, -(-nbytes // max(1, limit_bytes)))
    return min(MAX_PARTS, 1 << (wanted - 1).bit_length())


def part_of(hashes: Hashes, count: int) -> NDArray[np.int64]:
    """Give the part of each hash, by its upper bits; `count` is a power of two."""
    if count == 1:
        return np.zeros(len(hashes), np.int64)
    shift = np.uint64(64 - (count.bit_length() - 1))
    return (hashes >> shift).astype(np.int64)


class NumberParts:
    """Rows of `width` numbers in `count` parts. Close it: a file of no name may be behind it.

    Blocks; one call at a time. Raises OperatorError where there is no room for the file.
    """

    def __init__(self, count: int, width: int, memory_bytes: int) -> None:
        self.count = count
        self._width = width
        self._memory_bytes = memory_bytes
        self._held: list[list[Matrix]] = [[] for _ in range(count)]
        self._held_bytes = 0
        self._written: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        self._file: IO[bytes] | None = None
        self.rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, rows: Matrix, parts: NDArray[np.int64]) -> None:
        """Take rows, each into its part."""
        self.rows += len(rows)
        if not parts.any():
            self._hold(0, rows)
        else:
            order = np.argsort(parts, kind="stable")
            rows = rows[order]
            cuts = np.searchsorted(parts[order], np.arange(self.count + 1))
            for number in np.flatnonzero(np.diff(cuts)).tolist():
                self._hold(number, rows[cuts[number] : cuts[number + 1]].copy())
        if self._held_bytes > self._memory_bytes:
            try:
                self._write()
            except OSError as error:
                raise OperatorError(
                    f"folder {tempfile.gettempdir()}: {error.strerror or error}",
                    remedy="set TMPDIR to a folder with room for what does not fit --memory",
                ) from error

    def take(self, number: int) -> Matrix:
        """Give a part's rows, once."""
        held, self._held[number] = self._held[number], []
        self._held_bytes -= sum(rows.nbytes for rows in held)
        found = [self._read(*place) for place in self._written[number]] + held
        if not found:
            return np.empty((0, self._width), np.uint64)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def close(self) -> None:
        """Let all go. Twice is fine."""
        self._held = [[] for _ in range(self.count)]
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _hold(self, number: int, rows: Matrix) -> None:
        if len(rows):
            self._held[number].append(rows)
            self._held_bytes += rows.nbytes

    def _write(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="ingestd-verify-")  # noqa: SIM115 - closed
        at = self._file.seek(0, 2)
        for number, held in enumerate(self._held):
            for rows in held:
                self._file.write(np.ascontiguousarray(rows).data)
                self._written[number].append((at, len(rows)))
                at += rows.nbytes
        self._held = [[] for _ in range(self.count)]
        self._held_bytes = 0

    def _read(self, at: int, rows: int) -> Matrix:
        assert self._file is not None
        self._file.seek(at)
        data = self._file.read(rows * self._width * _BYTES)
        found: Matrix = np.frombuffer(data, np.uint64).reshape(rows, self._width)
        return found
