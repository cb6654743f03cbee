"""Rows go from the driver to Spark and back as they are, of every type that a lake has."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from ingestd.lake.delta.types import arrow_type
from spark_jobs.delta_log.commits import settings
from spark_jobs.lake.exchange import from_arrow, to_arrow

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark_matrix
TIMES = [
    datetime(1, 1, 1, tzinfo=UTC),
    datetime(1582, 10, 10, 1, 2, 3, 456789, tzinfo=UTC),
    datetime(1899, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
    datetime(2024, 3, 31, 2, 30, 0, 1, tzinfo=UTC),  # Berlin's clocks have no 2:30
    datetime(2024, 10, 27, 2, 30, 0, 1, tzinfo=UTC),  # they have it twice
    datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
]
VALUES: dict[str, list[Any]] = {
    "boolean": [True, False],
    "byte": [-128, 127],
    "short": [-(1 << 15), (1 << 15) - 1],
    "integer": [-(1 << 31), (1 << 31) - 1],
    "long": [-(1 << 63), (1 << 53) + 1, (1 << 63) - 1],
    "float": [0.1, -0.0, float("nan"), float("-inf")],
    "double": [0.1, -0.0, float("nan"), float("inf"), 5e-324],
    "string": ["", "a", "\0 \U0001f600 ü", "null"],
    "binary": [b"", b"\0\xff"],
    "date": [date(1, 1, 1), date(1582, 10, 10), date(1969, 12, 31), date(9999, 12, 31)],
    "timestamp": TIMES,
    "timestamp_ntz": [at.replace(tzinfo=None) for at in TIMES],
    "decimal(38,9)": [Decimal("9" * 29 + "." + "9" * 9), Decimal("-0.000000001")],
    "decimal(38,0)": [Decimal("-" + "9" * 38)],
}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SHOWN: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "binary": ("hex(v)", lambda v: v.hex().upper()),
    "boolean": ("string(v)", lambda v: str(v).lower()),
    "decimal(38,9)": ("v", Decimal),  # (without ANSI, Spark writes 1E-9)
    "double": ("v", float),
    "float": ("double(v)", float),
    "timestamp": ("unix_micros(v)", lambda v: (v - EPOCH) // timedelta(microseconds=1)),
    "timestamp_ntz": ("string(v)", str),
}
"""How Spark shows a value, and what that is; of all others their texts."""


def nested_tables() -> dict[str, pa.Table]:
    """Return a table for each type: the values, a null, and both nested in every way."""
    found = {}
    for name, values in VALUES.items():
        kind = arrow_type(name)
        every = [*values, None]
        columns = {
            "v": pa.array(every, kind),
            "a.b": pa.array([*([x, None] for x in values), None], arrow_type(f"array<{name}>")),
            "`s": pa.array(
                [*({"x": x, "l": [[x], []]} for x in values), None],
                arrow_type(f"struct<x:{name},l:array<array<{name}>>>"),
            ),
            "m": pa.array(
                [*([("k", x), ("n", None)] for x in values), None], pa.map_(pa.string(), kind)
            ),
        }
        found[name] = pa.table(columns)
    return found


TABLES = nested_tables()


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
@pytest.mark.parametrize("name", TABLES)
def test_values_are_the_same_there_and_back(spark: SparkSession, name: str, zone: str) -> None:
    rows = TABLES[name]
    with settings(spark, {"spark.sql.session.timeZone": zone}):
        there = from_arrow(spark, rows)
        shown, wanted = SHOWN.get(name, ("string(v)", str))
        seen = [row[0] for row in there.selectExpr(shown).collect()]
        back = to_arrow(there)
    values = rows["v"].to_pylist()
    assert repr(seen) == repr([None if v is None else wanted(v) for v in values])
    assert back.column_names == rows.column_names
    assert [field.type.id for field in back.schema] == [field.type.id for field in rows.schema]
    assert repr(back.to_pylist()) == repr(rows.to_pylist())


def test_tables_without_rows_keep_their_types(spark: SparkSession) -> None:
    every = pa.schema(
        [pa.field(f"{n}.{c.name}", c.type) for n, t in TABLES.items() for c in t.schema]
    )
    there = from_arrow(spark, every.empty_table())
    back = to_arrow(there)
    assert there.count() == back.num_rows == 0
    assert to_arrow(from_arrow(spark, back)).schema == back.schema


def test_rows_of_many_partitions_and_batches_are_all_there(spark: SparkSession) -> None:
    with settings(spark, {"spark.sql.execution.arrow.maxRecordsPerBatch": "100"}):
        back = to_arrow(spark.range(0, 1005, 1, 4))
    assert back["id"].to_pylist() == list(range(1005))
    assert not back.schema.field("id").nullable
    large = pa.table({"v": pa.array(range(300_000), pa.int64())})  # larger than a message
    assert to_arrow(from_arrow(spark, large)) == large
