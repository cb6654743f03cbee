"""SQL on all tables of a source at one cut, by DuckDB.

Rows that do not fit in memory are in a folder that only this user may enter, and that is removed
with the connection. By default DuckDB would write them to the working directory, for all to read.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from psycopg import sql

from ingestd.model.errors import ConfigError, IngestdError, OperatorError
from ingestd.model.schema import TableId
from ingestd.reading.frames import optional_library
from ingestd.reading.lake import LakeSource, TableDescription

Prepare = Callable[[TableId, pa.RecordBatchReader], pa.RecordBatchReader]
"""Returns the rows that a query may see of a table's."""

_SETTINGS = {
    "enable_external_access": "false",
    "python_enable_replacements": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
}
"""A statement sees the tables that it was given: no files (those of the lake are not masked),
no variables of Python, no extensions. Nothing is downloaded."""
_SCHEMA = "public"
_CATALOG = "memory."
"""DuckDB's name of a database without a file, which a statement may write before a schema."""
_CREATE_SCHEMA = sql.SQL("CREATE SCHEMA IF NOT EXISTS {}")
_CREATE = sql.SQL("CREATE TABLE {} AS SELECT * FROM _ingestd_rows")


def run_query(
    source: LakeSource,
    statement: str,
    at: int | None = None,
    prepare: Prepare = lambda _, rows: rows,
    *,
    memory_bytes: int | None = None,
) -> pa.RecordBatchReader:
    """Run a statement on the tables at an epoch (None: the last one) and return its rows.

    A table is named as in the source, and those of the schema `public` also without it. Only the
    tables that the statement names exist for it. It can read and write nothing else, such as files.
    An empty statement returns no columns. `memory_bytes`: what DuckDB may use before it writes rows
    to files; None: its default, most of the machine's memory.

    Raise OperatorError for a statement that DuckDB refuses, also while its rows are read, and
    without DuckDB; ConfigError for a name that two tables have; and as `LakeTable.current`.
    """
    duckdb = optional_library("duckdb", "a query", "ingestd[query]")
    epoch = source.last_epoch() if at is None else at
    tables = [each for each in source.tables(epoch) if each.is_complete]
    known = ", ".join(each.name for each in tables)
    faults = _Faults(duckdb.Error, epoch, known or "none")
    with faults.of_statement():
        connection = _connect(duckdb, memory_bytes)
        connection.extract_statements(statement)  # refuses a wrong one before a table is read
        for each in _named(connection, statement, tables, duckdb.Error):
            rows = prepare(TableId.parse(each.name), source.table(each.name).current_batches(epoch))
            _fill(connection, each.name, faults.kept(rows))
        connection.execute("SET lock_configuration = true")
        found = connection.sql(statement)
        if found is None:
            return pa.schema([]).empty_table().to_reader()
        reader = found.to_arrow_reader()
    return pa.RecordBatchReader.from_batches(reader.schema, faults.of_rows(reader, connection))


@dataclass
class _Faults:
    """Reports faults of a statement, and those of the lake, which DuckDB reports as its own.

    `kinds`: DuckDB's errors. `known`: names of the tables at `epoch`.
    """

    kinds: type[Exception]
    epoch: int
    known: str
    _of_lake: list[IngestdError] = field(default_factory=list)

    def kept(self, rows: pa.RecordBatchReader) -> pa.RecordBatchReader:
        """Return rows of the lake. An error that they raise is kept."""

        def batches() -> Iterator[pa.RecordBatch]:
            try:
                yield from rows
            except IngestdError as error:
                self._of_lake.append(error)
                raise

        return pa.RecordBatchReader.from_batches(rows.schema, batches())

    @contextmanager
    def of_statement(self, *kinds: type[Exception]) -> Iterator[None]:
        """Raise the fault of the lake if there was one, else an error of DuckDB's as ours."""
        try:
            yield
        except (self.kinds, *kinds) as error:
            if self._of_lake:
                raise self._of_lake[0] from error
            raise OperatorError(
                f"query: {error}",
                remedy=f"correct the statement; the tables at epoch {self.epoch} are {self.known}",
            ) from error

    def of_rows(self, reader: pa.RecordBatchReader, connection: Any) -> Iterator[pa.RecordBatch]:  # noqa: ANN401
        """Yield a statement's rows: DuckDB computes them while they are read.

        `connection`: theirs, which is needed until then.
        """
        batches = iter(reader)
        while True:
            with self.of_statement(OSError, pa.ArrowException):  # Arrow's stream has no others
                batch = next(batches, None)
            if batch is None:
                connection.close()
                return
            yield batch


def _connect(duckdb: Any, memory_bytes: int | None) -> Any:  # noqa: ANN401 - a connection
    folder = tempfile.mkdtemp(prefix="ingestd-")
    memory = {} if memory_bytes is None else {"memory_limit": f"{memory_bytes}B"}
    connection = duckdb.connect(config={**_SETTINGS, **memory, "temp_directory": folder})
    weakref.finalize(connection, shutil.rmtree, folder, ignore_errors=True)
    connection.execute(_CREATE_SCHEMA.format(sql.Identifier(_SCHEMA)).as_string())
    connection.execute(f"SET search_path = '{_SCHEMA}'")
    return connection


def _named(
    connection: Any,  # noqa: ANN401 - of DuckDB
    statement: str,
    tables: Sequence[TableDescription],
    error: type[Exception],
) -> list[TableDescription]:
    """Return the tables that a statement names. Raise ConfigError for a name of two tables.

    DuckDB can't name those of every statement without their columns, such as a join with USING.
    Then it is each table whose name is among the statement's words.
    """
    try:
        names = {_plain(name) for name in connection.get_table_names(statement, qualified=True)}
    except error:
        text = statement.casefold()
        named = [each for each in tables if _is_mentioned(TableId.parse(each.name), text)]
    else:
        names |= {name.removeprefix(_CATALOG) for name in names}
        named = [each for each in tables if _names_of(TableId.parse(each.name)) & names]
    alike = defaultdict(list)
    for each in named:
        alike[each.name.casefold()].append(each.name)
    for same in alike.values():
        if len(same) > 1:
            raise ConfigError(
                f"query: {' and '.join(same)} are one name in DuckDB, which ignores case: read"
                " each by `ingestd export`, or LakeTable.current"
            )
    return named


_NAME = re.compile(r'(?:"(?:[^"]|"")*"|[^".\s]+)(?:\.(?:"(?:[^"]|"")*"|[^".\s]+))*')


def _plain(name: str) -> str:
    """Return a name in a statement without its quotes and alias; DuckDB ignores case in names."""
    found = _NAME.match(name)
    return (found[0] if found else name).replace('"', "").casefold()


def _names_of(table: TableId) -> set[str]:
    """Return the names that a statement may use for a table."""
    names = {f"{table.schema}.{table.name}"} | ({table.name} if table.schema == _SCHEMA else set())
    return {name.replace('"', "").casefold() for name in names}


def _is_mentioned(table: TableId, text: str) -> bool:
    """Return whether a casefolded text has a table's name, and its schema's, as words."""
    parts = {table.name.casefold(), table.schema.casefold()} - {_SCHEMA}
    words = (re.escape(part.replace('"', '""')) for part in parts)
    return all(re.search(rf"(?<!\w){word}(?!\w)", text) for word in words)


def _fill(connection: Any, name: str, rows: pa.RecordBatchReader) -> None:  # noqa: ANN401
    table = TableId.parse(name)
    schema, own = sql.Identifier(table.schema), sql.Identifier(table.schema, table.name)
    connection.execute(_CREATE_SCHEMA.format(schema).as_string())
    connection.register("_ingestd_rows", rows)
    connection.execute(_CREATE.format(own).as_string())
    connection.unregister("_ingestd_rows")
