"""A pipeline between the in-memory capture and the in-memory lake."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import pyarrow as pa

from ingestd.lake.fold.plain import fold
from ingestd.model.schema import Column, Table, TableId, with_before
from ingestd.pipeline.filling_epoch import EpochPolicy
from ingestd.pipeline.policy import PipelinePolicy
from ingestd.pipeline.telemetry.source import SourceTelemetry
from ingestd.ports import Sink
from ingestd.testing import running as under_test
from ingestd.testing.fakes.capture import FakeCapture, FakeChange, FakeDatabase
from ingestd.testing.fakes.sink import MemoryDisk, MemoryLake

LIMIT_S = under_test.LIMIT_S
until = under_test.until
watch = under_test.telemetry_of


def table(name: str) -> Table:
    columns = (
        Column("id", 20, -1, pa.int64(), "bigint", identity=True, nullable=False),
        Column("note", 25, -1, pa.string(), "text"),
    )
    made = Table(TableId("public", name), zlib.crc32(name.encode()), columns, "d", ("id",))
    return with_before(made, full=False)


A, B, C = table("a"), table("b"), table("c")


def put(into: Table, key: int, note: str = "", op: str = "c") -> FakeChange:
    return FakeChange(into.id, op, {"id": key, "note": note})


def policy(*, max_delay_s: float = 0.0, max_bytes: int = 1 << 20) -> PipelinePolicy:
    return PipelinePolicy(EpochPolicy(max_delay_s, max_bytes), idle_interval_s=0.01)


def running(
    base: FakeDatabase,
    disk: MemoryDisk,
    *,
    before_commit: Callable[[str], None] = lambda _: None,
    change_set_rows: int = 1000,
    settings: PipelinePolicy | None = None,
    watching: SourceTelemetry | None = None,
    capture: FakeCapture | None = None,
    sink: Sink | None = None,
) -> AbstractAsyncContextManager[asyncio.Task[None]]:
    return under_test.running_pipeline(
        capture or FakeCapture(base, change_set_rows=change_set_rows),
        sink or MemoryLake(disk, before_commit=before_commit),
        policy=settings or policy(),
        telemetry=watching or watch(),
    )


def lake_rows(disk: MemoryDisk, of: Table) -> list[dict[str, object]]:
    """The lake's current rows of a table, sorted by key."""
    raw = disk.tables[of.id].rows()
    return _sorted([dict(r) for r in fold(raw, of.key)])


def source_rows(base: FakeDatabase, of: Table) -> list[dict[str, object]]:
    return _sorted(base.rows(of))


def _sorted(rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    return sorted(rows, key=lambda row: str(row["id"]))
