"""Changes of a Delta table by other engines: with Spark's SQL, or as files written by pyarrow."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

Statements = Sequence[str]
"""SQL statements, with ``{t}`` for the table."""

PROPERTIES = "ALTER TABLE {t} SET TBLPROPERTIES"
VECTORS = f"{PROPERTIES} ('delta.enableDeletionVectors' = 'true')"
MAPPING = (
    f"{PROPERTIES} ('delta.columnMapping.mode' = 'name', 'delta.minReaderVersion' = '2',"
    " 'delta.minWriterVersion' = '5')"
)
GO_ON: dict[str, Statements] = {
    "vectors": (VECTORS, "OPTIMIZE {t}"),
    "column_added": ("ALTER TABLE {t} ADD COLUMN extra string FIRST", "OPTIMIZE {t}"),
    "checkpoint_v2": (
        f"{PROPERTIES} ('delta.checkpointPolicy' = 'v2', 'delta.checkpointInterval' = '1')",
        "OPTIMIZE {t}",
    ),
}
"""Changes after which ingestd continues to write."""
STOP: dict[str, Statements] = {
    "vectors_deleted": (VECTORS, "OPTIMIZE {t}", "DELETE FROM {t} WHERE id = 200"),
    "renamed": (MAPPING, "ALTER TABLE {t} RENAME COLUMN note TO remark"),
    "column_dropped": (MAPPING, "ALTER TABLE {t} DROP COLUMN note"),
    "mapping": (MAPPING,),
    "constrained": ("ALTER TABLE {t} ADD CONSTRAINT some CHECK (id > 0 OR id IS NULL)",),
    "row_tracking": (f"{PROPERTIES} ('delta.enableRowTracking' = 'true')",),
}
"""Changes that stop the table, and only this table."""


def _layout(kind: pa.DataType) -> pa.DataType:
    """Return the type that polars and deltalake use in memory."""
    if pa.types.is_string(kind):
        return pa.large_string()
    if pa.types.is_binary(kind):
        return pa.binary_view()
    if pa.types.is_list(kind):
        return pa.large_list(_layout(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, _layout(f.type)) for f in kind])
    return kind


def _large(rows: pa.Table) -> pa.Table:
    return rows.cast(pa.schema([pa.field(f.name, _layout(f.type)) for f in rows.schema]))


def _dictionaries(rows: pa.Table) -> pa.Table:
    plain = (pa.types.is_string, pa.types.is_int64)
    columns = [
        c.dictionary_encode() if any(is_(c.type) for is_ in plain) else c for c in rows.columns
    ]
    return pa.table(columns, names=rows.column_names)


def _views(rows: pa.Table) -> pa.Table:
    views = [
        f.with_type(pa.string_view()) if pa.types.is_string(f.type) else f for f in rows.schema
    ]
    return rows.cast(pa.schema(views))


def _reversed(rows: pa.Table) -> pa.Table:
    return rows.select(rows.column_names[::-1])


Written = tuple[Callable[[pa.Table], pa.Table], Mapping[str, Any]]
REWRITTEN: Mapping[str, Written] = {
    "large": (_large, {}),
    "string_views": (_views, {}),
    "dictionaries": (_dictionaries, {}),
    "column_order": (_reversed, {"store_schema": False}),
    "int96": (lambda rows: rows, {"use_deprecated_int96_timestamps": True}),
}
"""How the rows are passed to pyarrow's writer, and its options."""


def rewrite(folder: Path, kind: str) -> None:
    """Replace all files by one, with equal rows and without statistics."""
    given, options = REWRITTEN[kind]
    handle = DeltaTable(folder)
    paths = pa.table(handle.get_add_actions())["path"].to_pylist()
    parts = [pq.ParquetFile(folder / path).read() for path in paths]
    rows = pa.concat_tables(parts, promote_options="default")
    name = f"part-{uuid.uuid4()}.parquet"
    pq.write_table(given(rows), folder / name, **options)
    times = {"deletionTimestamp": 1, "dataChange": False}
    add = {"path": name, "partitionValues": {}, "size": (folder / name).stat().st_size}
    actions: list[dict[str, Any]] = [
        {"commitInfo": {"operation": "OPTIMIZE"}},
        *({"remove": {"path": path, **times}} for path in paths),
        {"add": {**add, "modificationTime": 1, "dataChange": False}},
    ]
    commit = folder / f"_delta_log/{handle.version() + 1:020}.json"
    commit.write_text("\n".join(map(json.dumps, actions)))
