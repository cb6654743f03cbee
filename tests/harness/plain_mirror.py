"""A mirror made in the simplest way: the complete lake folded row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake

from ingestd.lake.definitions import Registry
from ingestd.lake.delta.read import read_files, read_raw
from ingestd.lake.layout import Layout
from ingestd.lake.store.store import open_store
from ingestd.model.schema import TIMESTAMP, TableId
from ingestd.testing.oracle.comparison import read_registry
from spark_jobs.delta_log.commits import Signature
from spark_jobs.lake.targets import MIRRORS, table_path

if TYPE_CHECKING:
    from pathlib import Path

Row = dict[str, Any]
KEPT = ("_cdc_raw", "_cdc_lsn", "_cdc_seq")
MIRROR = pa.schema(
    [
        ("epoch", pa.int64()),
        ("end_lsn", pa.int64()),
        ("last_commit_ts", TIMESTAMP),
        ("mirrored_at", TIMESTAMP),
        (
            "tables",
            pa.list_(
                pa.struct(
                    [
                        ("table", pa.string()),
                        ("version", pa.int64()),
                        ("schema_version", pa.int32()),
                    ]
                )
            ),
        ),
    ]
)


def write_mirrors(lake: Path, source: str, target: Path) -> int:
    """Bring all complete tables to the lake's last epoch; return that epoch."""
    last = epochs(lake, source)[-1]
    registry = Registry(read_registry(str(lake), source))
    versions = []
    for table in registry.tables:
        definition = registry.at(table)
        if definition is None or not definition.is_complete:
            continue
        raw = read_raw(str(lake), source, TableId.parse(table))
        changes = [r for r in raw.to_pylist() if r["_cdc_epoch"] <= last["epoch"]]
        fields = [raw.schema.field(n) for n in (*(c.name for c in definition.columns), *KEPT)]
        rows = pa.Table.from_pylist(fold(changes, definition.key), pa.schema(fields))
        path = table_path(str(target), table)
        signed = {"userMetadata": Signature("mirror", source, "", last["epoch"]).to_text()}
        write_deltalake(
            path,
            rows,
            mode="overwrite",
            schema_mode="overwrite",
            commit_properties=CommitProperties(custom_metadata=signed),
        )
        version = DeltaTable(path).version()
        schema_version = definition.schema_version
        versions.append({"table": table, "version": version, "schema_version": schema_version})
    row = {**{n: last.get(n) for n in MIRROR.names}, "tables": versions}
    write_deltalake(f"{target}/{MIRRORS}", pa.Table.from_pylist([row], MIRROR), mode="append")
    return int(last["epoch"])


def epochs(lake: Path, source: str) -> list[Row]:
    """Return the rows of `_epochs`, in order."""
    store, folder = open_store(str(lake), None), Layout(source).epochs
    rows: list[Row] = read_files(DeltaTable(store.uri(folder)), store, folder).to_pylist()
    return sorted(rows, key=lambda row: row["epoch"])


def fold(changes: list[Row], key: tuple[str, ...]) -> list[Row]:
    """Return the current rows after these raw rows."""
    current: dict[str, list[Row]] = {}
    for change in sorted(changes, key=lambda r: (r["_cdc_lsn"], r["_cdc_seq"])):
        op, raw = change["_cdc_op"], dict(change["_cdc_raw"] or {})
        if op == "t":
            current.clear()
            continue
        old_raw = {n.removeprefix("_cdc_before."): v for n, v in raw.items() if "_before." in n}
        row = {**change, "_cdc_raw": {n: v for n, v in raw.items() if "_before." not in n}}
        before = change["_cdc_before"]
        old = row if before is None else {**before, "_cdc_raw": old_raw}
        names = key or tuple(n for n in row if not n.startswith("_cdc_"))
        held = current.get(identity(old, names), []) if op in "ud" else []
        gone = held.pop() if held else old
        if op == "d":
            continue
        for name in change["_cdc_unchanged"] or ():
            row[name] = gone.get(name)
            if name in gone["_cdc_raw"]:
                row["_cdc_raw"][name] = gone["_cdc_raw"][name]
        held = current.setdefault(identity(row, names), [])
        if key:
            held.clear()
        held.append(row)
    return [row for rows in current.values() for row in rows]


def identity(row: Row, names: tuple[str, ...]) -> str:
    """Return a row's identity. It distinguishes -0.0 from 0.0; NaN equals NaN."""
    return repr([row["_cdc_raw"].get(n, row.get(n)) for n in names])
