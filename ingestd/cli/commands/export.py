"""`ingestd export` and `ingestd query`."""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from ingestd.cli.errors import load, reporting
from ingestd.cli.options import ConfigFile, Debug, SourceName, TableName, known_source
from ingestd.model.errors import ConfigError, OperatorError
from ingestd.process.file_creation import create_binary
from ingestd.terminal.echo import echo

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from ingestd.config import Config
    from ingestd.model.schema import TableId
    from ingestd.reading.lake import LakeSource


class ExportFormat(StrEnum):
    """Formats of files."""

    parquet = "parquet"
    csv = "csv"
    jsonl = "jsonl"


AtEpoch = Annotated[
    int | None,
    typer.Option("--at", metavar="EPOCH", min=1, help="The epoch.", show_default="the last one"),
]
Format = Annotated[ExportFormat, typer.Option("--format", help="csv, jsonl or parquet.")]
OutputFile = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="A new file.", show_default="standard output"
    ),
]
Columns = Annotated[
    list[str] | None,
    typer.Option("--column", metavar="NAME", help="Only this column; may be repeated."),
]
MODE = 0o666
"""Of an exported file, reduced by the umask."""
Statement = Annotated[str, typer.Argument(metavar="SQL", help="A statement of DuckDB's SQL.")]


def export(
    source: SourceName,
    table: TableName,
    *,
    config: ConfigFile,
    form: Format = ExportFormat.csv,
    at: AtEpoch = None,
    columns: Columns = None,
    output: OutputFile = None,
    debug: Debug = False,
) -> None:
    """Write the rows of a table, now or at an epoch, from the lake.

    Excluded and masked columns stay masked.
    """
    with reporting(debug=debug, config=config):
        from ingestd.model.schema import TableId  # noqa: PLC0415

        found = load(config)
        rows = _source(found, source).table(table)
        reader = rows.current_batches(at=at, columns=columns or None)
        _write(_masked(found, source, TableId.parse(table), reader), form, output)


def query(
    source: SourceName,
    sql: Statement,
    *,
    config: ConfigFile,
    form: Format = ExportFormat.csv,
    at: AtEpoch = None,
    output: OutputFile = None,
    debug: Debug = False,
) -> None:
    """Run SQL on a source's tables in the lake, by DuckDB.

    All tables are as of one epoch, under the names of the source. Excluded and masked columns
    stay masked. DuckDB is not installed with ingestd: pip install 'ingestd[query]'.
    """
    with reporting(debug=debug, config=config):
        from ingestd.reading.query import run_query  # noqa: PLC0415

        found = load(config)
        lake = _source(found, source)
        reader = run_query(lake, sql, at, lambda table, rows: _masked(found, source, table, rows))
        _write(reader, form, output)


def _source(config: Config, source: str) -> LakeSource:
    from ingestd.reading.lake import open_lake  # noqa: PLC0415

    known_source(config, source)
    options = {k: v.get_secret_value() for k, v in config.lake.storage_options.items()}
    return open_lake(config.lake.uri, options or None).source(source)


def _masked(
    config: Config, source: str, table: TableId, reader: pa.RecordBatchReader
) -> pa.RecordBatchReader:
    from ingestd.reading.export import hidden_columns, without_hidden  # noqa: PLC0415

    controls = config.sources[source].controls(table)
    return without_hidden(reader, hidden_columns(reader.schema, controls))


def _write(reader: pa.RecordBatchReader, form: ExportFormat, output: Path | None) -> None:
    from ingestd.reading.export import write_rows  # noqa: PLC0415

    if output is None:
        if form is ExportFormat.parquet and sys.stdout.isatty():
            raise ConfigError("--output: Parquet is not written to a terminal: name a file")
        write_rows(reader, form, sys.stdout.buffer)
        sys.stdout.flush()
        return
    with _new_file(output) as file:
        count = write_rows(reader, form, file)
    echo(f"{output}: {count:,} rows", err=True)


def _give_name(partial: Path, path: Path) -> None:
    """Rename a complete file. Raise FileExistsError if the name exists by now."""
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(path) from None
        partial.rename(path)


@contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that gets its name when it is complete. Raise ConfigError if it exists."""
    if path.exists():
        raise ConfigError(f"--output: {path} exists; nothing was written")
    partial = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.partial")
    try:
        with create_binary(partial, MODE) as file:
            yield file
        _give_name(partial, path)
    except FileExistsError as error:
        raise ConfigError(f"--output: {path} exists; nothing was written") from error
    except OSError as error:
        raise OperatorError(
            f"{path} can't be written: {error.strerror}", remedy="choose another file"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
