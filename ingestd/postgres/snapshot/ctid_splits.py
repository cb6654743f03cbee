"""Splits tables into ranges of blocks, to be read under one exported snapshot.

The daemon's own snapshots, verification, reference tables and Spark's data source use it.

A range is read by a TID range scan, PostgreSQL 14 or newer. Source: PostgreSQL documentation,
"System Columns" (ctid), "SET TRANSACTION".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.model.schema import Table
from ingestd.ports import Split
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.partitions import Leaf, leaves_of
from ingestd.postgres.connection.session import connect
from ingestd.postgres.snapshot.errors import snapshot_error
from ingestd.postgres.snapshot.read_view import LOCK_TIMEOUT_S, enter_snapshot


class CtidSplits:
    """Splits of plain tables, and of the leaves of partitioned ones.

    Together they contain every row that the snapshot sees exactly once, whatever happens meanwhile
    except a rewrite, which `ingestd.postgres.snapshot.table_pages` detects. See
    `ingestd.ports.SplitManager`.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    async def splits(self, table: Table, snapshot: str, target_bytes: int) -> Sequence[Split]:
        """Split `table`; TableError if it is no longer a table, or never was one."""
        if target_bytes <= 0:
            msg = f"target_bytes must be above 0, not {target_bytes}"
            raise ValueError(msg)
        try:
            async with await connect(
                self._dsn, autocommit=False, lock_timeout_s=LOCK_TIMEOUT_S
            ) as connection:
                await enter_snapshot(connection, snapshot)
                return await split_table(connection, table, snapshot, target_bytes)
        except psycopg.Error as error:
            raise snapshot_error(error, table.id, self._dsn) from error


async def split_table(
    connection: AsyncConnection[Any], table: Table, snapshot: str, target_bytes: int
) -> Sequence[Split]:
    """Split `table` on a connection that is in the snapshot. Raises psycopg.Error, TableError."""
    return [
        Split(table, snapshot, blocks.to_text(), nbytes)
        for leaf in await leaves_of(connection, table)
        for blocks, nbytes in split_leaf(leaf, target_bytes)
    ]


def split_leaf(leaf: Leaf, target_bytes: int) -> list[tuple[BlockRange, int]]:
    """Split by blocks, with sizes. The last range is open: it includes blocks added since."""
    if leaf.is_whole:
        return [(BlockRange(leaf.schema, leaf.name, is_whole=True, oid=leaf.oid), leaf.nbytes)]
    if not leaf.is_splittable:
        return [(BlockRange(leaf.schema, leaf.name, oid=leaf.oid, file=leaf.file), leaf.nbytes)]
    return split_blocks(leaf, 0, None, target_bytes)


def split_blocks(
    leaf: Leaf, first: int, end: int | None, target_bytes: int
) -> list[tuple[BlockRange, int]]:
    """Split the blocks of a leaf from `first` to `end` (None: to the last one, and any later).

    Only blocks that exist are split: `end` may be from a record in the lake.
    """
    blocks = max(0, min(leaf.blocks, leaf.blocks if end is None else end) - first)
    nbytes = leaf.nbytes * blocks // max(1, leaf.blocks)
    count = max(1, min(blocks, -(-nbytes // target_bytes)))
    bounds = [first + blocks * i // count for i in range(count)]
    whole = BlockRange(
        leaf.schema, leaf.name, is_packed=leaf.is_packed, oid=leaf.oid, file=leaf.file
    )
    return [
        (replace(whole, start=start, end=until), nbytes // count)
        for start, until in zip(bounds, [*bounds[1:], end], strict=True)
    ]
