"""Finds deleted rows: keys that the lake holds and the source lacks.

::

    keys of the lake, hashed and sorted      one mark each
    keys of the source, page by page         mark those found
    keys without a mark                      looked up in the lake's changes: candidates
    `absent`, in the poll that deletes them  candidates missing from its snapshot are deleted

The pages are read one after another, each in its own short transaction, while others write: a key
may appear, disappear, or move past the page being read. So a candidate may still exist. It is a
deleted row only if the snapshot of a poll lacks it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from numpy.typing import NDArray
from psycopg import AsyncConnection

from ingestd.digests.value_hashes import Hashes
from ingestd.model.errors import TransientError
from ingestd.model.keys import new_keys
from ingestd.model.schema import Table
from ingestd.ports import ChangeLog
from ingestd.postgres.connection.session import connect
from ingestd.postgres.polling.keys.key_hashes import hashed_columns, key_hashes, key_names
from ingestd.postgres.polling.keys.key_pages import PAGE_ROWS, KeyPages, PackedKeys
from ingestd.postgres.polling.keys.key_set import KeySet
from ingestd.postgres.polling.keys.lake_keys import LEAST_BYTES, WHOLE, KeyPartition, parts_held
from ingestd.postgres.polling.keys.sorted_hashes import find
from ingestd.postgres.settings import PollingSettings
from ingestd.postgres.snapshot.errors import read_error
from ingestd.postgres.snapshot.read_view import ensure_described
from ingestd.process.tasks import cancel_all

BATCH_ROWS = 10_000
"""The most candidates yielded at a time."""
LISTED = 1000
"""The most candidates in one query."""

Marks = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SweepPolicy:
    """How sweeps continue after a fault, and the least memory for keys.

    `retries`: how many consecutive failures of a page are retried; `retry_s`: the delay before each
    retry. `restart_s`: how long after a failed sweep to start the next one, if it is not due
    earlier anyway. `least_key_bytes`: for keys that are read by partition.
    """

    retries: int = 5
    retry_s: float = 1.0
    restart_s: float = 60.0
    least_key_bytes: int = LEAST_BYTES


SWEEPS = SweepPolicy()


class Sweep:
    """One sweep of a table. `keys`: those that the lake holds, which may change meanwhile.

    Without `keys` they are found in the lake's changes, as many at a time as `key_bytes` has room
    for, and the source's keys are read once for each partition. Memory beyond the keys: a byte per
    key, and a few pages. `began` is called with each partition. To continue an interrupted sweep,
    start another whose `first` is the last of these.
    """

    def __init__(
        self,
        settings: PollingSettings,
        table: Table,
        keys: KeySet | None,
        log: ChangeLog,
        *,
        key_bytes: int,
        row_limit_bytes: int,
        page_rows: int = PAGE_ROWS,
        policy: SweepPolicy = SWEEPS,
        first: KeyPartition = WHOLE,
        began: Callable[[KeyPartition], None] = lambda _: None,
    ) -> None:
        self._first = first
        self._began = began
        self._settings = settings
        self._dsn = settings.dsn.get_secret_value()
        self._table = table
        self._keys = keys
        self._log = log
        self._key_bytes = key_bytes
        self._row_limit_bytes = row_limit_bytes
        self._page_rows = page_rows
        self._policy = policy

    async def missing(self) -> AsyncGenerator[pa.RecordBatch, None]:
        """Yield candidates: the lake's key columns, and their texts in `_cdc_raw`.

        Each key once. Always close it. Raises TransientError, TableError, OperatorError,
        ProtocolError.
        """
        async with aclosing(self._unmarked()) as parts:
            async for hashes in parts:
                async with aclosing(self._rows_of(hashes)) as batches:
                    async for rows in batches:
                        yield rows

    async def _unmarked(self) -> AsyncGenerator[Hashes, None]:
        """Yield the hashes of keys that were not found in the source, sorted, by partition."""
        if self._keys is not None:
            self._began(WHOLE)
            with self._keys.still() as hashes:
                found = hashes[~await self._marks(hashes)]
            del hashes
            yield found[self._keys.holds(found)]
            return
        held = parts_held(
            self._log,
            self._table,
            self._key_bytes,
            self._first,
            least_bytes=self._policy.least_key_bytes,
        )
        async with aclosing(held) as parts:
            async for partition, hashes in parts:
                self._began(partition)
                yield hashes[~await self._marks(hashes)]

    # --- the source --------------------------------------------------------------------------

    async def _marks(self, hashes: Hashes) -> Marks:
        marks = np.zeros(len(hashes), np.bool_)
        if not len(hashes):
            return marks
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, "sweep")  # one, so that memory it frees is reused
        try:
            async with aclosing(self._pages()) as pages:
                async for page in pages:
                    await loop.run_in_executor(thread, _mark, page, hashes, marks)
        finally:
            thread.shutdown(wait=False, cancel_futures=True)
        return marks

    async def _pages(self) -> AsyncGenerator[PackedKeys, None]:
        """Yield the source's keys; after a transient error wait, and continue from the last page.

        Marks belong to keys, not to a snapshot, so that is safe.
        """
        reader = KeyPages(self._table, self._row_limit_bytes)
        last, failures = None, 0
        while True:
            try:
                async with aclosing(self._pages_after(reader, last)) as pages:
                    async for page in pages:
                        yield page
                        last, failures = page, 0
                    return
            except psycopg.Error as error:
                fault = read_error(error, self._table.id, self._dsn)
                failures += 1
                if failures > self._policy.retries or not isinstance(fault, TransientError):
                    raise fault from error
            await asyncio.sleep(self._policy.retry_s)

    async def _pages_after(
        self, reader: KeyPages, last: PackedKeys | None
    ) -> AsyncGenerator[PackedKeys, None]:
        """Yield the pages after a page; read the next while the caller has one."""
        async with await connect(
            self._dsn,
            autocommit=False,
            statement_timeout_s=self._settings.statement_timeout,
            lock_timeout_s=self._settings.lock_timeout,
        ) as connection:
            reading = asyncio.create_task(self._page(connection, reader, last))
            try:
                while (page := await reading) is not None:
                    reading = asyncio.create_task(self._page(connection, reader, page))
                    yield page
            finally:
                await cancel_all(reading)

    async def _page(
        self, connection: AsyncConnection[Any], reader: KeyPages, before: PackedKeys | None
    ) -> PackedKeys | None:
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await reader.lock(connection)
        await ensure_described(connection, self._table)
        place = None if before is None else before.last
        rows = (
            self._page_rows if before is None else min(self._page_rows, reader.rows_after(before))
        )
        page = await reader.page(connection, place, rows)
        await connection.rollback()
        return page

    # --- the lake ----------------------------------------------------------------------------

    async def _rows_of(self, hashes: Hashes) -> AsyncGenerator[pa.RecordBatch, None]:
        """Yield the keys of these hashes, from the lake's changes."""
        is_given, left = np.zeros(len(hashes), np.bool_), len(hashes)
        if not left:
            return
        columns = hashed_columns(self._table)
        async with aclosing(self._log.changes(self._table.id, columns)) as changes:
            async for rows in changes:
                found = await asyncio.to_thread(_of_hashes, self._table, rows, hashes, is_given)
                for start in range(0, found.num_rows, BATCH_ROWS):
                    yield found.slice(start, BATCH_ROWS)
                left -= found.num_rows
                if not left:
                    return


async def absent(
    connection: AsyncConnection[Any], table: Table, keys: pa.RecordBatch, row_limit_bytes: int
) -> pa.RecordBatch:
    """Return those of these keys that the table lacks, as the connection's transaction sees it.

    The transaction is REPEATABLE READ. A key exists if the server finds it and returns the lake's
    value for it. Where it can't be queried (masked, nested, composite), all keys are read. Raises
    the errors of `KeyPages`.
    """
    if not keys.num_rows:
        return keys
    wanted = key_hashes(table, keys)
    reader = KeyPages(table, row_limit_bytes)
    await reader.lock(connection)
    found = np.zeros(len(wanted), np.bool_)
    is_requested = await reader.can_list(connection)
    pages = _listed(connection, reader, keys) if is_requested else reader.pages(connection)
    async with aclosing(pages) as pages:
        async for page in pages:
            found |= await asyncio.to_thread(_are_in, wanted, page)
    return keys.filter(pa.array(~found))


async def _listed(
    connection: AsyncConnection[Any], reader: KeyPages, keys: pa.RecordBatch
) -> AsyncGenerator[PackedKeys, None]:
    start = 0
    while start < keys.num_rows:
        rows = LISTED
        while rows > 1 and keys.slice(start, rows).nbytes > reader.page_bytes:
            rows //= 2
        some = list(new_keys(reader.table, keys.slice(start, rows)))
        start += rows
        async with aclosing(reader.pages(connection, some)) as pages:
            async for page in pages:
                yield page


# --- for threads -----------------------------------------------------------------------------


def _mark(page: PackedKeys, hashes: Hashes, marks: Marks) -> None:
    at, is_there = find(hashes, key_hashes(page.table, page.decoded()))
    marks[at[is_there]] = True


def _are_in(wanted: Hashes, page: PackedKeys) -> Marks:
    there = np.unique(key_hashes(page.table, page.decoded()))
    return find(there, wanted)[1]


def _of_hashes(
    table: Table, rows: pa.RecordBatch, hashes: Hashes, is_given: Marks
) -> pa.RecordBatch:
    """Return the keys, of these rows, that have one of the hashes and were not yielded before."""
    names = key_names(table)
    if not set(names) <= set(rows.schema.names):
        return rows.slice(0, 0)
    at, is_there = find(hashes, key_hashes(table, rows))
    which = np.flatnonzero(is_there)
    which = which[~is_given[at[which]]]
    _, first = np.unique(at[which], return_index=True)
    which = np.sort(which[first])
    is_given[at[which]] = True
    return _of_key_only(names, rows.take(pa.array(which)))


def _of_key_only(names: Sequence[str], rows: pa.RecordBatch) -> pa.RecordBatch:
    """Remove the texts of other columns from `_cdc_raw`."""
    raw = rows.column("_cdc_raw")
    if raw.null_count == len(raw):
        return rows
    kept = [
        [(name, texts[name]) for name in names if name in texts] or None if texts else None
        for texts in raw.to_pylist(maps_as_pydicts="lossy")
    ]
    at = rows.schema.get_field_index("_cdc_raw")
    return rows.set_column(at, rows.schema.field(at), pa.array(kept, raw.type))
