"""Streaming readers while the table under them is joined and cleaned."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.maintenance.compaction import MaintenancePolicy, TableMaintenance
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync
from tests.harness.waiting import await_until
from tests.unit.lake.rows import inserts, make_table, summary

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

T = make_table("orders")
FOLDER = "shop/public/orders"
DAY_S = 86400.0
ROUNDS, EPOCHS = 4, 10


def maintain(lake: Path, *, days: float) -> int:
    """Join and clean as after some days; return how many files were joined and removed."""
    policy = MaintenancePolicy(1 << 20, 7 * DAY_S)
    store, now_s = LocalStore(lake, Fsync()), time.time() + days * DAY_S
    done = TableMaintenance(store, FOLDER, policy, now_s=now_s, began_s=0).run()
    return done.joined_files + done.cleaned.data_files


@pytest.mark.thorough
async def test_exactly_once_streaming_a_compacted_and_cleaned_table(
    spark: SparkSession, lake: Path, tmp_path: Path
) -> None:
    """A running reader gets each row once; so does one that starts afterwards.

    The last commits and files go too, as far as they ever do: a reader that is up to date needs
    nothing of what was before.
    """
    sink = DeltaLake(str(lake), "shop")
    await sink.open()
    await sink.adopt("7000000000000000001")
    found: list[int] = []

    def take(rows: DataFrame, _: int) -> None:
        found.extend(row["id"] for row in rows.select("id").collect())

    query: StreamingQuery | None = None
    joined, lsn = 0, 0
    try:
        for number in range(1, ROUNDS + 1):
            for _ in range(EPOCHS):
                lsn += 100
                writer = sink.begin_epoch()
                await writer.append_batch(inserts(T, lsn, lsn))
                await writer.commit(summary(lsn, lsn + 5))
            if query is None:
                rows = spark.readStream.format("delta").load(str(lake / FOLDER))
                started = rows.writeStream.foreachBatch(take)
                query = started.option("checkpointLocation", str(tmp_path / "c")).start()
            else:
                joined += maintain(lake, days=0)  # while the reader is at the new epochs
            expected = number * EPOCHS
            await_until(partial(_has, found, expected), 120, lambda: f"rows: {found}")
            joined += maintain(lake, days=8 * number)  # all that the reader is done with
        assert query is not None
        query.processAllAvailable()
    finally:
        if query is not None:
            query.stop()
        await sink.close()
    everything = [100 * n for n in range(1, ROUNDS * EPOCHS + 1)]
    assert sorted(found) == everything
    assert joined > ROUNDS * EPOCHS
    assert len(list((lake / FOLDER).glob("part-*"))) < ROUNDS * EPOCHS
    batch = spark.read.format("delta").load(str(lake / FOLDER))
    assert sorted(row["id"] for row in batch.select("id").collect()) == everything
    found.clear()
    rows = spark.readStream.format("delta").load(str(lake / FOLDER))
    again = rows.writeStream.foreachBatch(take).trigger(availableNow=True)
    again.option("checkpointLocation", str(tmp_path / "again")).start().awaitTermination()
    assert sorted(found) == everything


def _has(found: list[int], expected: int) -> bool:
    return len(found) >= expected
