"""SQL on all tables of a source at one cut, by DuckDB, in memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
from psycopg import sql

from ingestd.model.errors import OperatorError
from ingestd.model.schema import TableId
from ingestd.reading.frames import optional_library
from ingestd.reading.lake import LakeSource

Prepare = Callable[[TableId, pa.RecordBatchReader], pa.RecordBatchReader]
"""Returns the rows that a query may see of a table's."""


def _every_row(_: TableId, rows: pa.RecordBatchReader) -> pa.RecordBatchReader:
    return rows


_CREATE_SCHEMA = sql.SQL("CREATE SCHEMA IF NOT EXISTS {}")
_CREATE = sql.SQL("CREATE TABLE {} AS SELECT * FROM _ingestd_rows")
_REPLACE = sql.SQL("CREATE OR REPLACE TABLE {} AS SELECT * FROM _ingestd_rows")


def run_query(
    source: LakeSource,
    statement: str,
    at: int | None = None,
    prepare: Prepare = lambda _, rows: rows,
) -> pa.RecordBatchReader:
    """Run a statement on the tables at an epoch (None: the last one) and return its rows.

    A table is named as in the source, and those of the schema `public` also without it. Only the
    tables that the statement names are read. Raise OperatorError for a statement that DuckDB
    refuses, and without DuckDB; and as `LakeTable.current`. A statement without rows, such as COPY,
    returns no columns.
    """
    duckdb = optional_library("duckdb", "a query", "ingestd[query]")
    epoch = source.last_epoch() if at is None else at
    tables = source.tables(epoch)
    # Nothing is downloaded: DuckDB would install extensions that a statement mentions.
    connection = duckdb.connect(config={"autoinstall_known_extensions": "false"})
    try:
        connection.execute("CREATE SCHEMA IF NOT EXISTS public")
        connection.execute("SET search_path = 'main,public'")
        for each in tables:
            if each.is_complete:
                _fill(connection, each.name, each.columns.empty_table().to_reader(), _CREATE)
        named = {_plain(name) for name in connection.get_table_names(statement, qualified=True)}
        for each in tables:
            table = TableId.parse(each.name)
            if _names_of(table) & named:
                rows = source.table(each.name).current_batches(at=epoch)
                _fill(connection, each.name, prepare(table, rows), _REPLACE)
        rows = connection.sql(statement)
        return pa.schema([]).empty_table().to_reader() if rows is None else rows.to_arrow_reader()
    except duckdb.Error as error:
        known = ", ".join(each.name for each in tables if each.is_complete)
        raise OperatorError(
            f"query: {error}",
            remedy=f"correct the statement; the tables at epoch {epoch} are {known or 'none'}",
        ) from error


_NAME = re.compile(r'(?:"(?:[^"]|"")*"|[^".\s]+)(?:\.(?:"(?:[^"]|"")*"|[^".\s]+))*')


def _plain(name: str) -> str:
    """Return a name in a statement without its quotes and alias; DuckDB ignores case in names."""
    found = _NAME.match(name)
    return (found[0] if found else name).replace('"', "").casefold()


def _names_of(table: TableId) -> set[str]:
    """Return the names that a statement may use for a table."""
    names = {f"{table.schema}.{table.name}"} | ({table.name} if table.schema == "public" else set())
    return {name.replace('"', "").casefold() for name in names}


def _fill(connection: Any, name: str, rows: pa.RecordBatchReader, create: sql.SQL) -> None:  # noqa: ANN401
    table = TableId.parse(name)
    schema, own = sql.Identifier(table.schema), sql.Identifier(table.schema, table.name)
    connection.execute(_CREATE_SCHEMA.format(schema).as_string())
    connection.register("_ingestd_rows", rows)
    connection.execute(create.format(own).as_string())
    connection.unregister("_ingestd_rows")
