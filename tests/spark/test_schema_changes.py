"""One scan of a raw table that has rows of several shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from ingestd.demo.spark import stream_read
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.layout import Layout
from ingestd.model.changes import TableBatch, change_schema
from ingestd.model.schema import Column, Table, TableId
from tests.unit.lake.rows import summary

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from pyspark.sql import SparkSession

NAME = TableId("public", "t")
ID = Column("id", 23, -1, pa.int32(), identity=True)
NUMBER = Column("v", 23, -1, pa.int32())
TEXT = Column("v", 25, -1, pa.string(), stored_as="v__v2")
NOTE = Column("note", 25, -1, pa.string())
OLD = Table(NAME, 1, (ID, NUMBER, NOTE), key=("id",), before=("id", "v"))
NEW = Table(NAME, 1, (ID, TEXT), key=("id",), before=("id", "v"))


def batch(table: Table, lsn: int, *rows: dict[str, Any]) -> TableBatch:
    """Inserts of one transaction; with `_cdc_before`, updates."""
    full = [
        {"_cdc_op": "u" if "_cdc_before" in row else "c", "_cdc_lsn": lsn, "_cdc_seq": seq, **row}
        for seq, row in enumerate(rows, 1)
    ]
    made = pa.RecordBatch.from_pylist(full, change_schema(table))
    return TableBatch(table, made, made.nbytes)


async def write(lake: Path) -> None:
    sink = DeltaLake(str(lake), "shop")
    try:
        await sink.open()
        await sink.adopt("7000000000000000001")
        first = sink.begin_epoch()
        await first.append_batch(batch(OLD, 100, {"id": 1, "v": 10, "note": "a"}))
        await first.commit(summary(100, 110))
        second = sink.begin_epoch()  # both shapes in one epoch, as when DDL comes in mid-epoch
        await second.append_batch(batch(OLD, 120, {"id": 2, "v": 20, "note": "b"}))
        await second.append_batch(batch(NEW, 130, {"id": 3, "v__v2": "thirty"}))
        changed = {"id": 4, "v__v2": "forty", "_cdc_before": {"id": 3, "v__v2": "thirty"}}
        await second.append_batch(batch(NEW, 140, changed))
        await second.commit(summary(120, 150))
    finally:
        await sink.close()


async def test_old_and_new_shapes_and_a_second_version_in_one_scan(
    spark: SparkSession, lake: Path, tmp_path: Path
) -> None:
    """I7: rows before the change have the old columns, those after it the new ones."""
    await write(lake)
    path = str(lake / Layout("shop").raw(NAME))
    wanted = [
        (1, 10, "a", None, None),
        (2, 20, "b", None, None),
        (3, None, None, "thirty", None),
        (4, None, None, "forty", "thirty"),
    ]
    for read in (
        spark.read.format("delta").load(path),
        stream_read(spark, path, str(tmp_path / "stream")),
    ):
        types = dict(read.dtypes)
        assert (types["v"], types["v__v2"]) == ("int", "string")
        assert types["_cdc_before"] == "struct<id:int,v:int,v__v2:string>"
        rows = read.selectExpr("id", "v", "note", "v__v2", "_cdc_before.v__v2 AS old")
        assert [tuple(row) for row in rows.orderBy("id").collect()] == wanted
