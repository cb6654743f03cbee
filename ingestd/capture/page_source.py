"""A split for readers other than the daemon: chosen columns, chosen rows."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa

from ingestd.capture.pages import TablePages
from ingestd.ports import Split
from ingestd.positions import ZERO


class CopyPageSource:
    """A split's rows in lake types, for readers other than the daemon.

    See `ingestd.ports.PageSource`. It accepts no predicates: all come back as `remaining`.
    """

    def __init__(
        self,
        dsn: str,
        split: Split,
        columns: Sequence[str] | None = None,
        predicates: Sequence[str] = (),
    ) -> None:
        table = split.table
        if columns is not None:
            table = replace(table, columns=tuple(map(table.column, columns)), key=(), before=())
        self._columns = [c.name for c in table.columns]
        self._remaining = tuple(predicates)
        self._pages = TablePages(dsn, replace(split, table=table), ZERO, datetime.now(UTC))

    @property
    def remaining(self) -> Sequence[str]:
        """All predicates."""
        return self._remaining

    async def batches(self) -> AsyncIterator[pa.RecordBatch]:
        """Give the columns asked for, and `_cdc_raw`."""
        async with contextlib.aclosing(self._pages.batches()) as batches:
            async for batch in batches:
                yield batch.rows.select([*self._columns, "_cdc_raw"])

    async def close(self) -> None:
        """Stop reading."""
        await self._pages.close()
