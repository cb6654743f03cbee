"""Current rows as files: Parquet, CSV and JSON lines.

In CSV and JSON lines, a value that its column can't hold is the source's text (`_cdc_raw`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import IO, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from ingestd.config import TableSettings
from ingestd.config.redaction import MASK
from ingestd.lake.fold.older_types import server_texts
from ingestd.lake.fold.raw_texts import TextEntries
from ingestd.model.errors import ConfigError

RAW = "_cdc_raw"
_HASH = "^[0-9a-f]{64}$"
_JSON_TYPES = (pa.types.is_integer, pa.types.is_boolean)


class _BatchWriter(Protocol):
    def __call__(self, batch: pa.RecordBatch) -> None: ...


def write_rows(reader: pa.RecordBatchReader, form: str, output: IO[bytes]) -> int:
    """Write rows as `form`: "parquet", "csv" or "jsonl"; return their number.

    Raise ConfigError for two columns of one name.
    """
    names = reader.schema.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        msg = f"query: two columns are named {twice!r}: give each another name, by AS"
        raise ConfigError(msg)
    count = 0
    with _WRITERS[form](reader.schema, output) as write:
        for batch in reader:
            write(batch)
            count += batch.num_rows
    return count


def hidden_columns(schema: pa.Schema, controls: TableSettings) -> dict[str, str]:
    """Return the columns that the config excludes or masks, and how: "null", or "sha256".

    `schema`: of rows under the source's names, with the versions of a column merged.
    Older rows of the lake may have their values in the clear.
    """
    kinds: dict[str, str] = {c.casefold(): kind for c, kind in controls.mask_columns.items()}
    kinds |= dict.fromkeys(map(str.casefold, controls.exclude_columns), "null")
    return {name: kinds[name.casefold()] for name in schema.names if name.casefold() in kinds}


def without_hidden(reader: pa.RecordBatchReader, hidden: Mapping[str, str]) -> pa.RecordBatchReader:
    """Return rows in which hidden values are masked. `hidden`: see `hidden_columns`."""
    if not hidden:
        return reader
    batches = (_masked(batch, hidden) for batch in reader)
    return pa.RecordBatchReader.from_batches(reader.schema, batches)


def _masked(batch: pa.RecordBatch, hidden: Mapping[str, str]) -> pa.RecordBatch:
    columns = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        found = column
        if field.name in hidden and not pa.types.is_string(field.type):
            found = pa.nulls(len(column), field.type)
        elif field.name in hidden:
            is_shown = pc.match_substring_regex(column, _HASH)
            if hidden[field.name] != "sha256":
                is_shown = pc.and_(is_shown, False)  # noqa: FBT003 - Arrow's
            found = pc.if_else(pc.fill_null(is_shown, True), column, MASK)  # noqa: FBT003
        elif field.name == RAW:
            entries = TextEntries.from_column(column)
            shown = entries.renamed(lambda name: None if name in hidden else name)
            found = shown.to_column(len(column))
        columns.append(found)
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


# --- formats -------------------------------------------------------------------------------------


def _parquet(schema: pa.Schema, output: IO[bytes]) -> AbstractContextManager[_BatchWriter]:
    return _closing(pq.ParquetWriter(output, schema, compression="zstd"))


def _csv(schema: pa.Schema, output: IO[bytes]) -> AbstractContextManager[_BatchWriter]:
    """As COPY ... (FORMAT csv, HEADER, FORCE_QUOTE *): null is empty, an empty text is quoted."""
    texts = pa.schema([(n, pa.string()) for n in schema.names if n != RAW])
    options = pacsv.WriteOptions(quoting_style="all_valid")
    writer = pacsv.CSVWriter(output, texts, write_options=options)
    return _closing(writer, lambda batch: pa.RecordBatch.from_arrays(_texts(batch), schema=texts))


class _Closing(AbstractContextManager[_BatchWriter]):
    """A writer of Arrow's, and the conversion of its batches."""

    def __init__(self, writer: Any, convert: Callable[[Any], Any]) -> None:  # noqa: ANN401
        self._writer, self._convert = writer, convert

    def __enter__(self) -> _BatchWriter:
        return lambda batch: self._writer.write_batch(self._convert(batch))

    def __exit__(self, *_: object) -> None:
        self._writer.close()


def _closing(
    writer: Any,  # noqa: ANN401 - one of pyarrow's
    convert: Callable[[pa.RecordBatch], pa.RecordBatch] = lambda batch: batch,
) -> AbstractContextManager[_BatchWriter]:
    return _Closing(writer, convert)


def _jsonl(schema: pa.Schema, output: IO[bytes]) -> AbstractContextManager[_BatchWriter]:
    """One object a line. Numbers and booleans are JSON's; all else is the source's text.

    Of numbers: integers and finite floats.
    """
    names = [n for n in schema.names if n != RAW]

    def write(batch: pa.RecordBatch) -> None:
        columns = [_json_values(batch, name) for name in names]
        for row in zip(*columns, strict=True):
            line = json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False)
            output.write(line.encode() + b"\n")

    return nullcontext(write)


_WRITERS: Mapping[str, Callable[[pa.Schema, IO[bytes]], AbstractContextManager[_BatchWriter]]] = {
    "parquet": _parquet,
    "csv": _csv,
    "jsonl": _jsonl,
}


def _texts(batch: pa.RecordBatch) -> list[pa.Array]:
    return [_column_texts(batch, name) for name in batch.schema.names if name != RAW]


def _column_texts(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return a column's values as the source's texts, also those that it can't hold."""
    column = batch.column(name)
    try:
        found = server_texts(column)
    except (pa.ArrowException, TypeError):  # a type of DuckDB's that no lake has
        found = pa.array([None if v is None else str(v) for v in column.to_pylist()], pa.string())
    texts = _own_texts(batch, name)
    if not texts:
        return found
    places = np.arange(len(found))
    places[list(texts)] = len(found) + np.arange(len(texts))
    both = pa.concat_arrays([found, pa.array(list(texts.values()), pa.string())])
    return both.take(pa.array(places))


def _own_texts(batch: pa.RecordBatch, name: str) -> dict[int, str]:
    if RAW not in batch.schema.names:
        return {}
    entries = TextEntries.from_column(batch.column(RAW))
    own = entries.renamed(lambda each: each if each == name else None)
    return dict(zip(own.rows.tolist(), own.texts.to_pylist(), strict=True))


def _json_values(batch: pa.RecordBatch, name: str) -> list[Any]:
    column = batch.column(name)
    found: list[Any] = column.to_pylist()
    if any(is_kind(column.type) for is_kind in _JSON_TYPES):
        for row, text in _own_texts(batch, name).items():
            found[row] = text
        return found
    texts: list[Any] = _column_texts(batch, name).to_pylist()
    if not pa.types.is_floating(column.type):
        return texts
    # By its text: as a double, a float4 has more digits than the source wrote.
    pairs = zip(found, texts, strict=True)
    return [float(text) if v is not None and math.isfinite(v) else text for v, text in pairs]
