"""Commits with invalid actions affect only the table that has them (I8).

A writer of the lake decides their bytes. Nothing but an error of ours comes of them, at
a start and while the daemon runs, and no row is committed behind an unreadable commit.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from ingestd.lake.delta.log import TableLog
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.reference.log import ReferenceLog
from ingestd.lake.store.store import open_store
from ingestd.model.errors import FolderError, IngestdError, TableError
from tests.unit.lake.rows import inserts, make_table, summary

if TYPE_CHECKING:
    from pathlib import Path

T, OTHER = make_table("orders"), make_table("other")
_FILE = {"path": "gone", "dataChange": False}
_MOVED = {**_FILE, "stats": None, "tags": {}, "deletionVector": None, "baseRowId": 1}
_TABLE = {"schemaString": "{}", "format": {"provider": "parquet", "options": {}}, "id": "x"}
ACTIONS: dict[str, dict[str, object]] = {
    "add": {**_MOVED, "partitionValues": {}, "size": 1, "modificationTime": 1, "extra": 1},
    "remove": {**_MOVED, "deletionTimestamp": 1, "extendedFileMetadata": True, "size": 1}
    | {"partitionValues": {}, "defaultRowCommitVersion": 1},
    "cdc": {**_FILE, "partitionValues": {}, "size": 1},
    "txn": {"appId": "x", "version": 1, "lastUpdated": 1},
    "metaData": {**_TABLE, "partitionColumns": [], "configuration": {}, "createdTime": 1},
    "protocol": {"minReaderVersion": 1, "minWriterVersion": 2, "readerFeatures": None},
    "commitInfo": {"ingestdCommit": "x", "ingestdWriter": "x", "ingestdFence": "1"}
    | {"ingestdHolds": "0", "timestamp": 1, "inCommitTimestamp": 1},
    "domainMetadata": {"domain": "x", "configuration": "{}", "removed": False},
    "sidecar": {"path": "../x", "sizeInBytes": 1, "modificationTime": 1},
    "checkpointMetadata": {"version": 1},
    "unknown": {"x": 1},
}
"""As the protocol has them."""
ODD: tuple[object, ...] = (
    None,
    3,
    -1,
    1 << 70,
    1.5,
    True,
    "x",
    "",
    "[" * 9000,
    "\ud800",
    [1],
    {},
    {"x": 1},
    ["x"],
)


def _line(action: object) -> bytes:
    return json.dumps(action).encode() + b"\n"


_DEEP = b'{"a":' * 5000 + b"1" + b"}" * 5000
CONTENTS: dict[str, bytes] = {
    **{f"{value!r}"[:30]: _line(value) for value in ODD},
    **{f"{kind}": _line({kind: action}) for kind, action in ACTIONS.items()},
    **{f"{kind}: {value!r}"[:40]: _line({kind: value}) for kind in ACTIONS for value in ODD},
    **{
        f"{kind}.{name}: {value!r}"[:60]: _line({kind: {**action, name: value}})
        for kind, action in ACTIONS.items()
        for name in action
        for value in ODD
    },
    **{
        f"{kind} without {name}": _line({kind: {n: v for n, v in action.items() if n != name}})
        for kind, action in ACTIONS.items()
        for name in action
    },
    "deep": _DEEP,
    "deep in commitInfo": b'{"commitInfo":' + _DEEP + b"}\n",
    "not UTF-8": b'{"x":"\xff"}\n',
    "UTF-16": '{"commitInfo":{}}\n'.encode("utf-16"),
    "marked as UTF-8": b'\xef\xbb\xbf{"commitInfo":{}}\n',
    "NUL": b"\0\0\0\n",
    "many digits": b'{"x":' + b"9" * 6000 + b"}\n",
    "no number": b'{"txn":{"appId":"x","version":NaN}}\n',
    "infinite": b'{"txn":{"appId":"x","version":-Infinity}}\n',
    "half a pair": b'{"txn":{"appId":"\\ud800","version":1}}\n',
    "long line": b'{"x":"' + b"a" * (5 << 20) + b'"}\n',
    "two kinds": b'{"txn":{"appId":"x","version":1},"add":{"path":"a"}}\n',
    "many values": b'{"x":[' + b"[]," * 1_300_000 + b"1]}\n",
    "many actions": b"{}\n" * 110_000,
}
MANY = random.Random(45).sample(sorted(CONTENTS), 250)
SAMPLES = pytest.mark.parametrize(
    "names",
    [pytest.param(MANY, marks=pytest.mark.thorough, id="many"), pytest.param(MANY[:10], id="few")],
)


@pytest.mark.attack("lake writer")
@pytest.mark.parametrize("when", ["at a start", "while it runs"])
@pytest.mark.parametrize("folder", ["public/orders", "_epochs", "_tables"])
@SAMPLES
async def test_isolated_a_commit_without_sense_stops_its_table_at_most(
    tmp_path: Path, names: list[str], folder: str, when: str
) -> None:
    for number, name in enumerate(names):
        root = tmp_path / str(number)
        lake = DeltaLake(str(root), "shop")
        await lake.open()
        await lake.adopt("7000000000000000001")
        await commit(lake, 100, 1)
        if when == "at a start":
            await lake.close()
        put(root / "shop" / folder, CONTENTS[name])
        try:
            if when == "at a start":
                lake = DeltaLake(str(root), "shop")
                found = await lake.open()
                assert found.damaged.keys() <= ({T.id} if "orders" in folder else set()), name
                await commit(lake, 200, 2, with_orders=not found.damaged)
                if found.damaged:
                    continue
            else:
                await commit(lake, 200, 2)
        except TableError:
            assert folder == "public/orders", name
        except FolderError:
            assert folder != "public/orders", name
        except IngestdError:  # it says, as a daemon does, that another one committed
            assert "commitInfo" in name
        else:
            if folder != "_tables":  # which was not written to again
                ensure_readable(root / "shop" / folder)
        finally:
            await lake.close()


@pytest.mark.attack("lake writer")
@SAMPLES
def test_isolated_an_invalid_commit_is_a_fault_of_its_reference(
    tmp_path: Path, names: list[str]
) -> None:
    store = open_store(str(tmp_path), None)
    for number, name in enumerate(names):
        log = ReferenceLog(store, str(number), "ref", lambda _: None)
        log.replace(inserts(T, 1, 1).rows.schema, [], content="d", app_version=1)
        put(tmp_path / str(number), CONTENTS[name])
        for step in (log.load, log.content, log.fence):
            try:
                step()
            except IngestdError:
                break


def put(table: Path, content: bytes) -> None:
    log = table / "_delta_log"
    newest = max(int(path.stem) for path in log.glob("*.json"))
    (log / f"{newest + 1:020}.json").write_bytes(content)


def ensure_readable(table: Path) -> None:
    """Open a table as other readers do, once its log has been found valid."""
    log = TableLog(open_store(str(table.parent), None), table.name, "x")
    log.load()
    assert log.exists


async def commit(lake: DeltaLake, position: int, number: int, *, with_orders: bool = True) -> None:
    writer = lake.begin_epoch()
    if with_orders:
        await writer.append_batch(inserts(T, position, number))
    await writer.append_batch(inserts(OTHER, position, number))
    await writer.commit(summary(position, position + 10))
