"""Lake types as types of Spark and of Arrow."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from ingestd.lake.delta.types import arrow_type
from ingestd.model.schema import TIMESTAMP, TIMESTAMP_NTZ

_SIMPLE: dict[pa.DataType, DataType] = {
    pa.bool_(): BooleanType(),
    pa.int8(): ByteType(),
    pa.int16(): ShortType(),
    pa.int32(): IntegerType(),
    pa.int64(): LongType(),
    pa.float32(): FloatType(),
    pa.float64(): DoubleType(),
    pa.string(): StringType(),
    pa.binary(): BinaryType(),
    pa.date32(): DateType(),
    TIMESTAMP: TimestampType(),
    TIMESTAMP_NTZ: TimestampNTZType(),
}
_SIMPLE_ARROW = {kind: arrow for arrow, kind in _SIMPLE.items()}


def named_type(name: str) -> DataType:
    """Return Spark's type for a lake type's name, such as `decimal(10,2)`. Raises ValueError."""
    return spark_type(arrow_type(name))


def spark_type(arrow: pa.DataType) -> DataType:
    """Return Spark's type for an Arrow type that a raw table can have. Raises ValueError."""
    simple = _SIMPLE.get(arrow)
    if simple is not None:
        return simple
    if pa.types.is_decimal128(arrow):
        return DecimalType(arrow.precision, arrow.scale)
    if pa.types.is_list(arrow):
        return ArrayType(spark_type(arrow.value_type), arrow.value_field.nullable)
    if pa.types.is_map(arrow):
        kinds = spark_type(arrow.key_type), spark_type(arrow.item_type)
        return MapType(*kinds, arrow.item_field.nullable)
    if pa.types.is_struct(arrow):
        return StructType([_spark_field(field) for field in arrow])
    msg = f"no Spark type for {arrow}"
    raise ValueError(msg)


def row_type(schema: pa.Schema) -> StructType:
    """Return the Spark type of rows with an Arrow schema. Raises ValueError."""
    return StructType([_spark_field(field) for field in schema])


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the only Arrow schema with which Spark's reader accepts batches. Raises ValueError."""
    return pa.schema([_arrow_field(field) for field in schema])


def _spark_field(field: pa.Field) -> StructField:
    return StructField(field.name, spark_type(field.type), field.nullable)


def _arrow_field(field: StructField) -> pa.Field:
    return pa.field(field.name, _arrow_type(field.dataType), field.nullable)


def _arrow_type(kind: DataType) -> pa.DataType:
    simple = _SIMPLE_ARROW.get(kind)
    if simple is not None:
        return simple
    if isinstance(kind, DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, ArrayType):
        return pa.list_(pa.field("element", _arrow_type(kind.elementType), kind.containsNull))
    if isinstance(kind, MapType):
        value = pa.field("value", _arrow_type(kind.valueType), kind.valueContainsNull)
        return pa.map_(_arrow_type(kind.keyType), value)
    if isinstance(kind, StructType):
        return pa.struct([_arrow_field(field) for field in kind])
    msg = f"no Arrow type for Spark's {kind.simpleString()}"
    raise ValueError(msg)
