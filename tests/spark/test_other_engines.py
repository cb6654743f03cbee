"""Raw tables that other engines rewrote: read as they read them, or refused with what helps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from ingestd.lake.delta.newest_rows import newest_rows
from ingestd.lake.delta.read import read_raw
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.maintenance.compaction import MaintenancePolicy, TableMaintenance
from ingestd.lake.store.errors import FeatureError
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync
from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from tests.harness.other_engines import GO_ON, STOP
from tests.unit.lake.rows import inserts, make_table, summary

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

UNREAD = {
    "vectors_deleted": ("has a deletion vector", "REORG TABLE"),
    "renamed": ("the column remark is note in the data files", "ALTER TABLE"),
}
"""What the error says, and how the statement begins that helps."""
UNDONE = {"mapping", "constrained", "row_tracking"}
"""What stops with the statements that undo it."""
KINDS = GO_ON | STOP
BY_DELTALAKE = ("compacted", "z_ordered")


class Shop:
    """A lake to which epochs are appended; `stopped`: tables that could not be, the remedies."""

    def __init__(self, lake: Path) -> None:
        self.tables = {kind: make_table(kind) for kind in [*KINDS, *BY_DELTALAKE]}
        self.stopped: dict[str, str] = {}
        self._lake = lake
        self._sink = DeltaLake(str(lake), "shop")

    async def open(self) -> None:
        self._sink = DeltaLake(str(self._lake), "shop")
        found = dict((await self._sink.open()).damaged)
        found |= await self._sink.fence()
        self.stopped = {table.name: error.remedy or "" for table, error in found.items()}
        await self._sink.adopt("7000000000000000001")

    async def append(self, lsn: int) -> None:
        writer = self._sink.begin_epoch()
        for kind in self.tables.keys() - self.stopped.keys():
            try:
                await writer.append_batch(inserts(self.tables[kind], lsn, lsn))
            except TableError as error:
                await self._stop([error])
        await writer.commit(summary(lsn, lsn + 5), self._stop)

    async def _stop(self, errors: Sequence[TableError]) -> None:
        for error in errors:
            assert f"shop/public/{error.table.name}" in (error.remedy or "")
            self.stopped[error.table.name] = error.remedy or ""

    async def close(self) -> None:
        await self._sink.close()


@pytest.mark.thorough
@pytest.mark.timeout(1800)
async def test_isolated_changes_of_other_engines_are_read_or_refused(
    spark: SparkSession, lake: Path
) -> None:
    root = lake / "shop/public"
    shop = Shop(lake)
    await shop.open()
    for lsn in (100, 200, 300):
        await shop.append(lsn)
    for kind, statements in KINDS.items():
        for statement in statements:
            spark.sql(statement.format(t=f"delta.`{root / kind}`"))
    DeltaTable(root / "compacted").optimize.compact()
    DeltaTable(root / "z_ordered").optimize.z_order(["_cdc_lsn"])
    for lsn in (400, 500):
        await shop.append(lsn)
    assert shop.stopped.keys() == STOP.keys()
    await shop.close()
    await shop.open()  # as after a restart
    await shop.append(600)
    assert shop.stopped.keys() == STOP.keys()
    await shop.close()
    before = {kind: _by_spark(spark, lake, kind) for kind in UNDONE}
    for kind in UNDONE:
        for statement in _undoing(shop.stopped[kind]):
            spark.sql(statement)
    await shop.open()
    assert shop.stopped.keys() == STOP.keys() - UNDONE
    await shop.append(700)
    await shop.close()
    for kind in UNDONE:
        assert _by_spark(spark, lake, kind) == [*before[kind], 700]
    for kind in UNREAD:
        _follow_remedy(spark, lake, kind)
    expected = {kind: _by_spark(spark, lake, kind) for kind in shop.tables}
    assert {kind: _by_us(lake, kind) for kind in shop.tables} == expected
    policy = MaintenancePolicy(1 << 20, 7 * 86400.0)
    for kind in shop.tables:
        store, later_s = LocalStore(lake, Fsync()), time.time() + 8 * 86400
        TableMaintenance(store, f"shop/public/{kind}", policy, now_s=later_s, began_s=0).run()
    assert {kind: _by_us(lake, kind) for kind in shop.tables} == expected
    assert {kind: _by_spark(spark, lake, kind) for kind in KINDS} == {
        kind: expected[kind] for kind in KINDS
    }


def _follow_remedy(spark: SparkSession, lake: Path, kind: str) -> None:
    says, begins = UNREAD[kind]
    with pytest.raises(FeatureError, match=says):
        _newest(lake, kind)
    with pytest.raises(FeatureError, match=says) as caught:
        read_raw(str(lake), "shop", TableId("public", kind))
    assert caught.value.undo.startswith(begins)
    assert caught.value.undo in (caught.value.remedy or "")
    spark.sql(caught.value.undo)


def _undoing(remedy: str) -> list[str]:
    return (
        remedy.partition("(in Spark: ")[2].partition("), or move that folder away")[0].split("; ")
    )


def _newest(lake: Path, kind: str) -> list[int]:
    folder = f"shop/public/{kind}"
    found = newest_rows(LocalStore(lake, Fsync()), folder, ("_cdc_lsn", "_cdc_seq"), 99)
    return sorted(row["id"] for row in found or ())


def _by_us(lake: Path, kind: str) -> list[int]:
    found: list[int] = read_raw(str(lake), "shop", TableId("public", kind))["id"].to_pylist()
    assert sorted(found) == _newest(lake, kind)
    return sorted(found)


def _by_spark(spark: SparkSession, lake: Path, kind: str) -> list[int]:
    rows = spark.read.format("delta").load(str(lake / "shop/public" / kind))
    return sorted(row["id"] for row in rows.select("id").collect())
