"""A split for readers outside the daemon: selected columns, selected rows."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
from psycopg import sql

from ingestd.model.lsn import ZERO
from ingestd.model.predicates import Predicate
from ingestd.model.schema import Table
from ingestd.ports import Split
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.snapshot.key_range import KeyRange
from ingestd.postgres.snapshot.page_reader import TablePages
from ingestd.postgres.snapshot.pushdown import condition
from ingestd.postgres.snapshot.read_view import ExportedView, RowOrigin


class CopyPageSource:
    """The rows of a range of blocks or of the key, in lake types. See `ingestd.ports.PageSource`.

    Predicates that the server can't apply exactly as the lake's values need remain: see
    `ingestd.postgres.snapshot.pushdown`. Raises KeyError for a column that the table lacks.
    """

    def __init__(
        self,
        dsn: str,
        split: Split,
        columns: Sequence[str] | None = None,
        predicates: Sequence[Predicate] = (),
        *,
        row_limit_bytes: int,
    ) -> None:
        table = split.table
        applied = [condition(table.column(p.column), p) for p in predicates]
        self._remaining = tuple(
            p for p, found in zip(predicates, applied, strict=True) if found is None
        )
        if columns is not None:
            table = replace(table, columns=tuple(map(table.column, columns)), key=(), before=())
        self._columns = [c.lake_name for c in table.columns]
        conditions = [found for found in applied if found is not None]
        view = ExportedView(dsn, split.snapshot, RowOrigin(ZERO, datetime.now(UTC)))
        rows = _of_rows(split, table, conditions)
        self._pages = TablePages(dsn, rows, view, row_limit_bytes=row_limit_bytes)

    @property
    def remaining(self) -> Sequence[Predicate]:
        """The predicates that the reader must apply."""
        return self._remaining

    async def batches(self) -> AsyncIterator[pa.RecordBatch]:
        """Yield the requested columns, and `_cdc_raw`."""
        async with contextlib.aclosing(self._pages.pages()) as pages:
            async for page in pages:
                yield page.batch.rows.select([*self._columns, "_cdc_raw"])

    async def close(self) -> None:
        """Stop reading."""
        await self._pages.close()


def _of_rows(split: Split, table: Table, conditions: Sequence[sql.Composable]) -> Split:
    """Return the split with these columns and conditions, as a range of blocks.

    A condition becomes part of the row filter. So does a range of the key, over all blocks.
    """
    keys = KeyRange.parse(split.where)
    where = split.where
    if keys is not None:
        conditions = [*keys.bounds, *conditions]
        where = BlockRange(keys.schema, keys.name, oid=keys.oid).to_text()
    texts = [found.as_string(None) for found in conditions]
    if table.row_filter is not None:
        texts.append(f"({table.row_filter})")
    row_filter = " AND ".join(texts) if texts else None
    return replace(split, table=replace(table, row_filter=row_filter), where=where)
