"""What a writer of one table's folder can put there to harm more than that table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable

from ingestd.lake.delta.read import read_raw
from ingestd.model.schema import TableId

SCHEMA: dict[str, Any] = {
    "type": "struct",
    "fields": [{"name": "id", "type": "integer", "nullable": True, "metadata": {}}],
}
PROTOCOL: dict[str, Any] = {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}}
Action = Mapping[str, Any]


def metadata(schema: object = SCHEMA, **more: object) -> Action:
    """Return the metaData action of a table with this schema."""
    return {
        "metaData": {
            "id": "f1e2c3a4-0000-4000-8000-000000000001",
            "format": {"provider": "parquet", "options": {}},
            "schemaString": json.dumps(schema),
            "partitionColumns": [],
            "configuration": {},
            **more,
        }
    }


def add(path: str = "part-1.parquet", **more: object) -> dict[str, dict[str, Any]]:
    """Return an add action."""
    action = {
        "path": path,
        "partitionValues": {},
        "size": 100,
        "modificationTime": 0,
        "dataChange": False,
    }
    return {"add": action | more}


def commit_of(actions: Sequence[Action]) -> str:
    """Return the content of a commit."""
    return "".join(f"{json.dumps(action)}\n" for action in actions)


def make_table(folder: Path, *commits: str) -> Path:
    """Make a table that has these commits after its first; return its log."""
    log = folder / "_delta_log"
    log.mkdir(parents=True)
    for version, content in enumerate([commit_of([PROTOCOL, metadata()]), *commits]):
        (log / f"{version:020}.json").write_text(content)
    return log


def newest_version(log: Path) -> int:
    """Return the version of the newest commit."""
    return max(int(path.stem) for path in log.glob("*.json") if path.stem.isdigit())


def plant_commit(log: Path, content: str) -> None:
    """Put a commit after the newest."""
    (log / f"{newest_version(log) + 1:020}.json").write_text(content)


def plant_checkpoint(log: Path, content: bytes, form: str = "checkpoint.parquet") -> None:
    """Put a checkpoint of the newest version, and the pointer to it."""
    version = newest_version(log)
    (log / f"{version:020}.{form}").write_bytes(content)
    (log / "_last_checkpoint").write_text(json.dumps({"version": version, "size": 3}))


def deep_parquet(depth: int) -> bytes:
    """Return a Parquet file without rows, of one column that is nested so deep; 8 bytes a level."""
    root = b"\x48\x01r\x15\x02\x00"
    group = b"\x35\x02\x18\x01a\x15\x02\x00"
    leaf = b"\x15\x02\x25\x02\x18\x01a\x00"
    schema = b"\xfc" + _varint(depth + 2) + root + group * depth + leaf
    meta = b"\x15\x02" + b"\x19" + schema + b"\x16\x00" + b"\x19\x0c" + b"\x00"
    return b"PAR1" + meta + len(meta).to_bytes(4, "little") + b"PAR1"


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def deep_list(depth: int) -> str:
    """Return an empty list in so many lists."""
    return "[" * depth + "]" * depth


def deep_commits(depth: int) -> Iterator[tuple[str, str]]:
    """Yield commits with a deep value at each place, with the place's name."""
    lists, objects = deep_list(depth), '{"a":' * depth + "1" + "}" * depth
    plain = json.dumps(add())[:-2]
    yield "tags of lists", f'{plain},"tags":{{"a":{lists}}}}}}}'
    yield "tags of objects", f'{plain},"tags":{{"a":{objects}}}}}}}'
    yield "tags in many lines", f'{plain},"tags":{{"a":{lists.replace("[[", "[[" + chr(10))}}}}}}}'
    yield "lines that begin in a string", plain + ',"tags":{"a":["x' + '\n{",[["}' * (depth // 2)
    yield "a path", f'{{"add":{{"path":{lists}}}}}'
    yield "a deletion vector", f'{plain},"deletionVector":{{"storageType":{lists}}}}}}}'
    yield "no object", lists
    yield "statistics that are no object", json.dumps(add(stats=lists))
    yield "a number in statistics", json.dumps(add(stats=f'{{"numRecords":{lists}}}'))
    yield "a bound in statistics", json.dumps(add(stats=f'{{"minValues":{{"id":{lists}}}}}'))
    stats = json.dumps(add(stats=lists))
    yield "statistics with escapes", stats.replace("[" * depth, "\\u005b" * depth)
    yield "statistics twice", f'{stats[:-2]},"stats":""}}}}'


def deep_statistics(folder: Path, depth: int) -> bytes:
    """Return a checkpoint whose statistics are deep. `folder`: an empty one for a table."""
    log = make_table(folder, commit_of([add(stats='{"numRecords":1}')]))
    DeltaTable(folder).create_checkpoint()
    [path] = log.glob("*.checkpoint.parquet")
    table = pq.read_table(path)
    rows = table.to_pylist()
    for row in rows:
        if row["add"] is not None:
            row["add"]["stats"] = deep_list(depth)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    return path.read_bytes()


def quoting_commits(text: str) -> dict[str, str]:
    """Return commits that deltalake refuses with an error that quotes the text, by place."""
    field = {"name": "id", "type": text, "nullable": True, "metadata": {}}
    features = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": [text],
        "writerFeatures": [text],
    }
    unparsed = {**metadata()["metaData"], "schemaString": text}
    found: dict[str, list[Action]] = {
        "a type": [metadata({"type": "struct", "fields": [field]})],
        "a reader feature": [{"protocol": features}],
        "a schema": [metadata(), {"metaData": unparsed}],
        "a partition column": [metadata(partitionColumns=[text])],
        "a provider": [metadata(format={"provider": text, "options": {}})],
    }
    return {place: commit_of(actions) for place, actions in found.items()}


def ids_in(lake: Path, table: str = "good") -> set[int]:
    """Return the ids of a table's rows in the lake; empty if it can't be read."""
    try:
        rows = read_raw(str(lake), "shop", TableId("public", table))
    except Exception:  # noqa: BLE001 - it does not exist yet
        return set()
    return set(rows["id"].to_pylist())
