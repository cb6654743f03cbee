"""The queries that read a range of blocks: row by row as texts, or packed by column.

The text of a value is the output of its type's output function, as in the stream (design section
8.4). The format is binary, which needs no escaping and has the length of each value. What the
stream would not send is not read: a column masked with null, a row that the publication's filter
excludes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from psycopg import sql

from ingestd.decode.copy.packing import ABSENT, BETWEEN, ColumnForm, Packing, fixed, form_of
from ingestd.model.schema import Column, Table
from ingestd.postgres.catalog.block_range import BlockRange

_NOTHING = sql.SQL("NULL::pg_catalog.text")

_TEXT_AS_IS = frozenset({19, 25, 114, 1042, 1043})  # name, text, json, bpchar, varchar
"""Types whose binary form is also the text of the output function."""
_TEXT_BY_CAST = frozenset(
    {17, 19, 20, 21, 23, 25, 26, 114, 700, 701, 1043}
    | {1082, 1083, 1114, 1184, 1186, 1266, 1700, 2950, 3802}
)
"""Built-in types whose cast to text is their output function, or changes nothing."""


class RowSelection(Protocol):
    """The rows to read."""

    @property
    def relation(self) -> sql.Composable:
        """The FROM item."""
        ...

    @property
    def bounds(self) -> list[sql.Composable]:
        """The conditions, to be joined with AND."""
        ...


def rows_query(
    table: Table, rows: RowSelection, conditions: Sequence[sql.Composable] = ()
) -> sql.Composed:
    """Return the COPY of the table's columns, each the text of its value: for CopyDecoder."""
    columns = sql.SQL(", ").join(map(sendable, table.columns))
    return sql.SQL("COPY (SELECT {} FROM {}{}) TO STDOUT (FORMAT binary)").format(
        columns, rows.relation, _where([*rows.bounds, *conditions, *_row_filter(table)])
    )


def probe_query(table: Table, rows: RowSelection) -> sql.Composed:
    """Return a query like `rows_query` that reads no row, but raises what would prevent reading."""
    columns = sql.SQL(", ").join(map(sendable, table.columns))
    return sql.SQL("SELECT {} FROM {}{} LIMIT 0").format(
        columns, rows.relation, _where([*rows.bounds, *_row_filter(table)])
    )


def _where(conditions: list[sql.Composable]) -> sql.Composable:
    """Return the WHERE clause, with a leading space; empty without conditions."""
    if not conditions:
        return sql.SQL("")
    return sql.SQL(" WHERE ") + sql.SQL(" AND ").join(conditions)


def _row_filter(table: Table) -> list[sql.Composable]:
    """Return the publication's condition: the server's own text, on unqualified columns."""
    return [] if table.row_filter is None else [sql.SQL("({})").format(sql.SQL(table.row_filter))]


def sendable(column: Column) -> sql.Composable:
    """Return the SQL whose binary form is the text of the column's value."""
    if _is_hidden(column):
        return _NOTHING
    if column.type_oid in _TEXT_AS_IS:
        return sql.Identifier(column.name)
    return as_text(column)


def _is_hidden(column: Column) -> bool:
    return column.mask is not None and column.mask.kind == "null"


def as_text(column: Column) -> sql.Composable:
    """Return the SQL expression, of type text, for the result of the type's output function.

    A plain ``::text`` calls another function for bool, char(n), inet, xml and types with a
    user-defined cast; ``concat`` always calls the output function. (IS NULL would be true for a
    composite value of nulls.)
    """
    name = sql.Identifier(column.name)
    if column.type_oid in _TEXT_BY_CAST:
        return sql.SQL("{}::pg_catalog.text").format(name)
    return output_of(name)


def output_of(value: sql.Composable) -> sql.Composable:
    """Return the SQL expression, of type text, for the result of any type's output function."""
    return sql.SQL("CASE WHEN {0} IS DISTINCT FROM NULL THEN pg_catalog.concat({0}) END").format(
        value
    )


def columns_query(
    table: Table,
    blocks: BlockRange,
    blocks_per_run: int,
    packing: Packing,
    conditions: Sequence[sql.Composable] = (),
) -> sql.Composed:
    """Return the COPY of packed columns (see `ingestd.decode.copy.packing`): for ColumnarDecoder.

    One row for each `blocks_per_run` blocks that have rows, in their order. OFFSET 0 keeps the
    inner query separate, so that each expression is computed once. `run.first` is qualified, so no
    column of the table can hide it.
    """
    return sql.SQL(
        "COPY (SELECT run.first, packed.* FROM pg_catalog.generate_series({start}::pg_catalog.int8,"
        " {last}, {step}) AS run(first) CROSS JOIN LATERAL (SELECT {outer} FROM (SELECT {inner}"
        " FROM {relation} AS source{where} OFFSET 0) AS rows)"
        " AS packed WHERE packed.n > 0) TO STDOUT (FORMAT binary)"
    ).format(
        start=blocks.start,
        last=_last(blocks),
        step=blocks_per_run,
        outer=packed(table, packing),
        inner=packable(table),
        relation=blocks.relation,
        where=_where([*_run_bounds(blocks, blocks_per_run), *conditions, *_row_filter(table)]),
    )


def packable(table: Table) -> sql.Composable:
    """Return the expressions that `packed` aggregates, for each row."""
    return sql.SQL(", ").join(
        sql.SQL("{} AS {}").format(_packable(c), packable_name(i))
        for i, c in enumerate(table.columns)
    )


def packable_name(number: int) -> sql.Identifier:
    """Return the name of the column of `packable` for the table's column of this number."""
    return sql.Identifier(f"c{number}")


def packed(table: Table, packing: Packing, *, is_converted: bool = False) -> sql.Composable:
    """Return the aggregates: the number of rows, `n`, and the packed columns.

    `is_converted`: the server stores texts in another encoding than it sends.
    """
    fields: list[sql.Composable] = [sql.SQL("pg_catalog.count(*)::pg_catalog.int4 AS n")]
    for i, column in enumerate(table.columns):
        alias = packable_name(i)
        if packing is Packing.MARKED and form_of(column) is not ColumnForm.BYTES:
            fields += _marked(column, alias)
        else:
            fields += _measured(column, alias, is_converted=is_converted)
    return sql.SQL(", ").join(fields)


def _packable(column: Column) -> sql.Composable:
    if _is_hidden(column):
        return _NOTHING
    return as_text(column) if form_of(column) is ColumnForm.TEXT else sql.Identifier(column.name)


def _marked(column: Column, alias: sql.Identifier) -> list[sql.Composable]:
    count = sql.SQL("pg_catalog.count({})::pg_catalog.int4").format(alias)
    if form_of(column) is ColumnForm.TEXT:
        texts = "pg_catalog.string_agg(coalesce({}, pg_catalog.chr({})), pg_catalog.chr({}))"
        return [sql.SQL(texts).format(alias, ord(ABSENT), ord(BETWEEN)), count]
    kind = fixed(column)
    value: sql.Composable = sql.SQL("pg_catalog.{}({})").format(sql.Identifier(kind.send), alias)
    if column.nullable:
        value = sql.SQL("coalesce({}, {}::pg_catalog.bytea)").format(value, f"\\x{kind.mark.hex()}")
    joined = sql.SQL("pg_catalog.string_agg({}, ''::pg_catalog.bytea)").format(value)
    return [joined, count] if column.nullable else [joined]


def _measured(column: Column, alias: sql.Identifier, *, is_converted: bool) -> list[sql.Composable]:
    form = form_of(column)
    if form is ColumnForm.FIXED:
        return [sql.SQL("pg_catalog.array_agg({})").format(alias)]
    kind = "bytea" if form is ColumnForm.BYTES else "text"
    sent: sql.Composable = alias
    if is_converted and form is ColumnForm.TEXT:
        sent = sql.SQL("pg_catalog.convert_to({}, 'UTF8')").format(alias)
    return [
        sql.SQL("pg_catalog.string_agg({}, ''::pg_catalog.{})").format(alias, sql.SQL(kind)),
        sql.SQL("pg_catalog.array_agg(pg_catalog.octet_length({}))").format(sent),
    ]


def _run_bounds(blocks: BlockRange, blocks_per_run: int) -> list[sql.Composable]:
    bound = "ctid {} pg_catalog.format('(%s,0)', {{}})::pg_catalog.tid"
    return [
        sql.SQL(bound.format(">=")).format(sql.SQL("run.first")),
        sql.SQL(bound.format("<")).format(_until(blocks, blocks_per_run)),
    ]


def _last(blocks: BlockRange) -> sql.Composable:
    """Return the last block; without an end, the current last one: the snapshot is older."""
    if blocks.end is not None:
        return sql.Literal(blocks.end - 1)
    name = sql.Identifier(blocks.schema, blocks.name).as_string(None)
    return sql.SQL(
        "pg_catalog.pg_relation_size({}::pg_catalog.regclass)"
        " / pg_catalog.current_setting('block_size')::pg_catalog.int8 - 1"
    ).format(name)


def _until(blocks: BlockRange, blocks_per_run: int) -> sql.Composable:
    until = sql.SQL("run.first + {}").format(blocks_per_run)
    if blocks.end is None:
        return until
    return sql.SQL("least({}, {})").format(until, blocks.end)
