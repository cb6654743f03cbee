"""Rows of numbers in partitions that each fit into memory; on disk if they don't fit together."""

from __future__ import annotations

import tempfile
from types import TracebackType
from typing import IO, Self

import numpy as np
from numpy.typing import NDArray

from ingestd.digests.value_hashes import Hashes, mixed
from ingestd.model.errors import OperatorError
from ingestd.ports.verify import Matrix

_BYTES = 8
_ARRAY_BYTES = 200
"""Overhead of an array besides its numbers: with large rows a batch has few per partition."""
MAX_PARTITIONS = 1 << 12


def partitions_for(nbytes: int, limit_bytes: int) -> int:
    """Return how many partitions are needed for each to fit: a power of two."""
    wanted = max(1, -(-nbytes // max(1, limit_bytes)))
    return min(MAX_PARTITIONS, 1 << (wanted - 1).bit_length())


def partition_of(hashes: Hashes, count: int, salt: int) -> NDArray[np.int64]:
    """Return the partition of each hash; `count` is a power of two.

    `salt`: a random number, so that no client of the source chooses keys of one partition.
    """
    if count == 1:
        return np.zeros(len(hashes), np.int64)
    shift = np.uint64(64 - (count.bit_length() - 1))
    return (mixed(hashes ^ np.uint64(salt)) >> shift).astype(np.int64)


class NumberPartitions:
    """Rows of `width` numbers in `count` partitions. Close it: it may own an unnamed file.

    Blocks; one call at a time. Raises OperatorError if there is no space for the file.
    """

    def __init__(self, count: int, width: int, memory_bytes: int) -> None:
        self.count = count
        self._width = width
        self._memory_bytes = memory_bytes
        self._held: list[list[Matrix]] = [[] for _ in range(count)]
        self._held_bytes = 0
        self._written: list[tuple[int, NDArray[np.int64]]] = []
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

    def add_rows(self, rows: Matrix, partitions: NDArray[np.int64]) -> None:
        """Add rows, each to its partition."""
        self.rows += len(rows)
        if not partitions.any():
            self._hold(0, rows)
        else:
            order = np.argsort(partitions, kind="stable")
            rows = rows[order]
            cuts = np.searchsorted(partitions[order], np.arange(self.count + 1))
            for number in np.flatnonzero(np.diff(cuts)).tolist():
                self._hold(number, rows[cuts[number] : cuts[number + 1]].copy())
        if self._held_bytes > self._memory_bytes:
            try:
                self._write()
            except OSError as error:
                raise OperatorError(
                    f"folder {tempfile.gettempdir()}: {error.strerror or error}",
                    remedy="set TMPDIR to a folder with space for what does not fit --memory",
                ) from error

    def rows_in(self, number: int) -> int:
        """Return how many rows a partition has."""
        written = sum(int(cuts[number + 1] - cuts[number]) for _, cuts in self._written)
        return written + sum(len(rows) for rows in self._held[number])

    def pop_partition(self, number: int) -> Matrix:
        """Return a partition's rows, once."""
        count = self.rows_in(number)
        held, self._held[number] = self._held[number], []
        self._held_bytes -= sum(_held_bytes(rows) for rows in held)
        found: Matrix = np.empty((count, self._width), np.uint64)
        at = 0
        for begin, cuts in self._written:
            first, end = int(cuts[number]), int(cuts[number + 1])
            if first < end:
                self._read_part(begin + first * self._width * _BYTES, found[at : at + end - first])
                at += end - first
        for rows in held:
            found[at : at + len(rows)] = rows
            at += len(rows)
        return found

    def close(self) -> None:
        """Release everything. Twice is fine."""
        self._held = [[] for _ in range(self.count)]
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _hold(self, number: int, rows: Matrix) -> None:
        if len(rows):
            self._held[number].append(rows)
            self._held_bytes += _held_bytes(rows)

    def _write(self) -> None:
        """Write all buffered rows, by partition; keep only the offset of each partition."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="ingestd-verify-")  # noqa: SIM115 - closed
        begin = self._file.seek(0, 2)
        counts = [sum(len(rows) for rows in held) for held in self._held]
        for held in self._held:
            for rows in held:
                self._file.write(np.ascontiguousarray(rows).data)
        self._written.append((begin, np.cumsum([0, *counts])))
        self._held = [[] for _ in range(self.count)]
        self._held_bytes = 0

    def _read_part(self, at: int, rows: Matrix) -> None:
        assert self._file is not None
        self._file.seek(at)
        self._file.readinto(rows.data)  # type: ignore[attr-defined]


def _held_bytes(rows: Matrix) -> int:
    return rows.nbytes + _ARRAY_BYTES
