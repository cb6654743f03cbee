"""SQL that creates and alters a publication, and the column lists in it. Pure.

Source: PostgreSQL documentation, CREATE PUBLICATION and ALTER PUBLICATION, "Column Lists".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from psycopg import sql

from ingestd.config import SourceSettings, TableSettings
from ingestd.model.schema import Table, TableId
from ingestd.postgres.catalog.publication import FIRST_WITH_PARTS, Published

_OPTIONS = "publish = 'insert, update, delete, truncate', publish_via_partition_root = true"

ColumnLists = Mapping[TableId, Sequence[str]]
"""The wanted column lists; a table without an entry is published with all columns."""
WHOLE: ColumnLists = MappingProxyType({})


def column_list(
    table: Table, controls: TableSettings, server_version: int
) -> tuple[str, ...] | None:
    """Return the column list that keeps excluded columns from being sent; None: send all.

    `table` as captured. With REPLICA IDENTITY FULL a list must have every column, or the server
    rejects UPDATE and DELETE on the source: there the stream drops the columns instead.
    """
    if server_version < FIRST_WITH_PARTS or not controls.exclude_columns:
        return None
    if table.replica_identity == "f":
        return None
    return tuple(c.name for c in table.columns)


def column_lists(
    tables: Iterable[Table], settings: SourceSettings, server_version: int
) -> ColumnLists:
    """Return the column lists that these captured tables need."""
    lists = {t.id: column_list(t, settings.controls(t.id), server_version) for t in tables}
    return {table: columns for table, columns in lists.items() if columns is not None}


def outdated(
    present: Mapping[TableId, Published], tables: Iterable[TableId], lists: ColumnLists
) -> set[TableId]:
    """Return those of these tables whose own entry has another column list."""
    return {
        t
        for t in tables
        if t in present
        and present[t].membership is not None
        and present[t].columns != (frozenset(lists[t]) if t in lists else None)
    }


def create_statement(
    name: str, tables: Iterable[TableId], lists: ColumnLists = WHOLE
) -> sql.Composed:
    """Return the CREATE PUBLICATION for these tables, which may be none."""
    create = sql.SQL("CREATE PUBLICATION {}").format(sql.Identifier(name))
    listed = _table_list(tables, lists)
    if listed is not None:
        create = create + sql.SQL(" FOR TABLE ") + listed
    return create + sql.SQL(f" WITH ({_OPTIONS})")


def add_statement(
    name: str,
    tables: Iterable[TableId],
    lists: ColumnLists = WHOLE,
    filters: Mapping[TableId, str] = MappingProxyType({}),
) -> sql.Composed:
    """Return the ALTER PUBLICATION that adds these tables (at least one)."""
    listed = _table_list(tables, lists, filters)
    assert listed is not None
    return sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(sql.Identifier(name), listed)


def drop_statement(name: str, tables: Iterable[TableId]) -> sql.Composed:
    """Return the ALTER PUBLICATION that drops these tables (at least one)."""
    listed = _table_list(tables)
    assert listed is not None
    return sql.SQL("ALTER PUBLICATION {} DROP TABLE {}").format(sql.Identifier(name), listed)


def complete_statement(name: str) -> sql.Composed:
    """Return the ALTER PUBLICATION that sends all operations, and partitions as their root."""
    return sql.SQL("ALTER PUBLICATION {} SET (" + _OPTIONS + ")").format(sql.Identifier(name))


def _table_list(
    tables: Iterable[TableId],
    lists: ColumnLists = WHOLE,
    filters: Mapping[TableId, str] = MappingProxyType({}),
) -> sql.Composed | None:
    """List tables for a publication; with ONLY, as a child table is a table in its own right."""
    entries = []
    for table in sorted(tables):
        entry: sql.Composable = sql.SQL("ONLY {}").format(sql.Identifier(table.schema, table.name))
        if table in lists:
            columns = sql.SQL(", ").join(map(sql.Identifier, lists[table]))
            entry = sql.SQL("{} ({})").format(entry, columns)
        row_filter = filters.get(table)
        if row_filter is not None:
            entry = sql.SQL("{} WHERE ({})").format(entry, sql.SQL(row_filter))
        entries.append(entry)
    return sql.SQL(", ").join(entries) if entries else None
