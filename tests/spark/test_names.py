"""Spark and deltalake read raw tables whatever their columns are called and however they grew."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from ingestd.decode.lake_columns import allocate
from ingestd.demo.spark import stream_read
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.layout import Layout
from ingestd.model.lake_state import TableEvent, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Column, Table, TableId, lake_type_name
from tests.integration.test_names import COLUMNS
from tests.unit.lake.rows import AT, make_batch, make_table, summary
from tests.unit.lake.test_registry_table import old_row, write_old_registry

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from ingestd.model.changes import TableBatch

ID = Column("id", 23, -1, pa.int32(), "integer", identity=True)


def text(name: str, *, identity: bool = False) -> Column:
    return Column(name, 25, -1, pa.string(), "text", identity=identity)


def keyed(name: str, *columns: Column) -> Table:
    key = tuple(c.name for c in columns if c.identity)
    return Table(TableId("public", name), 1, columns, "d", key, key)


async def append(lake: Path, *batches: TableBatch) -> None:
    """Commit each batch as an epoch; the sink is reopened for each."""
    for batch in batches:
        lsn = batch.rows.column("_cdc_lsn")[0].as_py()
        sink = DeltaLake(str(lake), "shop")
        try:
            await sink.open()
            await sink.adopt("7000000000000000001")
            writer = sink.begin_epoch()
            await writer.append_batch(batch)
            await writer.commit(summary(lsn, lsn + 5))
        finally:
            await sink.close()


def row(lsn: int, seq: int, **values: Any) -> dict[str, Any]:
    return {"_cdc_lsn": lsn, "_cdc_seq": seq, **values}


def ticked(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def path_of(lake: Path, table: Table) -> str:
    return str(lake / Layout("shop").raw(table.id))


async def test_i7_columns_of_any_name(spark: SparkSession, lake: Path, tmp_path: Path) -> None:
    """All names at once, half of them added later; in statistics, `_cdc_before` and filters."""
    half = len(COLUMNS) // 2
    small = keyed("t", ID, *(text(n, identity=True) for n in COLUMNS[:half]))
    large = keyed("t", ID, *(text(n, identity=True) for n in COLUMNS))

    def filled(table: Table, lsn: int) -> TableBatch:
        names = [c.name for c in table.columns[1:]]
        old = {n: f"old {n}" for n in names}
        rows = [
            row(lsn, 1, id=lsn, _cdc_before={"id": 1, **old}, _cdc_unchanged=names, **one(names)),
            row(lsn, 2, id=lsn, _cdc_raw=[(n, "raw") for n in names]),
        ]
        return make_batch(table, rows)

    def one(names: Sequence[str]) -> dict[str, str]:
        return {n: f"value of {n}" for n in names}

    await append(lake, filled(small, 100), filled(small, 200), filled(large, 300))
    path = path_of(lake, large)
    raw = spark.read.format("delta").load(path)
    assert set(COLUMNS) < set(raw.columns)
    expected = {n: [f"value of {n}"] * (3 if n in COLUMNS[:half] else 1) for n in COLUMNS}

    every = raw.where("_cdc_seq = 1").orderBy("_cdc_lsn").collect()
    for name, values in expected.items():
        assert [r[name] for r in every if r[name] is not None] == values
        assert [r["_cdc_before"][name] for r in every][-len(values) :] == [f"old {name}"] * len(
            values
        )
    for name, values in list(expected.items())[::4]:
        found = raw.where(raw[ticked(name)] == f"value of {name}")
        assert found.selectExpr(f"_cdc_before.{ticked(name)} b").count() == len(values)
        assert raw.where(f"{ticked(name)} = 'no such value'").count() == 0

    streamed = stream_read(spark, path, str(tmp_path / "stream"))
    again = streamed.where("_cdc_seq = 1").orderBy("_cdc_lsn").collect()
    assert [r.asDict(recursive=True) for r in again] == [r.asDict(recursive=True) for r in every]

    spark.sql(f"OPTIMIZE delta.`{path}`").collect()
    after = spark.read.format("delta").load(path)
    assert len(after.inputFiles()) == 1
    assert after.where("_cdc_seq = 1").orderBy("_cdc_lsn").collect() == every
    await append(lake, filled(large, 400))


async def test_i7_columns_that_differ_by_case_only(spark: SparkSession, lake: Path) -> None:
    """Also by a case that only Spark knows of; it refuses fields of a struct that it can't tell."""
    source = ["a", "A", "i", "\u0130", "\u0131", "s", "\u017f", "k", "\u212a", "ς", "Σ", "ss", "ß"]
    columns = allocate([text(name, identity=True) for name in source], {})
    names = [c.lake_name for c in columns]
    assert names[:5] == ["a", "A__v2", "i", "\u0130__v2", "\u0131__v3"]
    table = keyed("t", *columns)
    values = {name: f"value {name}" for name in names}
    await append(lake, make_batch(table, [row(100, 1, _cdc_before=values, **values)]))
    raw = spark.read.format("delta").load(path_of(lake, table))
    for prefix in ("", "_cdc_before."):
        [found] = raw.select(*(prefix + ticked(name) for name in names)).collect()
        assert list(found) == list(values.values())


async def test_i7_epochs_of_other_columns_in_one_scan(
    spark: SparkSession, lake: Path, tmp_path: Path
) -> None:
    """A column dropped, one added, one of another type, a wider key: one raw table all along."""
    first = keyed("t", ID, text("gone"), text("a"))
    longer = replace(Column("a", 20, -1, pa.int64(), "bigint", identity=True), stored_as="a__v2")
    second = keyed("t", ID, longer, text("new"))
    await append(
        lake,
        make_batch(first, [row(100, 1, id=1, gone="g", a="7")]),
        make_batch(first, [row(200, 1, id=2, a="8", _cdc_op="u", _cdc_before={"id": 1})]),
    )
    path = path_of(lake, first)
    folder = str(tmp_path / "stream")
    assert stream_read(spark, path, folder).count() == 2

    before = {"id": 3, "a__v2": 4}
    rows = [
        row(300, 1, id=3, a__v2=9, new="n"),
        row(300, 2, id=4, _cdc_op="u", a__v2=10, _cdc_before=before),
    ]
    await append(lake, make_batch(second, rows))
    expected = [
        (1, "g", "7", None, None, None),
        (2, None, "8", None, None, (1, None)),
        (3, None, None, 9, "n", None),
        (4, None, None, 10, None, (3, 4)),
    ]
    raw = spark.read.format("delta").load(path)
    found = raw.select("id", "gone", "a", "a__v2", "new", "_cdc_before").orderBy("id").collect()
    assert [(*r[:5], r[5] and tuple(r[5])) for r in found] == expected

    assert stream_read(spark, path, folder).count() == 4  # a stream begun before all this continues

    query = "SELECT id, gone, a, a__v2, new, _cdc_before FROM t ORDER BY id"
    batches = QueryBuilder().register("t", DeltaTable(path)).execute(query).read_all()
    by_deltalake = [tuple(r.values()) for r in pa.table(batches).to_pylist()]
    assert [(*r[:5], r[5] and tuple(r[5].values())) for r in by_deltalake] == expected


async def test_a_registry_of_an_earlier_version_has_all_fields(
    spark: SparkSession, lake: Path
) -> None:
    write_old_registry(lake, [old_row()])
    sink = DeltaLake(str(lake), "shop")
    await sink.open()
    await sink.adopt("7000000000000000001")
    orders = make_table("orders")
    await sink.record([TableEvent(orders, TableState.LIVE, AT, Lsn(200), Lsn(100))])
    await sink.close()
    rows = spark.read.format("delta").load(str(lake / Layout("shop").tables)).orderBy("at_lsn")
    found = rows.select("at_lsn", "columns.name", "columns.source_name", "storage").collect()
    assert [tuple(r) for r in found] == [
        (100, ["id", "note"], [None, None], None),
        (200, ["id", "note"], ["id", "note"], ""),
    ]


def test_the_name_of_an_attribute_is_only_a_name(spark: SparkSession) -> None:
    names = ["a:int> COMMENT '', b struct<`c", "d", "select"]
    kind = lake_type_name(pa.struct([(name, pa.int32()) for name in names]))
    [found] = spark.createDataFrame([], f"v {kind}").schema
    assert isinstance(found.dataType, StructType)
    assert found.dataType.names == names
    assert spark.range(1).select(f.lit(None).cast(kind)).schema[0].dataType == found.dataType
