from __future__ import annotations

from typing import TYPE_CHECKING

from ingestd.demo.spark import current_rows, stream_read
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.layout import Layout
from tests.unit.lake.rows import inserts, make_batch, make_table, summary

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from ingestd.model.changes import TableBatch

T = make_table("Ünï orders")
STREAMED = ["_cdc_op", "id", "note", "_cdc_lsn", "_cdc_seq", "_cdc_epoch"]


async def append(lake: Path, epochs: list[tuple[int, int, TableBatch]]) -> None:
    """Commit these epochs, (first_lsn, end_lsn, batch), through the real sink."""
    sink = DeltaLake(str(lake), "shop")
    try:
        await sink.open()
        await sink.adopt("7000000000000000001")
        for first, end, batch in epochs:
            writer = sink.begin_epoch()
            await writer.append_batch(batch)
            await writer.commit(summary(first, end))
    finally:
        await sink.close()


def changes(first: int, *ops: tuple[str, int | None, str | None]) -> TableBatch:
    return make_batch(
        T,
        [
            {"_cdc_op": op, "id": i, "note": note, "_cdc_lsn": first, "_cdc_seq": seq}
            for seq, (op, i, note) in enumerate(ops, 1)
        ],
    )


async def test_exactly_once_stream_read_of_a_raw_table(
    spark: SparkSession, lake: Path, tmp_path: Path
) -> None:
    """A Spark stream gets each raw row once: the existing ones, then the new ones."""
    table_path = str(lake / Layout("shop").raw(T.id))
    folder = str(tmp_path / "stream")

    await append(
        lake,
        [
            (100, 110, inserts(T, 100, 1, 2, 3)),
            (120, 130, changes(120, ("u", 2, "zwei"), ("d", 3, None), ("c", 4, "ü\t\n"))),
        ],
    )
    first = [
        ("c", 1, "note 1", 100, 1, 1),
        ("c", 2, "note 2", 100, 2, 1),
        ("c", 3, "note 3", 100, 3, 1),
        ("u", 2, "zwei", 120, 1, 2),
        ("d", 3, None, 120, 2, 2),
        ("c", 4, "ü\t\n", 120, 3, 2),
    ]
    read = stream_read(spark, table_path, folder)
    assert in_order(read) == first
    assert current(read) == [(1, "note 1"), (2, "zwei"), (4, "ü\t\n")]

    await append(lake, [(140, 150, changes(140, ("t", None, None), ("c", 9, "anew")))])
    read = stream_read(spark, table_path, folder)
    assert in_order(read) == [
        *first,
        ("t", None, None, 140, 1, 3),
        ("c", 9, "anew", 140, 2, 3),
    ]
    assert current(read) == [(9, "anew")]


def in_order(read: DataFrame) -> list[tuple[object, ...]]:
    rows = read.select(*STREAMED).orderBy("_cdc_lsn", "_cdc_seq").collect()
    return [tuple(row) for row in rows]


def current(read: DataFrame) -> list[tuple[object, ...]]:
    rows = current_rows(read, ["id"]).select("id", "note").orderBy("id").collect()
    return [tuple(row) for row in rows]
