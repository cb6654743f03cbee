"""The columns that can serve as a table's cursor. `poll.py` reads the rows by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from ingestd.config.interpolation import key_path
from ingestd.model.errors import TableError, did_you_mean
from ingestd.model.schema import TableId
from ingestd.postgres.catalog.indexes import IndexRow
from ingestd.postgres.catalog.tables import ColumnRow
from ingestd.postgres.polling.polled_table import Cursor, CursorKind

_KINDS: Mapping[int, CursorKind] = {
    1082: "time",
    1114: "time",
    1184: "time",
    20: "number",
    21: "number",
    23: "number",
    1700: "number",
    2950: "uuid",
}
"""By OID of the type; for a domain, of its base type."""
_LIKELY = ("updat", "modif", "chang", "last")
"""Parts of the name of a column that probably increases with every write."""
SERVING = "timestamp, timestamptz, date, smallint, integer, bigint, numeric, uuid (version 7)"


def cursor_of(
    table: TableId,
    wanted: Sequence[str],
    columns: Sequence[ColumnRow],
    base_type: Callable[[int], int],
) -> Cursor:
    """Return the cursor that the config names. Raises TableError.

    `columns`: all of the table's, captured or not. `base_type` returns the base type of a domain.
    """
    kinds = []
    for name in wanted:
        column = named(table, "cursor", name, columns)
        kind = _KINDS.get(base_type(column.type_oid))
        if kind is None:
            what = (
                f"column {name!r} {column.pg_type} can't be a cursor: possible types are {SERVING}"
            )
            remedy = f"name another in {at(table, 'cursor')}, or omit it: then every poll scans"
            raise TableError(table, what, remedy=f"{remedy} the entire table")
        kinds.append(kind)
    return Cursor(tuple(wanted), kinds[0])


def likely_cursors(columns: Iterable[ColumnRow]) -> list[ColumnRow]:
    """Return the time columns whose names suggest that they increase with every write."""
    times = (c for c in columns if _KINDS.get(c.type_oid) == "time")
    return [c for c in times if any(part in c.name.lower() for part in _LIKELY)]


def is_indexed(indexes: Iterable[IndexRow], column: int) -> bool:
    """Return whether an index can return the rows in the order of this column."""
    return any(i.is_ordered and not i.is_partial and i.columns[0] == column for i in indexes)


def named(table: TableId, key: str, name: str, columns: Sequence[ColumnRow]) -> ColumnRow:
    """Return the column that the config names in `key`. Raises TableError if there is none."""
    for column in columns:
        if column.name == name:
            return column
    what = f"no column {name!r}, which {key!r} names"
    hint = did_you_mean(name, [c.name for c in columns])
    raise TableError(table, what, remedy=f"{hint}correct {at(table, key)} in the config")


def at(table: TableId, key: str) -> str:
    """Return the path of the key in the config, below the source's section."""
    return key_path(("table", str(table), key))
