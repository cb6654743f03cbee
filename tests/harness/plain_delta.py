"""The rows of a version of a Delta table, read directly from its log, without Spark.

Spark takes half a second to replay the log of a table of three rows, and tests read many such
tables. Every commit is read, so the log must not be cleaned up. Source: Delta transaction log
protocol, "Actions", "Column Mapping", "Deletion Vector Format".
"""

from __future__ import annotations

import base64
import json
import struct
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_TO_B85 = str.maketrans(_Z85, _B85)
_MAGIC = struct.pack("<i", 1681511377)


def read_delta(path: Path, version: int) -> list[dict[str, Any]]:
    """Return the rows of a version by column name; a column that a file lacks is null."""
    adds: dict[str, dict[str, Any]] = {}
    schema: dict[str, Any] = {}
    for number in range(version + 1):
        for line in (path / "_delta_log" / f"{number:020}.json").read_text().splitlines():
            entry = json.loads(line)
            if "metaData" in entry:
                schema = json.loads(entry["metaData"]["schemaString"])
            if "remove" in entry:
                adds.pop(_key(entry["remove"]), None)
            if "add" in entry:
                adds[_key(entry["add"])] = entry["add"]
    names = {
        field["metadata"].get("delta.columnMapping.physicalName", field["name"]): field["name"]
        for field in schema["fields"]
    }
    nothing = dict.fromkeys(names.values())
    return [
        nothing | {names[n]: value for n, value in row.items() if n in names}
        for add in adds.values()
        for row in _rows(path, add)
    ]


def _key(action: dict[str, Any]) -> str:
    """Return a file's identity: another deletion vector makes another logical file."""
    return f"{action['path']} {json.dumps(action.get('deletionVector'), sort_keys=True)}"


def _rows(path: Path, add: dict[str, Any]) -> list[dict[str, Any]]:
    # ParquetFile, because a path is not a partition's
    rows: pa.Table = pq.ParquetFile(path / unquote(add["path"])).read()
    gone = _gone(path, add["deletionVector"]) if add.get("deletionVector") else BitMap64()
    return [row for number, row in enumerate(rows.to_pylist()) if number not in gone]


def _gone(path: Path, vector: dict[str, Any]) -> BitMap64:
    text, kind = vector["pathOrInlineDv"], vector["storageType"]
    if kind == "i":
        packed = _decoded(text)[: vector["sizeInBytes"]]
    else:
        assert kind == "u", f"a deletion vector stored as {kind}"
        name = f"deletion_vector_{uuid.UUID(bytes=_decoded(text[-20:]))}.bin"
        stored = (path / text[:-20] / name).read_bytes()[vector["offset"] :]
        [size] = struct.unpack_from(">i", stored)
        packed = stored[4 : 4 + size]
    assert packed.startswith(_MAGIC)
    return BitMap64.deserialize(packed[len(_MAGIC) :])


def _decoded(text: str) -> bytes:
    return base64.b85decode(text.translate(_TO_B85))
