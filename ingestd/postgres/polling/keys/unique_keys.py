"""The columns that identify the rows of a polled table."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import sql

from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from ingestd.postgres.catalog.indexes import IndexRow
from ingestd.postgres.catalog.tables import ColumnRow, TableRow, qualified
from ingestd.postgres.connection.quoting import printed
from ingestd.postgres.polling.cursors import at, named
from ingestd.postgres.settings import PolledTableSettings


def key_of(
    row: TableRow,
    settings: PolledTableSettings,
    columns: Sequence[ColumnRow],
    indexes: Sequence[IndexRow],
    *,
    is_partitioned: bool,
) -> tuple[int, ...]:
    """Return the numbers of the key's columns, in its order: from the config, or the primary key.

    `columns`: all of the table's, captured or not. Raises TableError if no unique index guarantees
    the key, or if a column may be null, is excluded or is masked with null.
    """
    if settings.key is None:
        key = row.declared_key
        if key is None:
            raise _no_key(row.id, columns, indexes)
    else:
        key = _of_config(row.id, settings.key, columns)
        if not any(_identifies_rows(index, key) for index in indexes):
            raise _not_unique(row.id, settings.key, "" if is_partitioned else " CONCURRENTLY")
    names = {c.number: c.name for c in columns}
    for name in (names[number] for number in key):
        _refuse_hidden(row.id, name, settings)
    return key


def _of_config(
    table: TableId, wanted: Sequence[str], columns: Sequence[ColumnRow]
) -> tuple[int, ...]:
    found = [named(table, "key", name, columns) for name in wanted]
    for column in found:
        if column.nullable:
            quoted = printed(sql.Identifier(column.name))
            remedy = f"ALTER TABLE {qualified(table)} ALTER COLUMN {quoted} SET NOT NULL;"
            raise TableError(
                table,
                f"column {column.name!r} of the key may be null: nulls don't identify a row",
                remedy=f"{remedy}  or name others in {at(table, 'key')}",
            )
    return tuple(column.number for column in found)


def _not_unique(table: TableId, wanted: Sequence[str], how: str) -> TableError:
    listed = ", ".join(printed(sql.Identifier(name)) for name in wanted)
    return TableError(
        table,
        f"no unique index has exactly the columns of the key ({', '.join(wanted)}), and all rows",
        remedy=f"CREATE UNIQUE INDEX{how} ON {qualified(table)} ({listed});  or correct "
        f"{at(table, 'key')}",
    )


def _identifies_rows(index: IndexRow, key: Sequence[int]) -> bool:
    return index.is_unique and index.is_whole and set(index.columns) == set(key)


def _no_key(
    table: TableId, columns: Sequence[ColumnRow], indexes: Sequence[IndexRow]
) -> TableError:
    """Return the error for a table without a primary key, with a key that could serve."""
    firm = {c.number: c.name for c in columns if not c.nullable}
    for index in indexes:
        if index.is_unique and index.is_whole and firm.keys() >= set(index.columns):
            names = [firm[number] for number in index.columns]
            listed = ", ".join(f'"{name}"' for name in names)
            what = f"no primary key; the unique index {index.name} could serve as one"
            return TableError(table, what, remedy=f"set {at(table, 'key')} = [{listed}]")
    what = "no primary key: changed rows can't be distinguished from new ones"
    remedy = f"ALTER TABLE {qualified(table)} ADD PRIMARY KEY (...);  or name columns in "
    return TableError(
        table, what, remedy=f"{remedy}{at(table, 'key')} that are NOT NULL and have a unique index"
    )


def _refuse_hidden(table: TableId, name: str, settings: PolledTableSettings) -> None:
    reason = f"column {name!r} belongs to the key, which identifies the rows of changes: "
    if name in settings.exclude_columns:
        what, remedy = "it can't be excluded", f"remove it from {at(table, 'exclude_columns')}"
    elif settings.mask_columns.get(name) == "null":
        what, remedy = (
            "it can't be masked with null",
            f"use sha256 for it in {at(table, 'mask_columns')}",
        )
    else:
        return
    raise TableError(table, reason + what, remedy=remedy)
