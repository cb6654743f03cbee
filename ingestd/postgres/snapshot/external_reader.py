"""A split for readers outside the daemon: selected columns, selected rows."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pyarrow as pa

from ingestd.model.lsn import ZERO
from ingestd.model.predicates import Predicate
from ingestd.ports import Split
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.snapshot.key_range import KeyRange
from ingestd.postgres.snapshot.pushdown import condition
from ingestd.postgres.snapshot.read_view import ExportedView, ReadPoint
from ingestd.postgres.snapshot.table_pages import TablePages
from ingestd.process.clock import utc_now


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
        names = [c.name for c in table.columns] if columns is None else columns
        self._columns = [table.column(name).lake_name for name in names]
        conditions = [found for found in applied if found is not None]
        keys = KeyRange.parse(split.where)
        if keys is not None:  # over all blocks
            conditions = [*keys.bounds, *conditions]
            blocks = BlockRange(keys.schema, keys.name, oid=keys.oid)
            split = replace(split, where=blocks.to_text())
        view = ExportedView(dsn, split.snapshot, ReadPoint(ZERO, utc_now()))
        self._pages = TablePages(
            dsn,
            split,
            view,
            row_limit_bytes=row_limit_bytes,
            columns=columns,
            conditions=conditions,
        )

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
