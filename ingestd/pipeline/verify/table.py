"""Compares one table of a source with the lake: all rows as numbers.

Memory: the numbers of one partition of the rows, those of linked changes, and some batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingestd.digests.row_digests import digests_of
from ingestd.model.errors import TableError
from ingestd.model.memory_shares import LINKED_CHANGES, VERIFIED_PARTITION, VERIFIED_SPILL, bytes_of
from ingestd.model.schema import Table
from ingestd.pipeline.verify.compare import TRACKED, TableCompared
from ingestd.pipeline.verify.differing_rows import DifferingRows
from ingestd.pipeline.verify.fold import FoldedHashes, fold_digests, fold_linked, linked_bytes
from ingestd.pipeline.verify.spill import NumberPartitions, partition_of, partitions_for
from ingestd.ports import Split
from ingestd.ports.verify import (
    KEY,
    Difference,
    Digested,
    Matrix,
    VerifiedLake,
    VerifiedSource,
    VerifyProgress,
)

_SOURCE_WIDTH = 3
_BYTES = 8
_ROW_BYTES = 60
"""Least size of a row within a table's size."""


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """How tables are verified. `shown`: count of differences to show per table.

    `memory_bytes`: for the numbers of rows. `wait_s`: how long the lake may take to reach the
    source's position and, if it follows by polling, to settle. `tracked`: the maximum number of
    differences per table that are compared again. `first_rest_s`: the pause before tables are
    compared once more; it doubles each time. `least_linked_bytes`: what changes of linked keys may
    take whatever `memory_bytes` is.
    """

    memory_bytes: int
    workers: int = 2
    wait_s: float = 300.0
    shown: int = 20
    with_values: bool = False
    tracked: int = TRACKED
    first_rest_s: float = 1.0
    least_linked_bytes: int = 16 << 20


class TableVerification:
    """Verifies `table` at the source's point: `read`, then `compare`, then `named`; once.

    A context manager: its buffered rows are released at the exit.
    """

    def __init__(
        self,
        source: VerifiedSource,
        lake: VerifiedLake,
        table: Table,
        settings: VerifySettings,
        progress: VerifyProgress,
    ) -> None:
        self._source = source
        self._lake = lake
        self._table = table
        self._settings = settings
        self._progress = progress
        self._splits: Sequence[Split] = ()
        self._lock = threading.Lock()
        self._total_bytes = self._read_bytes = 0
        self._digested: Digested | None = None
        self._rows = NumberPartitions(1, _SOURCE_WIDTH, 0)
        self._salt = secrets.randbits(64)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._rows.close()

    @property
    def digested(self) -> Digested:
        """How the table is compared, once it has been read."""
        assert self._digested is not None
        return self._digested

    async def read(self) -> None:
        """Read the source's rows; the lake may still be behind. Raises TableError and others."""
        digested = self._digested = await self._lake.describe(self._table)
        self._splits = await self._source.splits(self._table)
        self._total_bytes = sum(s.estimated_bytes for s in self._splits)
        nbytes = digested.changes * digested.width * _BYTES
        nbytes += self._total_bytes * _SOURCE_WIDTH * _BYTES // _ROW_BYTES
        memory_bytes = self._settings.memory_bytes
        count = partitions_for(nbytes, bytes_of(VERIFIED_PARTITION, memory_bytes))
        self._rows = NumberPartitions(count, _SOURCE_WIDTH, bytes_of(VERIFIED_SPILL, memory_bytes))
        await self._read_source(digested)
        await self._source.ensure_unreplaced(self._table)

    async def compare(self) -> TableCompared:
        """Compare all rows with the lake, which has reached the point. Raises TableError."""
        point, described = self._source.point, self.digested
        count, memory_bytes = self._rows.count, self._settings.memory_bytes
        most = self._linked_limit_bytes() // linked_bytes(described.width)
        digested = self._digested = await self._lake.survey(described, point, most_linked=most)
        comparison = TableCompared(tracked=self._settings.tracked)
        spill_bytes = bytes_of(VERIFIED_SPILL, memory_bytes)
        with NumberPartitions(count + 1, digested.width, spill_bytes) as changes:
            async with contextlib.aclosing(self._lake.changes(digested)) as matrices:
                async for matrix in matrices:
                    partitions = _partitions(matrix, digested, count, self._salt)
                    await asyncio.to_thread(changes.add_rows, matrix, partitions)
            self._ensure_fits(changes.rows_in(count), digested.width)
            linked = await asyncio.to_thread(fold_linked, changes.pop_partition(count), digested)
            for number in range(count):
                await asyncio.to_thread(self._compare, comparison, number, changes, linked)
        if not comparison.is_equal:
            await self._lake.ensure_unchanged(self._table)
        return comparison

    def _linked_limit_bytes(self) -> int:
        return max(
            bytes_of(LINKED_CHANGES, self._settings.memory_bytes), self._settings.least_linked_bytes
        )

    def _ensure_fits(self, linked: int, width: int) -> None:
        """Raise TableError if the changes of linked keys don't fit: they form one partition."""
        if linked * linked_bytes(width) <= self._linked_limit_bytes():
            return
        needed = -(-2 * linked * linked_bytes(width) >> 20)
        raise TableError(
            self._table.id,
            f"{linked:,} changes belong to rows whose key changed and that carried along values"
            " which were not sent: folding them does not fit --memory",
            remedy=f"ingestd verify ... --memory {needed}MB",
        )

    def _compare(
        self,
        comparison: TableCompared,
        number: int,
        changes: NumberPartitions,
        linked: FoldedHashes,
    ) -> None:
        folded = fold_digests(changes.pop_partition(number), self.digested)
        own = linked.among(lambda keys: partition_of(keys, self._rows.count, self._salt) == number)
        has_key = bool(self.digested.key)
        comparison.compare_partition(
            self._rows.pop_partition(number), folded.plus(own), has_key=has_key
        )

    async def named(self, comparison: TableCompared) -> tuple[Difference, ...]:
        """Examine the first differences; those that are equal after all are dropped."""
        settings = self._settings
        naming = DifferingRows(
            self._source, self._lake, self.digested, self._splits, with_values=settings.with_values
        )
        found = await naming.named(comparison, settings.shown)
        await self._source.ensure_unreplaced(self._table)
        return found

    # --- all rows, as numbers ------------------------------------------------------------------

    async def _read_source(self, digested: Digested) -> None:
        waiting = list(enumerate(self._splits))[::-1]

        async def work() -> None:
            while waiting:
                number, split = waiting.pop()
                async with contextlib.aclosing(self._source.batches(split)) as batches:
                    async for batch in batches:
                        await asyncio.to_thread(self._add_batch, batch, number, digested)
                self._report_progress(split.estimated_bytes)

        await gather_fail_fast(*(work() for _ in range(self._settings.workers)))
        self._progress.table(str(self._table.id), 1.0)

    def _report_progress(self, nbytes: int) -> None:
        self._read_bytes += nbytes
        ratio = self._read_bytes / self._total_bytes if self._total_bytes else 1.0
        self._progress.table(str(self._table.id), ratio)

    def _add_batch(self, batch: pa.RecordBatch, split: int, digested: Digested) -> None:
        keys, rows = digests_of(batch, digested.columns, digested.key)
        splits = np.full(len(keys), split, np.uint64)
        partitions = partition_of(keys, self._rows.count, self._salt)
        with self._lock:
            self._rows.add_rows(np.column_stack([keys, rows, splits]), partitions)


def _partitions(matrix: Matrix, digested: Digested, count: int, salt: int) -> NDArray[np.int64]:
    """Return each change's partition; that of the linked keys follows the others."""
    partitions = partition_of(matrix[:, KEY], count, salt)
    if len(digested.linked):
        partitions[digested.is_linked(matrix[:, KEY])] = count
    return partitions


async def gather_fail_fast(*works: Any) -> None:  # noqa: ANN401 - coroutines
    """Await all; the first failure cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except ExceptionGroup as failed:
        first = failed.exceptions[0]
    else:
        return
    raise first
