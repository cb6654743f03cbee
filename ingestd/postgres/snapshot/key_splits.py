"""Splits tables into ranges of their key, in the order of its index.

Only for reads that may continue under a later snapshot (`PostgresConnector.splits`, `resumable`):
Spark's data source with that option. The daemon's own snapshots split by ctid (`ctid_splits`).

The server does all comparisons, with the index's own operators and collations, so any type of key
will do. A range contains the same rows at any snapshot, unlike a range of blocks. It is slower to
read, because rows of adjacent keys may be anywhere in the table.

The bounds are quantiles of a sample of blocks. For 16 ranges of 1M rows (170 MB) with a bigint or
uuid key they take 10 to 40 ms, whether vacuumed or not; stepping through the index with OFFSET
takes 1 to 3 s, sorting all keys 0.3 to 1.4 s. The histogram of pg_stats takes 1 ms, but it exists
only after an ANALYZE, for roles that may read the column, and for the first column of the key.

Source: PostgreSQL documentation, "Row Constructor Comparison", "SELECT" (TABLESAMPLE), pg_index,
pg_amop.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.rows import class_row

from ingestd.decode.values.encodings import Encoding
from ingestd.model.schema import Table
from ingestd.ports import Split
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.partitions import Leaf, leaves_of
from ingestd.postgres.catalog.relation_lock import lock_table
from ingestd.postgres.connection.session import (
    connect,
    query_bytes,
    read_bytes_as_they_are,
    sent_encoding,
)
from ingestd.postgres.snapshot.errors import snapshot_error
from ingestd.postgres.snapshot.key_lookup import RUNS_CODE
from ingestd.postgres.snapshot.key_range import KeyColumn, KeyRange
from ingestd.postgres.snapshot.read_view import LOCK_TIMEOUT_S, enter_snapshot

SAMPLED_BLOCKS_PER_SPLIT = 64
"""With more blocks splits are more even; this many vary by about a quarter if keys follow the
order of the blocks."""
MAX_SAMPLED_BLOCKS = 20_000
MIN_SPLIT_BYTES = 8192
"""The least size of a split: less than a block is not worth a query."""

# The primary key, else the index of the replica identity: unique, no nulls, no expressions, all
# rows. For a domain its base type, which is how values are compared. btree: strategy 1 is <, 4
# is >=.
_KEY = """
SELECT {} AS runs_code, i.indexrelid::int8 AS index_oid, a.attname::text AS name,
       tn.nspname::text AS type_schema, t.typname::text AS type_name,
       tn.nspname <> 'pg_catalog' AND t.oid <> a.atttypid AS is_cast,
       ln.nspname::text AS operator_schema, l.oprname::text AS less, g.oprname::text AS not_less,
       cn.nspname::text AS collation_schema, c.collname::text AS collation_name
  FROM pg_catalog.pg_index i
 CROSS JOIN LATERAL ROWS FROM (
       unnest(i.indkey::int2[]), unnest(i.indclass::oid[]), unnest(i.indcollation::oid[]))
       WITH ORDINALITY k(number, opclass, collation_oid, place)
  JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
 CROSS JOIN LATERAL (
       WITH RECURSIVE below AS (
         SELECT d.oid, d.typtype, d.typbasetype FROM pg_catalog.pg_type d WHERE d.oid = a.atttypid
         UNION ALL
         SELECT d.oid, d.typtype, d.typbasetype FROM below
           JOIN pg_catalog.pg_type d ON d.oid = below.typbasetype)
       SELECT oid FROM below WHERE typtype <> 'd') AS base
  JOIN pg_catalog.pg_type t ON t.oid = base.oid
  JOIN pg_catalog.pg_namespace tn ON tn.oid = t.typnamespace
  JOIN pg_catalog.pg_opclass oc ON oc.oid = k.opclass
  JOIN pg_catalog.pg_amop la ON la.amopfamily = oc.opcfamily AND la.amopstrategy = 1
       AND la.amoplefttype = oc.opcintype AND la.amoprighttype = oc.opcintype
  JOIN pg_catalog.pg_amop ga ON ga.amopfamily = oc.opcfamily AND ga.amopstrategy = 4
       AND ga.amoplefttype = oc.opcintype AND ga.amoprighttype = oc.opcintype
  JOIN pg_catalog.pg_operator l ON l.oid = la.amopopr
  JOIN pg_catalog.pg_namespace ln ON ln.oid = l.oprnamespace
  JOIN pg_catalog.pg_operator g ON g.oid = ga.amopopr AND g.oprnamespace = l.oprnamespace
  LEFT JOIN pg_catalog.pg_collation c ON c.oid = k.collation_oid
  LEFT JOIN pg_catalog.pg_namespace cn ON cn.oid = c.collnamespace
 WHERE i.indrelid = %s AND i.indisvalid AND (i.indisprimary OR i.indisreplident)
 ORDER BY i.indisprimary DESC, i.indexrelid, k.place
""".format(RUNS_CODE.replace("b.oid", "t.oid"))  # noqa: S608 - constants


@dataclass(frozen=True, slots=True)
class _KeyRow:
    """A column of the index, from the catalog."""

    index_oid: int
    name: str
    type_schema: str
    type_name: str
    is_cast: bool
    runs_code: bool
    operator_schema: str
    less: str
    not_less: str
    collation_schema: str | None
    collation_name: str | None

    @property
    def order(self) -> tuple[str, str, str]:
        """The operators that order the column."""
        return self.operator_schema, self.less, self.not_less


class KeySplits:
    """Splits by key of plain tables, and of the leaves of partitioned ones.

    Together they contain every row that the snapshot sees exactly once. A relation without a key,
    or whose key has a masked or excluded column, is one split. See `ingestd.ports.SplitManager`.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    async def splits(self, table: Table, snapshot: str, target_bytes: int) -> Sequence[Split]:
        """Split `table`; TableChangedError if it was dropped, TableError if it is not a table."""
        if target_bytes <= 0:
            msg = f"target_bytes must be above 0, not {target_bytes}"
            raise ValueError(msg)
        found: list[Split] = []
        try:
            async with await connect(
                self._dsn, autocommit=False, lock_timeout_s=LOCK_TIMEOUT_S
            ) as connection:
                await enter_snapshot(connection, snapshot)
                for leaf in await leaves_of(connection, table):
                    ranges = await _split_leaf(connection, table, leaf, target_bytes)
                    nbytes = leaf.nbytes // len(ranges)
                    found += [Split(table, snapshot, where, nbytes) for where in ranges]
        except psycopg.Error as error:
            raise snapshot_error(error, table.id, self._dsn) from error
        return found


async def _split_leaf(
    connection: AsyncConnection[Any], table: Table, leaf: Leaf, target_bytes: int
) -> list[str]:
    """Return the texts of a leaf's splits, for `Split.where`."""
    visible = {c.name for c in table.columns if c.mask is None}
    key: tuple[KeyColumn, ...] = ()
    count = -(-leaf.nbytes // max(target_bytes, MIN_SPLIT_BYTES))
    if count > 1 and not leaf.is_whole:
        key = await _key_of(connection, leaf, visible)
    if not key:
        return [_blocks(leaf).to_text()]
    await lock_table(connection, table, _blocks(leaf))
    bounds = await _bounds(connection, leaf, key, count)
    ends = [None, *bounds, None]
    return [
        KeyRange(leaf.schema, leaf.name, key, lower, upper, leaf.oid).to_text()
        for lower, upper in itertools.pairwise(ends)
    ]


def _blocks(leaf: Leaf) -> BlockRange:
    return BlockRange(
        leaf.schema, leaf.name, is_whole=leaf.is_whole, is_packed=leaf.is_packed, oid=leaf.oid
    )


async def _key_of(
    connection: AsyncConnection[Any], leaf: Leaf, visible: Collection[str]
) -> tuple[KeyColumn, ...]:
    """Return the first columns of the key with the same pair of operators; () without a key.

    Only `visible` ones: their values are in the splits.
    """
    async with connection.cursor(row_factory=class_row(_KeyRow)) as cursor:
        await cursor.execute(_KEY, (leaf.oid,))
        rows = await cursor.fetchall()
    chosen = itertools.takewhile(
        lambda row: (
            row.index_oid == rows[0].index_oid
            and row.order == rows[0].order
            and row.name in visible
            and not row.runs_code
        ),
        rows,
    )
    return tuple(
        KeyColumn(
            row.name,
            (row.type_schema, row.type_name),
            row.order,
            None
            if row.collation_name is None
            else (row.collation_schema or "", row.collation_name),
            is_cast=row.is_cast,
        )
        for row in chosen
    )


async def _bounds(
    connection: AsyncConnection[Any], leaf: Leaf, key: Sequence[KeyColumn], count: int
) -> list[tuple[str, ...]]:
    """Return keys that divide the leaf into at most `count` ranges with about equally many rows."""
    fields = [sql.Identifier(f"k{i}") for i in range(len(key))]
    query = sql.SQL(
        "SELECT {fields} FROM (SELECT {texts}, pg_catalog.row_number() OVER (ORDER BY {order}) - 1"
        " AS n, pg_catalog.count(*) OVER () AS total FROM ONLY {relation} AS source{sample})"
        " AS sampled WHERE n > 0 AND n * {count} / total > (n - 1) * {count} / total ORDER BY n"
    ).format(
        fields=sql.SQL(", ").join(fields),
        texts=sql.SQL(", ").join(
            sql.SQL("{} AS {}").format(column.text, field)
            for column, field in zip(key, fields, strict=True)
        ),
        order=sql.SQL(", ").join(column.ordering for column in key),
        relation=sql.Identifier(leaf.schema, leaf.name),
        sample=_sample(leaf, count),
        count=count,
    )
    await read_bytes_as_they_are(connection)
    cursor = await connection.execute(query_bytes(connection, query))
    result, encoding = cursor.pgresult, sent_encoding(connection)
    assert result is not None
    rows = [[result.get_value(i, n) for n in range(len(key))] for i in range(result.ntuples)]
    found = [_decoded(row, encoding) for row in rows]
    await read_bytes_as_they_are(connection, yes=False)
    # With only a key's first columns the same values may occur more than once.
    return [bound for bound, _ in itertools.groupby(b for b in found if b is not None)]


def _sample(leaf: Leaf, count: int) -> sql.Composable:
    """Return the clause that samples blocks, always the same ones; empty to read all."""
    wanted = min(count * SAMPLED_BLOCKS_PER_SPLIT, MAX_SAMPLED_BLOCKS)
    if wanted >= leaf.blocks:
        return sql.SQL("")
    return sql.SQL(" TABLESAMPLE pg_catalog.system ({}) REPEATABLE (0)").format(
        100 * wanted / leaf.blocks
    )


def _decoded(row: Sequence[bytes | None], encoding: Encoding | None) -> tuple[str, ...] | None:
    """Return a bound; None if it can't be converted to UTF-8."""
    values = [v or b"" for v in row]
    try:
        return tuple(v.decode() if encoding is None else encoding.decode(v) for v in values)
    except UnicodeDecodeError:
        return None
