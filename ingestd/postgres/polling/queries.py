"""The queries of a scan: a table's columns as texts, and the fields that classify a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psycopg import sql

from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.relation_lock import whole
from ingestd.postgres.polling.polled_table import PolledTable
from ingestd.postgres.snapshot.queries import output_of, sendable

AGE, DELETED, CURSOR = range(3)
"""Fields after the table's columns: age of xmin; whether the row counts as deleted; in a near scan,
the cursor."""

_TEXT = sql.SQL("pg_catalog.text")


@dataclass(frozen=True, slots=True)
class PolledShape:
    """A table's shape in the catalog: whether it is partitioned; the type of its cursor.

    `is_indexed`: a B-tree begins with the cursor.
    """

    is_partitioned: bool
    type_oid: int
    is_indexed: bool

    def blocks_of(self, polled: PolledTable) -> BlockRange:
        """Return the table itself, without the rows of tables that inherit from it."""
        return whole(polled.table, is_partitioned=self.is_partitioned)

    def relation_of(self, polled: PolledTable) -> sql.Composable:
        """Return the FROM item."""
        return self.blocks_of(polled).relation


@dataclass(frozen=True, slots=True)
class NearRows:
    """A page of a near scan: this many rows above `after` (a cursor's text), and all their ties."""

    rows: int
    after: str | None = None


def scan_query(
    polled: PolledTable,
    condition: sql.Composable,
    relation: sql.Composable,
    *,
    bounds: Sequence[sql.Composable] = (),
    near: NearRows | None = None,
) -> sql.Composed:
    """Return the COPY, in binary format, of the rows for which `condition` and `bounds` hold.

    `relation`: the table, or one of its partitions.
    """
    table = polled.table
    fields = [sendable(c) for c in table.columns]
    fields += [
        sql.SQL("pg_catalog.age(xmin)::{}").format(_TEXT),
        sql.SQL("{}::{}").format(is_deleted(polled), _TEXT),
    ]
    conditions = [*bounds, condition]
    tail: sql.Composable = sql.SQL("")
    if near is not None:
        assert polled.by is not None
        # The column, not the selected text of the same name.
        cursor = sql.SQL("polled.{}").format(sql.Identifier(polled.by))
        fields.append(output_of(cursor))
        if near.after is not None:
            conditions.append(sql.SQL("{} > {}").format(cursor, sql.Literal(near.after)))
        tail = sql.SQL(" ORDER BY {} FETCH FIRST {} ROWS WITH TIES").format(
            cursor, sql.Literal(near.rows)
        )
    return sql.SQL(
        "COPY (SELECT {} FROM {} AS polled WHERE {}{}) TO STDOUT (FORMAT binary)"
    ).format(sql.SQL(", ").join(fields), relation, sql.SQL(" AND ").join(conditions), tail)


def is_deleted(polled: PolledTable) -> sql.Composable:
    """Return the boolean SQL expression that is true for a row that counts as deleted."""
    if polled.deleted is None:
        return sql.SQL("false")
    column = sql.Identifier(polled.deleted)
    return sql.SQL("(coalesce({}::{}, 'false') <> 'false')").format(column, _TEXT)


def xids_query(polled: PolledTable, shape: PolledShape, condition: sql.Composable) -> sql.Composed:
    """Return the query for the ages of the transactions of rows that satisfy the condition."""
    return sql.SQL("SELECT DISTINCT pg_catalog.age(xmin) FROM {} WHERE {}").format(
        shape.relation_of(polled), condition
    )


def peak_query(polled: PolledTable, shape: PolledShape) -> sql.Composed:
    """Return the query for the highest cursor's text, by an index; it skips times in the future."""
    assert polled.cursor is not None
    cursor = sql.Identifier(polled.cursor.columns[0])
    latest = _LATEST.get(shape.type_oid)
    past = sql.SQL("") if latest is None else sql.SQL(" AND {} <= {}").format(cursor, latest)
    return sql.SQL(
        "SELECT {output} FROM {table} AS polled WHERE {cursor} IS NOT NULL{past}"
        " ORDER BY polled.{cursor} DESC LIMIT 1"
    ).format(
        output=output_of(cursor),
        table=shape.relation_of(polled),
        cursor=cursor,
        past=past,
    )


_NOW = sql.SQL("pg_catalog.clock_timestamp()")
_ANYWHERE = sql.SQL("pg_catalog.clock_timestamp() + interval '14 hours'")
_LATEST = {1184: _NOW, 1114: _ANYWHERE, 1082: _ANYWHERE}
"""By type: timestamptz; timestamp without time zone, which may be in any time zone; date."""
