"""The comparison of a source with the folded lake, row by row, by the server's own texts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, LiteralString

from deltalake.exceptions import TableNotFoundError
from psycopg import sql

from ingestd.lake.delta.log_files import open_table
from ingestd.lake.delta.read import read_files, read_raw
from ingestd.lake.layout import Layout
from ingestd.lake.store.store import open_store
from ingestd.model.schema import TableId
from ingestd.testing.embedded.waiting import await_until
from ingestd.testing.oracle.folding import FoldedTable, Texts, fold
from ingestd.testing.oracle.schema_history import SchemaHistory
from ingestd.testing.oracle.server_text import canonical_float4, canonical_float8

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import psycopg

    Connection = psycopg.Connection[tuple[Any, ...]]

CATCH_UP_LIMIT_S = 60.0

_SETTINGS = (
    "SET DateStyle = 'ISO'",
    "SET TimeZone = 'UTC'",
    "SET IntervalStyle = 'iso_8601'",
    "SET extra_float_digits = 1",
    "SET bytea_output = 'hex'",
    "SET search_path = pg_catalog, pg_temp",
)
_TABLES = """
SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence = 'p'
  AND n.nspname NOT LIKE 'pg\\_%' AND n.nspname <> 'information_schema'
ORDER BY 1, 2"""
_COLUMNS = """
SELECT a.attname FROM pg_attribute a
WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
ORDER BY a.attnum"""
_FLOATS = """
SELECT attname, atttypid::int FROM pg_attribute
WHERE attrelid = %s::regclass AND atttypid IN ('float4'::regtype, 'float8'::regtype)"""
_CANONICAL: Mapping[int, Callable[[str], str]] = {700: canonical_float4, 701: canonical_float8}
_KEY = """
SELECT a.attname FROM pg_index i
CROSS JOIN unnest(i.indkey) WITH ORDINALITY k(attnum, n)
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
JOIN pg_class c ON c.oid = i.indrelid
WHERE i.indrelid = %s::regclass
  AND CASE c.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END
  AND i.indimmediate ORDER BY k.n"""

_IS_PARTITIONED = "SELECT relkind = 'p' FROM pg_class WHERE oid = %s::regclass"
_CONFIRMED = """
SELECT confirmed_flush_lsn >= %s::pg_lsn FROM pg_replication_slots WHERE slot_name = %s"""
_POSITION = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"


@dataclass(frozen=True, slots=True)
class LakeComparison:
    """The result of comparing a table in the source with its folded raw table.

    `rows`: in the source. `changes`: rows of the raw table. `lost`: rows of the source that the
    lake lacks. `doubled`: rows that the lake has beyond the source's, or twice at a position.
    `faults`: contradictions in the change log, and the first rows that differ.
    """

    table: TableId
    rows: int
    changes: int
    lost: int
    doubled: int
    faults: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """Return whether the table has no difference and no fault."""
        return not (self.lost or self.doubled or self.faults)


def source_tables(connection: Connection) -> list[TableId]:
    """Return the user tables of the database, sorted."""
    return [TableId(*row) for row in connection.execute(_TABLES).fetchall()]


def source_columns(connection: Connection, table: TableId) -> list[str]:
    """Return the captured columns: all but generated ones, in the table's order."""
    return [row[0] for row in connection.execute(_COLUMNS, [_quoted(connection, table)])]


def source_key(connection: Connection, table: TableId) -> list[str]:
    """Return the columns that identify rows, in key order: of the replica identity index or key.

    A deferrable key is left out: it is unique only at the end of a transaction.
    """
    return [row[0] for row in connection.execute(_KEY, [_quoted(connection, table)])]


def source_rows(connection: Connection, table: TableId, columns: Sequence[str]) -> Counter[Texts]:
    """Return the rows as texts of the types' output functions, with the count of equal rows."""
    # concat, as a plain cast to text is not the output function for char(n), inet and bool
    each = sql.SQL(", ").join(
        sql.SQL("CASE WHEN {0} IS NOT DISTINCT FROM NULL THEN NULL ELSE concat({0}) END").format(
            sql.Identifier(name)
        )
        for name in columns
    )
    # Rows of an inheriting table are not the table's own; those of its partitions are.
    is_partitioned = _one(connection, _IS_PARTITIONED, _quoted(connection, table))
    only = sql.SQL("" if is_partitioned else "ONLY ")
    query = sql.SQL("SELECT {} FROM {}{}").format(
        each, only, sql.Identifier(table.schema, table.name)
    )
    with connection.transaction():
        for setting in _SETTINGS:
            connection.execute(setting.replace("SET", "SET LOCAL", 1).encode())
        rows = connection.execute(query).fetchall()
    return Counter(_canonical(rows, _float_functions(connection, table, columns)))


def _float_functions(
    connection: Connection, table: TableId, columns: Sequence[str]
) -> dict[int, Callable[[str], str]]:
    """Return for each index of a float column the function that makes its texts canonical."""
    found = connection.execute(_FLOATS, [_quoted(connection, table)]).fetchall()
    types: dict[str, int] = dict(found)
    return {i: _CANONICAL[types[name]] for i, name in enumerate(columns) if name in types}


def _canonical(
    rows: Iterable[Texts], functions: Mapping[int, Callable[[str], str]]
) -> Iterable[Texts]:
    if not functions:
        return rows
    return (
        tuple(t if t is None or i not in functions else functions[i](t) for i, t in enumerate(row))
        for row in rows
    )


def folded_lake(
    uri: str, source: str, table: TableId, columns: Sequence[str], key: Sequence[str]
) -> FoldedTable:
    """Fold the raw table using its schemas in `_tables`; a missing table is empty."""
    try:
        raw = read_raw(uri, source, table)
    except TableNotFoundError:
        return FoldedTable(faults=["there is no raw table"])
    return fold(raw, columns, key, SchemaHistory.from_events(read_registry(uri, source), table))


def read_registry(uri: str, source: str) -> list[dict[str, Any]]:
    """Return the rows of `_tables`, in any order; empty if it is missing."""
    store = open_store(uri, None)
    folder = Layout(source).tables
    try:
        handle = open_table(store, folder)
    except TableNotFoundError:
        return []
    rows: list[dict[str, Any]] = read_files(handle, store, folder).to_pylist()
    return rows


def compare_table(
    connection: Connection, uri: str, source: str, table: TableId, hidden: Collection[str] = ()
) -> LakeComparison:
    """Compare one table. The writers must be idle and the lake must have caught up.

    `hidden`: columns that are left out, as the lake has no values or masked values for them.
    """
    columns = [name for name in source_columns(connection, table) if name not in hidden]
    there = source_rows(connection, table, columns)
    folded = folded_lake(uri, source, table, columns, source_key(connection, table))
    missing, surplus = there - folded.rows, folded.rows - there
    faults = [*folded.faults, *_differences("only in the source", missing)]
    faults += _differences("only in the lake", surplus)
    return LakeComparison(
        table=table,
        rows=there.total(),
        changes=folded.changes,
        lost=missing.total(),
        doubled=surplus.total() + folded.repeated,
        faults=tuple(faults),
    )


def compare_source(
    connection: Connection, uri: str, source: str, tables: Iterable[TableId] | None = None
) -> list[LakeComparison]:
    """Compare these tables, or all tables of the database."""
    chosen = source_tables(connection) if tables is None else tables
    return [compare_table(connection, uri, source, table) for table in chosen]


def await_caught_up(connection: Connection, slot: str, limit_s: float = CATCH_UP_LIMIT_S) -> None:
    """Wait until the slot is confirmed up to the current end of WAL, so that the lake holds it.

    Raise TimeoutError. (I1: the slot is confirmed only up to durable changes.)
    """
    target = _one(connection, "SELECT pg_current_wal_flush_lsn()::text")
    await_until(
        lambda: bool(_one(connection, _CONFIRMED, target, slot)),
        limit_s,
        lambda: f"slot {slot} to go from {_one(connection, _POSITION, slot)} up to {target}",
    )


def _differences(what: str, rows: Counter[Texts]) -> list[str]:
    return [f"{what}: {_shortened(row)}" for row in list(rows)[:3]]


def _shortened(row: Texts) -> str:
    return "(" + ", ".join("null" if t is None else repr(t[:40]) for t in row) + ")"


def _quoted(connection: Connection, table: TableId) -> str:
    return sql.Identifier(table.schema, table.name).as_string(connection)


def _one(connection: Connection, query: LiteralString, *values: object) -> Any:  # noqa: ANN401
    row = connection.execute(query.encode(), values or None).fetchone()
    return None if row is None else row[0]
