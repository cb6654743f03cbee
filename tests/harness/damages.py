"""Damages that can be done to a Delta table without the daemon: one function for each kind."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from tests.harness.lake_faults import close_folder

Damage = Callable[[Path], object]


def newest(folder: Path) -> Path:
    return max((folder / "_delta_log").glob("*.json"))


def move_away(folder: Path) -> None:
    if folder.is_dir():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)


def _commits(folder: Path) -> list[Path]:
    return sorted((folder / "_delta_log").glob("*.json"))


def _commit(folder: Path, *actions: dict[str, Any]) -> None:
    at = DeltaTable(folder).version() + 1
    lines = [json.dumps(action) for action in actions]
    (folder / "_delta_log" / f"{at:020}.json").write_text("\n".join(lines))


def _protocol(folder: Path, reader: int, writer: int, *features: str) -> None:
    told: dict[str, Any] = {"minReaderVersion": reader, "minWriterVersion": writer}
    if features:
        told |= {"readerFeatures": list(features), "writerFeatures": list(features)}
    _commit(folder, {"protocol": told})


def _writer_features(folder: Path, *features: str) -> None:
    told = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": list(features)}
    _commit(folder, {"protocol": told})


def _alter(
    folder: Path,
    edit: Callable[[dict[str, Any]], object],
    *,
    properties: dict[str, str] | None = None,
    version: tuple[int, int] | None = None,
) -> None:
    """Change fields of the schema, by name, and properties, as ALTER TABLE does."""
    lines = (line for file in _commits(folder) for line in file.read_text().split("\n") if line)
    metadata = [a["metaData"] for a in map(json.loads, lines) if "metaData" in a][-1]
    schema = json.loads(metadata["schemaString"])
    fields = {field["name"]: field for field in schema["fields"]}
    edit(fields)
    schema["fields"] = list(fields.values())
    metadata["schemaString"] = json.dumps(schema)
    metadata["configuration"] |= properties or {}
    actions: list[dict[str, Any]] = [{"commitInfo": {"operation": "ALTER"}}, {"metaData": metadata}]
    if version is not None:
        reader, writer = version
        actions.append({"protocol": {"minReaderVersion": reader, "minWriterVersion": writer}})
    _commit(folder, *actions)


def _field(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "type": kind, "nullable": True, "metadata": {}}


_NO_TYPES = {
    "name": "more",
    "type": {"type": "array", "elementType": "void", "containsNull": True},
    "nullable": True,
    "metadata": {},
}
"""An array without a type of its elements."""


def _map_columns(fields: dict[str, Any]) -> None:
    """Add ids and physical names for column mapping: the logical names, as in Spark."""
    numbers = itertools.count(1)

    def annotate(field: dict[str, Any]) -> None:
        field["metadata"] |= {
            "delta.columnMapping.id": next(numbers),
            "delta.columnMapping.physicalName": field["name"],
        }
        inside(field["type"])

    def inside(kind: Any) -> None:
        if isinstance(kind, dict):
            for field in kind.get("fields", ()):
                annotate(field)
            inside(kind.get("elementType"))

    for field in fields.values():
        annotate(field)


def _drop_mapped(fields: dict[str, Any]) -> None:
    _map_columns(fields)
    del fields[next(name for name in ("note", "tables", "state") if name in fields)]


def _append(folder: Path) -> None:
    schema = pa.schema(DeltaTable(folder).schema().to_arrow())
    nulls = pa.table([pa.nulls(1, f.type) for f in schema], schema=schema)
    write_deltalake(folder, nulls, mode="append")


def _overwrite(folder: Path) -> None:
    other = pa.table({"something": ["else"]})
    write_deltalake(folder, other, mode="overwrite", schema_mode="overwrite")


def _no_permission(folder: Path) -> None:
    close_folder(folder)
    folder.chmod(0)


def _file_in_place(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


def remove_files(folder: Path) -> None:
    for file in folder.glob("*.parquet"):
        file.unlink()


def cut_files(folder: Path) -> None:
    for file in folder.glob("*.parquet"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


_MAPPED = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "99"}
EVER: dict[str, Damage] = {
    "garbage": lambda f: newest(f).write_text("}{\n"),
    "garbage_before": lambda f: _commits(f)[1].write_text("}{\n"),
    "reader_version": lambda f: _protocol(f, 99, 99),
    "feature": lambda f: _protocol(f, 3, 7, "fancy"),
    "no_permission": _no_permission,
    "read_only": close_folder,
    "file_in_place": _file_in_place,
    "log_is_a_file": lambda f: _file_in_place(f / "_delta_log"),
    "foreign_append": _append,
    "foreign_overwrite": _overwrite,
    "foreign_delete": lambda f: DeltaTable(f).delete("true"),
    "restored": lambda f: DeltaTable(f).restore(1),
}
"""Damages that stop a table at any time."""
AT_START: dict[str, Damage] = {
    "empty": lambda f: newest(f).write_bytes(b""),
    "nul": lambda f: newest(f).write_bytes(bytes(newest(f).stat().st_size)),
    "cut": lambda f: newest(f).write_bytes(newest(f).read_bytes()[:40]),
    "commit_removed": lambda f: _commits(f)[1].unlink(),
    "wrong_pointer": lambda f: (f / "_delta_log/_last_checkpoint").write_text(
        '{"version":77,"size":1}'
    ),
}
"""Damages that stop a table when its log is read."""
NEVER: dict[str, Damage] = {
    "optimized": lambda f: DeltaTable(f).optimize.compact(),
    "pointer": lambda f: (f / "_delta_log/_last_checkpoint").write_text("{"),
    "vectors": lambda f: _protocol(f, 3, 7, "deletionVectors"),
    "untouched": lambda _: None,
}
"""Damages after which the table continues or is re-read, and is complete."""
ALTERED: dict[str, Damage] = {
    "row_tracking": lambda f: _writer_features(f, "rowTracking", "domainMetadata"),
    "constrained": lambda f: _alter(
        f, dict, properties={"delta.constraints.some": "id > 0"}, version=(1, 3)
    ),
    "not_null": lambda f: _alter(f, lambda fields: fields["note"].update(nullable=False)),
    "mapped": lambda f: _alter(f, _map_columns, properties=_MAPPED, version=(2, 5)),
    "mapped_dropped": lambda f: _alter(f, _drop_mapped, properties=_MAPPED, version=(2, 5)),
    "column_dropped": lambda f: _alter(f, lambda fields: fields.pop("note")),
    "column_retyped": lambda f: _alter(f, lambda fields: fields["note"].update(type="binary")),
    "column_of_no_type": lambda f: _alter(
        f, lambda fields: fields.update(more=_field("more", "void"))
    ),
    "column_of_no_types": lambda f: _alter(f, lambda fields: fields.update(more=_NO_TYPES)),
    "column_untyped": lambda f: _alter(f, lambda fields: fields["note"].update(type="void")),
}
"""Changes by another engine, without rows, that must not be overwritten."""
HARMLESS: dict[str, Damage] = {
    "checkpoint_policy": lambda f: _protocol(f, 3, 7, "v2Checkpoint"),
    "change_feed": lambda f: _alter(
        f, dict, properties={"delta.enableChangeDataFeed": "true"}, version=(1, 4)
    ),
    "column_added": lambda f: _alter(f, lambda fields: fields.update(more=_field("more", "date"))),
}
"""Changes by another engine with which the table continues."""
ANYHOW = {"garbage", "garbage_before", "log_is_a_file", "reader_version"}
"""Damages that a running daemon may miss, since it appends without reading the log."""
