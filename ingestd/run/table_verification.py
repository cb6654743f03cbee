"""One table of a source against the lake: all rows as numbers, then those that differ as they are.

Memory: the numbers of a part of the rows, some batches, and the rows that are shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingestd.ports import Split
from ingestd.row_digests import (
    RAW,
    RawTexts,
    Value,
    digests_of,
    given_by,
    key_digests,
    row_digests,
    value_hashes,
    values_of,
)
from ingestd.run.compared_parts import Comparison, Differing
from ingestd.run.folded_digests import Folded, fold_digests, fold_linked
from ingestd.run.number_parts import NumberParts, part_of, parts_for
from ingestd.schema import Table
from ingestd.value_hashes import Hashes
from ingestd.verification import (
    KEY,
    Difference,
    Digested,
    Kind,
    Matrix,
    Progress,
    Rows,
    VerifiedLake,
    VerifiedSource,
)

_SOURCE_WIDTH = 3
_BYTES = 8
_ROW_BYTES = 60
"""A row takes no less of a table's size."""
MASKED = "(masked)"


@dataclass(frozen=True, slots=True)
class VerifySettings:
    """How tables are verified. `shown`: differences to show of each.

    `memory_bytes`: for numbers of rows. `wait_s`: how long the lake may take to be where the source
    is, and, if it follows by polling, to settle.
    """

    memory_bytes: int
    workers: int = 2
    wait_s: float = 300.0
    shown: int = 20
    with_values: bool = False


class TableVerification:
    """Verifies `table` at the source's point: `read`, then `compare`, then `named`; once.

    As a context manager: what it keeps of the rows goes with it.
    """

    def __init__(
        self,
        source: VerifiedSource,
        lake: VerifiedLake,
        table: Table,
        settings: VerifySettings,
        progress: Progress,
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
        self._rows = NumberParts(1, _SOURCE_WIDTH, 0)

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
        count = parts_for(nbytes, memory_bytes // 8)
        self._rows = NumberParts(count, _SOURCE_WIDTH, memory_bytes // 4)
        await self._read_source(digested)
        await self._source.ensure_unreplaced(self._table)

    async def compare(self) -> Comparison:
        """Compare all rows with the lake, which is there now. Raises TableError and others."""
        point = self._source.point
        digested = self._digested = await self._lake.survey(self.digested, point)
        count, memory_bytes = self._rows.count, self._settings.memory_bytes
        comparison = Comparison()
        with NumberParts(count + 1, digested.width, memory_bytes // 4) as changes:
            async with contextlib.aclosing(self._lake.changes(digested)) as matrices:
                async for matrix in matrices:
                    parts = _parts(matrix, digested, count)
                    await asyncio.to_thread(changes.add, matrix, parts)
            linked = await asyncio.to_thread(fold_linked, changes.take(count), digested)
            for number in range(count):
                await asyncio.to_thread(self._compare, comparison, number, changes, linked)
        if not comparison.is_equal:
            await self._lake.ensure_whole(self._table)
        return comparison

    def _compare(
        self, comparison: Comparison, number: int, changes: NumberParts, linked: Folded
    ) -> None:
        folded = fold_digests(changes.take(number), self.digested)
        own = linked.among(lambda keys: part_of(keys, self._rows.count) == number)
        has_key = bool(self.digested.key)
        comparison.take(self._rows.take(number), folded.plus(own), has_key=has_key)

    async def named(self, comparison: Comparison) -> tuple[Difference, ...]:
        """Look at the first differences; what is equal after all is dropped."""
        digested = self.digested
        shown = comparison.some(self._settings.shown)
        keys = {d.key for d in shown}
        lake = _by_key(await self._lake.rows_of(digested, keys), digested)
        source = _by_key(await self._rows_of(digested, shown), digested)
        await self._source.ensure_unreplaced(self._table)
        found = []
        for one in shown:
            difference = self._named(one, source.get(one.key, []), lake.get(one.key, []), digested)
            if difference is None:
                comparison.drop(one)
            else:
                found.append(difference)
        return tuple(found)

    # --- all rows, as numbers ------------------------------------------------------------------

    async def _read_source(self, digested: Digested) -> None:
        waiting = list(enumerate(self._splits))[::-1]

        async def work() -> None:
            while waiting:
                number, split = waiting.pop()
                async with contextlib.aclosing(self._source.batches(split)) as batches:
                    async for batch in batches:
                        await asyncio.to_thread(self._take, batch, number, digested)
                self._has_read(split.estimated_bytes)

        await together(*(work() for _ in range(self._settings.workers)))
        self._progress.table(str(self._table.id), 1.0)

    def _has_read(self, nbytes: int) -> None:
        self._read_bytes += nbytes
        ratio = self._read_bytes / self._total_bytes if self._total_bytes else 1.0
        self._progress.table(str(self._table.id), ratio)

    def _take(self, batch: pa.RecordBatch, split: int, digested: Digested) -> None:
        keys, rows = digests_of(batch, digested.columns, digested.key)
        splits = np.full(len(keys), split, np.uint64)
        parts = part_of(keys, self._rows.count)
        with self._lock:
            self._rows.add(np.column_stack([keys, rows, splits]), parts)

    # --- the rows that differ ------------------------------------------------------------------

    async def _rows_of(self, digested: Digested, shown: Sequence[Differing]) -> Rows:
        """Read the splits again that have them."""
        wanted: dict[int, set[int]] = defaultdict(set)
        for one in shown:
            if one.split is not None:
                wanted[one.split].add(one.key)
        found: Rows = []
        for number, keys in sorted(wanted.items()):
            async with contextlib.aclosing(self._source.batches(self._splits[number])) as batches:
                async for batch in batches:
                    found += await asyncio.to_thread(_chosen, batch, digested, keys)
        return found

    def _named(
        self, one: Differing, source: Rows, lake: Rows, digested: Digested
    ) -> Difference | None:
        columns: tuple[str, ...] = ()
        if one.kind is Kind.DIFFERENT:
            if not (source and lake):
                return Difference(one.kind, _key_of([*source, *lake], one, digested))
            columns = _differing(source[0], lake[0], digested)
            if not columns:
                return None
        shown = columns or tuple(c.name for c in digested.columns)
        with_values = self._settings.with_values
        return Difference(
            one.kind,
            _key_of([*source, *lake], one, digested),
            columns,
            one.count,
            _texts(source, shown, digested) if with_values else {},
            _texts(lake, shown, digested) if with_values else {},
        )


def _parts(matrix: Matrix, digested: Digested, count: int) -> NDArray[np.int64]:
    """Give each change's part; that of the linked keys comes after the others."""
    parts = part_of(matrix[:, KEY], count)
    if len(digested.linked):
        parts[digested.is_linked(matrix[:, KEY])] = count
    return parts


def _chosen(batch: pa.RecordBatch, digested: Digested, keys: Collection[int]) -> Rows:
    """Give the rows with these keys as values."""
    hashes, _ = digests_of(batch, digested.columns, digested.key)
    flags = np.isin(hashes, np.fromiter(keys, np.uint64, len(keys)))
    if not flags.any():
        return []
    batch = batch.filter(pa.array(flags))
    raw = RawTexts(batch.column(RAW))
    values = [values_of(c, given_by(batch), raw, batch.num_rows) for c in digested.columns]
    names = [c.name for c in digested.columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]


def _by_key(rows: Rows, digested: Digested) -> Mapping[int, Rows]:
    hashes: dict[int, Hashes] = {
        i: value_hashes([row[c.name] for row in rows], c.type)
        for i, c in enumerate(digested.columns)
    }
    count = len(rows)
    if digested.key:
        keys = key_digests((hashes[i] for i in digested.key), count)
    else:
        keys = row_digests(hashes, count)
    found: dict[int, Rows] = defaultdict(list)
    for key, row in zip(keys.tolist(), rows, strict=True):
        found[key].append(row)
    return found


def _differing(
    source: Mapping[str, Value], lake: Mapping[str, Value], digested: Digested
) -> tuple[str, ...]:
    found = []
    for column in digested.columns:
        ours, theirs = value_hashes([source[column.name], lake[column.name]], column.type)
        if ours != theirs:
            found.append(column.name)
    return tuple(found)


def _key_of(rows: Rows, one: Differing, digested: Digested) -> Mapping[str, str | None]:
    """Give the texts of a row's key; a hash where there is none, or nobody has the row any more."""
    if not digested.key or not rows:
        return {"row": f"{one.key:016x}"}
    return _texts(rows, tuple(digested.columns[i].name for i in digested.key), digested)


def _texts(rows: Rows, names: Sequence[str], digested: Digested) -> Mapping[str, str | None]:
    if not rows:
        return {}
    masked = {c.name for c in digested.columns if c.is_masked}
    return {n: MASKED if n in masked else text(rows[0][n]) for n in names}


def text(value: Value) -> str | None:
    """Write a value for a person."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        return value.isoformat(" ")
    if isinstance(value, date):
        return value.isoformat()
    return str(value)


async def together(*works: Any) -> None:  # noqa: ANN401 - coroutines
    """Await all; the first failure cancels the others and is raised itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except ExceptionGroup as failed:
        first = failed.exceptions[0]
    else:
        return
    raise first
