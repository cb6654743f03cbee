"""Reference tables: read all rows, fold all rows of a raw table, apply changes.

Each step is a separate process, to measure its peak of resident memory.
"""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable

from benchmarks.daemon.snapshot import fill
from benchmarks.harness.rig import Rig, timed
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.layout import Layout
from ingestd.lake.reference.source import RawReferenceSource
from ingestd.lake.reference.table import DeltaReferenceTable
from ingestd.model.changes import EpochSummary, TableBatch, change_schema, marker_batch
from ingestd.model.lake_state import TableEvent, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.row_checks import UNLIMITED_BYTES
from ingestd.model.schema import Table, TableId
from ingestd.ports import ReferenceTableSource
from ingestd.postgres.connection.session import connect
from ingestd.postgres.reference_copy import CopiedReferenceSource, describe
from ingestd.postgres.settings import WalSettings

ROWS, CHANGES = 1_000_000, 10_000
NAME = "reference"
TABLE = TableId("public", "load")
NOW = datetime(2026, 1, 1, tzinfo=UTC)
MEMORY_BYTES = 32_000_000
"""Memory for the fold in a daemon with one source and `limits.memory` of 512 MB."""


def measure(rig: Rig, *, rows: int = ROWS, changes: int = CHANGES) -> dict[str, float]:
    """Return seconds and peaks of each step, and of deltalake's own merge of the same changes."""
    fill(rig, rows)
    dsn, lake = rig.server.dsn(), rig.folder / NAME
    copy: list[str | Path] = [
        rig.server.program("psql"),
        "--no-psqlrc",
        dsn,
        "-c",
        "copy load to stdout",
    ]
    timed(copy)
    found = {"copy_s": timed(copy)}
    found |= _child("read", str(lake / "read"), dsn)
    asyncio.run(_write_raw(lake / "raw", dsn))
    found |= _child("fold", str(lake / "raw"))
    found |= _child("write", str(lake / "raw"), dsn, str(rows), str(changes))
    shutil.copytree(lake / "raw", lake / "plain")
    found |= _child("plain", str(lake / "plain"))
    found |= _child("merge", str(lake / "raw"))
    shutil.rmtree(lake)
    rig.psql("DROP TABLE load")
    return found


def _child(step: str, *arguments: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.daemon.reference", step, *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    seconds = json.loads(done.stdout)
    return {f"{step}_s": seconds["seconds"], f"{step}_mb": seconds["peak_mb"]}


def _main(step: str, lake: str, *arguments: str) -> None:
    steps: dict[str, Callable[..., Coroutine[Any, Any, float]]] = {
        "read": _read,
        "fold": _fold,
        "write": _write_changes,
        "merge": _merge,
        "plain": _plain,
    }
    seconds = asyncio.run(steps[step](Path(lake), *arguments))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(json.dumps({"seconds": seconds, "peak_mb": peak_mb}))


# --- the steps -------------------------------------------------------------------------------


async def _read(lake: Path, dsn: str) -> float:
    began = time.monotonic()
    source = CopiedReferenceSource(NAME, _settings(dsn), TABLE, row_limit_bytes=UNLIMITED_BYTES)
    await DeltaReferenceTable(str(lake), NAME, TABLE).replace(_batches(source))
    return time.monotonic() - began


async def _fold(lake: Path) -> float:
    began = time.monotonic()
    source = RawReferenceSource(str(lake), NAME, TABLE, memory_bytes=MEMORY_BYTES)
    first = await source.poll_snapshot()
    assert first is not None
    sink = DeltaReferenceTable(str(lake), NAME, TABLE)
    await sink.replace(_batches(source, first), position=source.position)
    return time.monotonic() - began


async def _merge(lake: Path) -> float:
    """Merge as a daemon does right after its start."""
    began = time.monotonic()
    changes, source, sink = await _changes(lake)
    await sink.merge(changes, source.key, position=source.position)
    return time.monotonic() - began


async def _plain(lake: Path) -> float:
    """Run only deltalake's own merge, on the folded changes."""
    changes, _, _ = await _changes(lake)
    names = [n for n in changes.schema.names if not n.startswith("_cdc_")]
    began = time.monotonic()
    handle = DeltaTable(str(lake / Layout(NAME).reference(TABLE)))
    values = {n: f"s.{n}" for n in names}
    (
        handle.merge(
            changes.select([*names, "_cdc_op"]),
            "t.id = s.id",
            source_alias="s",
            target_alias="t",
        )
        .when_matched_delete("s._cdc_op = 'd'")
        .when_matched_update(values, predicate="s._cdc_op <> 'd'")
        .when_not_matched_insert(values, predicate="s._cdc_op <> 'd'")
        .execute()
    )
    return time.monotonic() - began


async def _changes(lake: Path) -> tuple[pa.RecordBatch, RawReferenceSource, DeltaReferenceTable]:
    sink = DeltaReferenceTable(str(lake), NAME, TABLE)
    state = await sink.open()
    assert state is not None
    assert state.position is not None
    source = RawReferenceSource(str(lake), NAME, TABLE, memory_bytes=MEMORY_BYTES)
    source.resume(state.position)
    changes = await source.poll_changes()
    assert changes is not None
    return changes, source, sink


# --- the raw table ---------------------------------------------------------------------------


async def _write_raw(lake: Path, dsn: str) -> None:
    """Write the table's rows as a snapshot would."""
    table = await _described(dsn)
    sink = DeltaLake(str(lake), NAME)
    await sink.open()
    await sink.adopt("server")
    writer = sink.begin_epoch()
    await writer.append_batch(marker_batch(table, Lsn(100), NOW))
    source = CopiedReferenceSource(NAME, _settings(dsn), TABLE, row_limit_bytes=UNLIMITED_BYTES)
    async for batch in _batches(source):
        rows = _as_changes(table, pa.Table.from_batches([batch]), "r", 100, 0)
        await writer.append_batch(TableBatch(table, rows, 1))
    await writer.commit(EpochSummary(Lsn(100), Lsn(105), NOW, 1, 1))
    await sink.record([TableEvent(table, TableState.LIVE, NOW, Lsn(105), Lsn(100))])
    await sink.close()


async def _write_changes(lake: Path, dsn: str, rows: str, changes: str) -> float:
    """Commit an epoch of changes all over the table: updates, and a tenth of deletes."""
    table = await _described(dsn)
    sink = DeltaLake(str(lake), NAME)
    await sink.open()
    ids = np.random.default_rng(1).choice(int(rows), int(changes), replace=False)
    source = CopiedReferenceSource(NAME, _settings(dsn), TABLE, row_limit_bytes=UNLIMITED_BYTES)
    parts = [
        pa.Table.from_batches([batch]).filter(pa.array(np.isin(batch["id"].to_numpy(), ids)))
        async for batch in _batches(source)
    ]
    found = pa.concat_tables(parts).combine_chunks()
    deleted = len(found) // 10
    writer = sink.begin_epoch()
    for op, part, seq in (
        ("u", found.slice(deleted), 1),
        ("d", found.slice(0, deleted), len(found) + 1),
    ):
        await writer.append_batch(TableBatch(table, _as_changes(table, part, op, 110, seq), 1))
    await writer.commit(EpochSummary(Lsn(110), Lsn(115), NOW, 1, 1))
    await sink.close()
    return 0.0


def _as_changes(table: Table, rows: pa.Table, op: str, lsn: int, seq: int) -> pa.RecordBatch:
    count = rows.num_rows
    values = {
        "_cdc_op": pa.array([op] * count),
        "_cdc_lsn": pa.array(np.full(count, lsn)),
        "_cdc_seq": pa.array(np.full(count, seq) + (np.arange(count) if seq else 0)),
        "_cdc_ts": pa.array([NOW] * count, pa.timestamp("us", tz="UTC")),
    }
    rows = rows.combine_chunks()
    arrays = []
    for field in change_schema(table):
        if field.name in rows.schema.names:
            arrays.append(pa.concat_arrays(rows[field.name].chunks))
        else:
            arrays.append(values.get(field.name, pa.nulls(count, field.type)))
    return pa.RecordBatch.from_arrays(arrays, schema=change_schema(table))


async def _described(dsn: str) -> Table:
    async with await connect(dsn, autocommit=False) as connection:
        table = await describe(connection, _settings(dsn), TABLE)
    columns = tuple(replace(c, identity=c.name == "id") for c in table.columns)
    return replace(table, columns=columns, key=("id",), before=("id",), replica_identity="d")


async def _batches(
    source: ReferenceTableSource, first: pa.RecordBatch | None = None
) -> AsyncIterator[pa.RecordBatch]:
    if first is not None:
        yield first
    while (batch := await source.poll_snapshot()) is not None:
        yield batch


def _settings(dsn: str) -> WalSettings:
    section = {"kind": "wal", "dsn": dsn, "tables": [str(TABLE)]}
    return WalSettings.model_validate({**WalSettings.defaults(NAME), **section})


if __name__ == "__main__":
    _main(*sys.argv[1:])
