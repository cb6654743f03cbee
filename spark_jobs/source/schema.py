"""Lake types as types of Spark and of its Arrow reader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
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

from ingestd.model.errors import ConfigError
from ingestd.model.schema import TIMESTAMP, TIMESTAMP_NTZ, Column, Table

RAW = "_cdc_raw"
_RAW_TYPE = MapType(StringType(), StringType())

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


def spark_type(arrow: pa.DataType) -> DataType:
    """Return Spark's type for an Arrow type that a raw table can have. Raises TypeError."""
    simple = _SIMPLE.get(arrow)
    if simple is not None:
        return simple
    if pa.types.is_decimal128(arrow):
        return DecimalType(arrow.precision, arrow.scale)
    if pa.types.is_list(arrow):
        return ArrayType(spark_type(arrow.value_type))
    if pa.types.is_map(arrow):
        return MapType(spark_type(arrow.key_type), spark_type(arrow.item_type))
    if pa.types.is_struct(arrow):
        return StructType([StructField(f.name, spark_type(f.type)) for f in arrow])
    msg = f"no Spark type for {arrow}"
    raise TypeError(msg)


def spark_schema(table: Table, columns: Sequence[str] | None, *, raw: bool) -> StructType:
    """Return the schema of a table's rows. `columns`: by the lake's names, None for all.

    Raises ConfigError for a column that the table does not have.
    """
    there = {c.lake_name: c for c in table.columns}
    names = list(there) if columns is None else [c for c in columns if c != RAW]
    unknown = [name for name in names if name not in there]
    if unknown:
        raise ConfigError(
            f"option columns: table {table.id} has no column {unknown[0]!r}",
            remedy=f"it has {', '.join(there)}",
        )
    fields = [_field(there[name]) for name in names]
    if raw or RAW in (columns or ()):
        fields.append(StructField(RAW, _RAW_TYPE))
    return StructType(fields)


def chosen(schema: StructType, table: Table) -> tuple[list[Column], bool]:
    """Return the table's columns in a schema, and whether the schema has `_cdc_raw`.

    Raises ConfigError for a column that the table does not have, or has with another type.
    """
    there = {c.lake_name: c for c in table.columns}
    columns: list[Column] = []
    has_raw = False
    for field in schema.fields:
        column = there.get(field.name)
        kind: DataType | None = _RAW_TYPE if field.name == RAW else None
        if column is not None:
            kind = spark_type(column.type)
        if kind is None:
            raise ConfigError(
                f"schema: table {table.id} has no column {field.name!r}",
                remedy=f"it has {', '.join(there)}",
            )
        if field.dataType.simpleString() != kind.simpleString():
            raise ConfigError(
                f"schema: column {field.name!r} of table {table.id} is "
                f"{kind.simpleString()}, not {field.dataType.simpleString()}",
                remedy="omit the schema and cast in Spark, or choose the type by `types` in "
                "the config",
            )
        if column is None:
            has_raw = True
        else:
            columns.append(column)
    return columns, has_raw


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the only Arrow schema with which Spark's reader accepts batches."""
    return cast("pa.Schema", to_arrow_schema(schema, timezone="UTC"))


def as_spark_takes(batch: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
    """Return a batch's columns in the order and with the field names of `target`.

    Values are not copied: only names inside nested types differ.
    """
    columns = [
        column if column.type.equals(field.type) else column.cast(field.type)
        for field in target
        for column in [batch.column(field.name)]
    ]
    return pa.RecordBatch.from_arrays(columns, schema=target)


def _field(column: Column) -> StructField:
    metadata = None if column.comment is None else {"comment": column.comment}
    return StructField(column.lake_name, spark_type(column.type), metadata=metadata)
