"""Lake types by name, as Spark's and as Arrow's."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql import types as t

from ingestd.lake.delta.types import arrow_type
from spark_jobs.lake.types import arrow_schema, named_type, row_type, spark_type

SIMPLE = {
    "boolean": t.BooleanType(),
    "byte": t.ByteType(),
    "short": t.ShortType(),
    "integer": t.IntegerType(),
    "long": t.LongType(),
    "float": t.FloatType(),
    "double": t.DoubleType(),
    "string": t.StringType(),
    "binary": t.BinaryType(),
    "date": t.DateType(),
    "timestamp": t.TimestampType(),
    "timestamp_ntz": t.TimestampNTZType(),
    "decimal(38,9)": t.DecimalType(38, 9),
}
ARRAYS = {f"array<{name}>": t.ArrayType(kind) for name, kind in SIMPLE.items()}
STRUCTS = {
    f"struct<a:{name},`b,``<`:array<{name}>>": t.StructType(
        [t.StructField("a", kind), t.StructField("b,`<", t.ArrayType(kind))]
    )
    for name, kind in SIMPLE.items()
}
NAMED = {
    **SIMPLE,
    **ARRAYS,
    **STRUCTS,
    "array<struct<a:long>>": t.ArrayType(t.StructType().add("a", "long")),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_name_is_the_type_that_spark_has_for_it(name: str) -> None:
    assert named_type(name) == NAMED[name]


@pytest.mark.parametrize("name", NAMED)
def test_arrow_types_are_those_of_the_name(name: str) -> None:
    there = arrow_schema(t.StructType([t.StructField("v", NAMED[name])]))
    assert there == pa.schema([pa.field("v", arrow_type(name))])


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("has_nulls", [True, False])
def test_a_schema_is_the_same_there_and_back(name: str, *, has_nulls: bool) -> None:
    kind = NAMED[name]
    fields = [
        t.StructField("v", kind, has_nulls),
        t.StructField("l", t.ArrayType(kind, has_nulls)),
        t.StructField("m", t.MapType(t.StringType(), kind, has_nulls)),
        t.StructField("s", t.StructType([t.StructField("v", kind, has_nulls)])),
    ]
    schema = t.StructType(fields)
    assert row_type(arrow_schema(schema)) == schema


def test_a_type_that_no_raw_table_has_is_refused() -> None:
    with pytest.raises(ValueError, match="no Spark type for duration"):
        spark_type(pa.duration("us"))
    with pytest.raises(ValueError, match="no Arrow type for Spark's void"):
        arrow_schema(t.StructType([t.StructField("v", t.NullType())]))
    with pytest.raises(ValueError, match="no type 'money'"):
        named_type("money")
