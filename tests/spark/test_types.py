"""Raw tables of every kind of type, as Spark reads them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from ingestd.lake.delta.read import read_raw
from ingestd.lake.layout import Layout
from ingestd.model.schema import TableId
from ingestd.testing.embedded.daemon import Daemon
from ingestd.testing.oracle.comparison import await_caught_up
from tests.harness.config import wal_config
from tests.harness.databases import fresh_database
from tests.harness.round_trip import Texts, read_texts
from tests.harness.server_text import array_elements, holds
from tests.harness.types import BUILT_IN
from tests.harness.user_types import SETUP
from tests.harness.wide_tables import Column, Wide, array_columns_of, columns_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from ingestd.testing.embedded.postgres import PostgresServer

LIMIT_S = 60.0
TYPED = [t for t in BUILT_IN if t.delta != "string" or t.name in {"text", "numeric", "jsonb"}]


def read(spark: SparkSession, lake: Path, table: str) -> DataFrame:
    path = lake / Layout("shop").raw(TableId("public", table))
    return spark.read.format("delta").load(str(path))


def as_spark_writes(text: str, arrow: pa.DataType) -> Any:
    """What the queries below give for the value that the server writes so."""
    if pa.types.is_list(arrow):
        elements = array_elements(text) or []
        return [None if e is None else as_spark_writes(e, arrow.value_type) for e in elements]
    if pa.types.is_floating(arrow):
        return float(np.float32(text)) if arrow == pa.float32() else float(text)
    if pa.types.is_boolean(arrow):
        return {"t": "true", "f": "false"}[text]
    if pa.types.is_binary(arrow):
        return text.removeprefix("\\x").upper()
    return text.removesuffix("+00") if pa.types.is_timestamp(arrow) else text


def query(name: str, arrow: pa.DataType) -> str:
    """Texts, by casts of Spark's, but for floats, which it writes in a way of its own."""
    if pa.types.is_list(arrow):
        return f"transform({name}, x -> {_written('x', arrow.value_type)}) AS {name}"
    return f"{_written(name, arrow)} AS {name}"


def _written(name: str, arrow: pa.DataType) -> str:
    if pa.types.is_binary(arrow):
        return f"hex({name})"
    if pa.types.is_floating(arrow):
        return f"double({name})"
    return f"string({name})"


@dataclass(frozen=True)
class Written:
    """A lake, and what the source's table `every_type` had, by id."""

    lake: Path
    columns: list[Column]
    texts: dict[int, Texts]


@pytest.fixture(scope="module")
def written(
    postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Written]:
    folder = tmp_path_factory.mktemp("types")
    columns = [*columns_of(TYPED), *array_columns_of(TYPED)]
    table = Wide("every_type", columns)
    with fresh_database(postgres) as database:
        database.execute(
            *SETUP,
            "CREATE TABLE items (id int PRIMARY KEY, n int, at timestamp, price numeric(10,2))",
            "INSERT INTO items VALUES (1, 10, '2024-02-29 01:02:03.5', 1.5)",
        )
        table.create(database)
        text = wal_config(
            lake=folder / "lake",
            dsn=database.dsn,
            tables=["public.every_type", "public.items"],
            source_extra=f'slot = "{database.name}"',
        )
        with closing(Daemon(folder / "daemon", text)) as daemon:
            daemon.start_ready(LIMIT_S)
            database.execute(
                "ALTER TABLE items ADD tags text[]",
                "INSERT INTO items VALUES (2, 20, 'infinity', 2.5, '{a,NULL}')",
                "ALTER TABLE items ALTER n TYPE bigint, ALTER price TYPE numeric(12,4)",
                "INSERT INTO items VALUES (3, 3000000000, '0001-01-01', 3.1234, '{}')",
            )
            with database.connect() as connection:
                await_caught_up(connection, database.name, LIMIT_S)
        texts = read_texts(database, table.name, table.names)
        yield Written(folder / "lake", columns, texts)


def spark_name(delta: str) -> str:
    """Name a Delta type as Spark does."""
    names = {"long": "bigint", "integer": "int", "short": "smallint"}
    element = delta.removeprefix("array<").removesuffix(">")
    return delta.replace(element, names.get(element, element))


def test_spark_reads_every_typed_column_in_one_scan(spark: SparkSession, written: Written) -> None:
    schema = read_raw(str(written.lake), "shop", TableId("public", "every_type")).schema
    arrow = {c.name: schema.field(c.name).type for c in written.columns}
    raw = read(spark, written.lake, "every_type")
    assert {name: kind for name, kind in raw.dtypes if name in arrow} == {
        c.name: spark_name(c.delta) for c in written.columns
    }
    rows = raw.where("_cdc_op = 'r'").selectExpr(
        "id", "_cdc_raw", *(query(name, kind) for name, kind in arrow.items())
    )
    found = {row["id"]: row.asDict() for row in rows.collect()}
    assert sorted(found) == sorted(written.texts)
    wrong = []
    for i, row in written.texts.items():
        for c in written.columns:
            text, kind, kept = row[c.name], arrow[c.name], found[i]["_cdc_raw"] or {}
            wanted: tuple[Any, str | None] = (None, text)
            if text is not None and holds(kind, text):
                wanted = (as_spark_writes(text, kind), None)
            there = found[i][c.name], kept.get(c.name)
            if repr(there) != repr(wanted):  # so that NaN equals NaN
                wrong.append(f"{c.sql_type}: {there!r} instead of {wanted!r}")
    assert not wrong, "\n".join(wrong)


def test_spark_reads_rows_across_a_change_of_type_in_one_scan(
    spark: SparkSession, written: Written
) -> None:
    raw = read(spark, written.lake, "items").where("_cdc_op = 'c'")
    assert dict(raw.dtypes)["at"] == "timestamp_ntz"
    rows = raw.selectExpr(
        "id", "n", "n__v2", "string(at)", "_cdc_raw", "price", "price__v2", "tags"
    ).orderBy("id")
    assert [[str(value) for value in row] for row in rows.collect()] == [
        ["2", "20", "None", "None", "{'at': 'infinity'}", "2.50", "None", "['a', None]"],
        ["3", "None", "3000000000", "0001-01-01 00:00:00", "None", "None", "3.1234", "[]"],
    ]
