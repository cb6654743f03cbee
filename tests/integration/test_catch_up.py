"""Draining a backlog where the server refuses it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pydantic import SecretStr

from ingestd.capture.settings import WalSettings
from ingestd.capture.wal.capture import WalCapture
from ingestd.capture.wal.catch_up import CatchUpPolicy
from ingestd.run.epoch import EpochPolicy
from ingestd.run.pipeline import Pipeline, PipelinePolicy
from ingestd.schema import TableId
from ingestd.sink.lake import DeltaLake
from ingestd.sink.read import read_raw
from tests.harness.waiting import await_until
from tests.unit.run.fixtures import watch

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.demo.postgres import PostgresServer

LIMIT_S = 30.0


async def run_until_rows(pipeline: Pipeline, lake: Path, rows: int) -> None:
    stop = asyncio.Event()
    running = asyncio.create_task(pipeline.run(stop))

    def arrived() -> bool:
        assert not running.done(), running.exception()
        table = lake / "shop/public/t/_delta_log"
        return table.exists() and _count(lake) == rows

    try:
        await asyncio.to_thread(await_until, arrived, LIMIT_S, f"{rows} rows")
    finally:
        stop.set()
        await running


def _count(lake: Path) -> int:
    return int(read_raw(str(lake), "shop", TableId("public", "t")).num_rows)


async def test_without_a_free_slot_it_streams(own_postgres: PostgresServer, lake: Path) -> None:
    own_postgres.settings["max_replication_slots"] = "1"
    await asyncio.to_thread(own_postgres.restart)
    own_postgres.psql("CREATE TABLE t (id int PRIMARY KEY)")
    settings = WalSettings(
        kind="wal",
        dsn=SecretStr(own_postgres.dsn()),
        tables=["public.t"],
        slot="only",
        publication="only",
    )
    policy = CatchUpPolicy(above_bytes=-1)

    def pipeline() -> Pipeline:
        capture = WalCapture("shop", settings, memory_bytes=64 << 20, catch_up=policy)
        often = PipelinePolicy(EpochPolicy(max_delay_s=0.1, max_bytes=1 << 20))
        return Pipeline(capture, DeltaLake(str(lake), "shop"), often, watch())

    await run_until_rows(pipeline(), lake, 1)  # the `t` of the snapshot
    own_postgres.psql("INSERT INTO t SELECT generate_series(1, 100)")
    await run_until_rows(pipeline(), lake, 101)
    assert policy.is_refused
