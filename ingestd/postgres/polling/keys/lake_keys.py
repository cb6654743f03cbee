"""The keys that the lake holds of a table, found in its changes.

A key is held if its newest row by (`_cdc_lsn`, `_cdc_seq`) is not a `d` and is above the table's
newest `t`. The changes come in any order and do not fit into memory; they are scanned unsorted::

    survey    the newest `t`, the last epoch, whether there are any `d`
    deaths    the newest `d` above the `t` of each key that has one: few
    keys      every other row above the `t`, and above the `d` of its key

All passes end at the last epoch of the survey: more may be written meanwhile. If the keys, or the
deaths, are too many at a time, one partition of the hashes is processed after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.digests.value_hashes import Hashes
from ingestd.model.changes import DELETE, TRUNCATE
from ingestd.model.schema import Table
from ingestd.ports import ChangeLog
from ingestd.postgres.polling.keys.key_hashes import hashed_columns, key_hashes, lasting_hashes
from ingestd.postgres.polling.keys.sorted_hashes import cut_to, distinct, find

LEAST_BYTES = 1 << 20
"""The least memory for keys."""
_BITS = 64
_BYTES = 8
_POSITION = ("_cdc_lsn", "_cdc_seq")
_PLACE = ("_cdc_op", *_POSITION, "_cdc_epoch")

Numbers = NDArray[np.int64]


class _TooManyError(Exception):
    """There are more than fit at a time."""


@dataclass(frozen=True, slots=True)
class KeyPartition:
    """One of `count` (a power of two) equal parts of all keys, by their `lasting_hashes`.

    A later process may continue a sweep with it.
    """

    number: int = 0
    count: int = 1

    def flags(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Return which of these hashes are in this partition, which is not the whole."""
        shift = np.uint64(_BITS + 1 - self.count.bit_length())
        inside: NDArray[np.bool_] = (hashes >> shift) == np.uint64(self.number)
        return inside


WHOLE = KeyPartition()


@dataclass(slots=True)
class _KeySurvey:
    """The state known before the keys are read. `void`: the position of the newest `t`."""

    epoch: int = -1
    void: tuple[int, int] = (-1, -1)
    has_deaths: bool = False

    def scan_rows(self, rows: pa.RecordBatch) -> None:
        if not rows.num_rows:
            return
        self.epoch = max(self.epoch, pc.max(rows.column("_cdc_epoch")).as_py())
        ops = rows.column("_cdc_op")
        marks = rows.filter(pc.equal(ops, TRUNCATE))
        for lsn, seq in zip(*(marks.column(n).to_pylist() for n in _POSITION), strict=True):
            self.void = max(self.void, (lsn, seq))
        self.has_deaths = self.has_deaths or bool(pc.any(pc.equal(ops, DELETE)).as_py())

    def counting(self, rows: pa.RecordBatch, *, deaths: bool) -> pa.RecordBatch:
        """Return the rows above the `t`: only the `d`, or only the others."""
        lsn, seq = rows.column("_cdc_lsn"), rows.column("_cdc_seq")
        at, number = (pa.scalar(value, pa.int64()) for value in self.void)
        above = pc.or_(pc.greater(lsn, at), pc.and_(pc.equal(lsn, at), pc.greater(seq, number)))
        compare = pc.equal if deaths else pc.not_equal
        counts = pc.and_(above, compare(rows.column("_cdc_op"), DELETE))
        known = pc.less_equal(rows.column("_cdc_epoch"), pa.scalar(self.epoch, pa.int64()))
        counts = pc.and_(counts, known)
        return rows if pc.all(counts).as_py() else rows.filter(counts)


class _Deaths:
    """The newest `d` of each key: hashes, sorted, and positions."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: list[tuple[Hashes, Numbers, Numbers]] = []
        self._count = 0
        self.hashes: Hashes = np.empty(0, np.uint64)
        self._lsn: Numbers = np.empty(0, np.int64)
        self._seq: Numbers = np.empty(0, np.int64)

    def add_deaths(self, hashes: Hashes, lsn: Numbers, seq: Numbers) -> None:
        self._waiting.append((hashes, lsn, seq))
        self._count += len(hashes)
        if self._count > max(self._limit // 2, len(self.hashes)):
            self.settle()

    def settle(self) -> None:
        """Sort the rows taken so far. Raises _TooManyError."""
        parts = [(self.hashes, self._lsn, self._seq), *self._waiting]
        hashes, lsn, seq = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((seq, lsn, hashes))
        hashes = hashes[order]
        is_last = np.append(hashes[1:] != hashes[:-1], True)[: len(hashes)]
        self.hashes = hashes[is_last]
        self._lsn, self._seq = lsn[order][is_last], seq[order][is_last]
        self._waiting, self._count = [], 0
        if len(self.hashes) > self._limit:
            raise _TooManyError

    def outlived(self, hashes: Hashes, lsn: Numbers, seq: Numbers) -> NDArray[np.bool_]:
        """Return which of these rows are newer than the `d` of their keys, or have none."""
        at, is_there = find(self.hashes, hashes)
        if not len(self.hashes):
            return ~is_there
        died, number = self._lsn[at], self._seq[at]
        is_newer: NDArray[np.bool_] = (lsn > died) | ((lsn == died) & (seq > number))
        return ~is_there | is_newer


class _Collected:
    """Distinct hashes, at most `limit`. The unused part of the array takes no memory."""

    def __init__(self, limit: int) -> None:
        self._hashes: Hashes = np.empty(max(1, limit), np.uint64)
        self._count = 0

    def add_hashes(self, hashes: Hashes) -> None:
        """Add hashes. Raises _TooManyError."""
        while len(hashes):
            room = len(self._hashes) - self._count
            some, hashes = hashes[:room], hashes[room:]
            self._hashes[self._count : self._count + len(some)] = some
            self._count += len(some)
            if len(hashes):
                self._count = distinct(self._hashes, self._count)
                if self._count > len(self._hashes) * 15 // 16:
                    raise _TooManyError

    def sorted(self) -> Hashes:
        """Return all hashes, sorted. Call it once."""
        cut_to(self._hashes, distinct(self._hashes, self._count))
        return self._hashes


class _Search:
    """The search for one partition of a table's keys."""

    def __init__(self, table: Table, partition: KeyPartition, limit: int) -> None:
        self._table = table
        self._partition = partition
        self.survey = _KeySurvey()
        self.deaths = _Deaths(limit // 8)
        self.collected = _Collected(limit)

    def take_deaths(self, rows: pa.RecordBatch) -> None:
        """Add the deletes of these rows. Raises _TooManyError."""
        rows = self.survey.counting(rows, deaths=True)
        if rows.num_rows:
            self.deaths.add_deaths(*self._placed(rows))

    def take_keys(self, rows: pa.RecordBatch) -> None:
        """Add the keys of those rows that are not deleted. Raises _TooManyError."""
        rows = self.survey.counting(rows, deaths=False)
        if rows.num_rows:
            hashes, lsn, seq = self._placed(rows)
            if self.survey.has_deaths:
                hashes = hashes[self.deaths.outlived(hashes, lsn, seq)]
            self.collected.add_hashes(hashes)

    def _placed(self, rows: pa.RecordBatch) -> tuple[Hashes, Numbers, Numbers]:
        """Return the hashes and positions of the rows in this partition."""
        lsn, seq = (rows.column(name).to_numpy() for name in _POSITION)
        hashes = key_hashes(self._table, rows)
        if self._partition.count == 1:
            return hashes, lsn, seq
        inside = self._partition.flags(lasting_hashes(self._table, rows))
        return hashes[inside], lsn[inside], seq[inside]


async def keys_held(
    log: ChangeLog, table: Table, limit_bytes: int, *, least_bytes: int = LEAST_BYTES
) -> Hashes | None:
    """Return the hashes of the keys that the lake holds, sorted; None if they exceed the limit.

    A key takes 8 bytes, and up to half as much again during the search.
    """
    found: list[Hashes] = []
    async with aclosing(parts_held(log, table, limit_bytes, least_bytes=least_bytes)) as parts:
        async for partition, hashes in parts:
            if len(hashes) * partition.count * _BYTES > limit_bytes * 9 // 8:
                return None  # the other parts have about as many
            found.append(hashes)
    if sum(map(len, found)) * _BYTES > limit_bytes:
        return None
    if len(found) == 1:
        return found[0]
    hashes = np.concatenate(found)
    hashes.sort()
    return hashes


async def parts_held(
    log: ChangeLog,
    table: Table,
    limit_bytes: int,
    first: KeyPartition = WHOLE,
    *,
    least_bytes: int = LEAST_BYTES,
) -> AsyncGenerator[tuple[KeyPartition, Hashes], None]:
    """Yield these hashes by partition, each sorted, within the limit, and as of a later moment.

    Starts with the partition `first`: earlier ones are left out. The limit is `least_bytes` or
    more.
    """
    at, count = first.number, first.count
    while at < count:
        partition = KeyPartition(at, count)
        try:
            hashes = await _held(log, table, partition, max(limit_bytes, least_bytes) // _BYTES)
        except _TooManyError:
            at, count = 2 * at, 2 * count
        else:
            yield partition, hashes
            at += 1


async def _held(log: ChangeLog, table: Table, partition: KeyPartition, limit: int) -> Hashes:
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, "keys")  # one, so that memory it frees is reused
    search = _Search(table, partition, limit)
    try:
        async for rows in _changes(log, table, _PLACE):
            await loop.run_in_executor(thread, search.survey.scan_rows, rows)
        columns = [*_PLACE, *hashed_columns(table)]
        if search.survey.has_deaths:
            async for rows in _changes(log, table, columns):
                await loop.run_in_executor(thread, search.take_deaths, rows)
            await loop.run_in_executor(thread, search.deaths.settle)
        async for rows in _changes(log, table, columns):
            await loop.run_in_executor(thread, search.take_keys, rows)
        return await loop.run_in_executor(thread, search.collected.sorted)
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


async def _changes(
    log: ChangeLog, table: Table, columns: Sequence[str]
) -> AsyncGenerator[pa.RecordBatch, None]:
    """Yield the changes; none while the lake lacks a column of the key: then no row has a key."""
    async with aclosing(log.changes(table.id, columns)) as batches:
        async for rows in batches:
            if not set(columns) <= set(rows.schema.names):
                return
            yield rows
