"""The schema of a source table in Spark."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql.types import DataType, MapType, StringType, StructField, StructType

from ingestd.model.errors import ConfigError
from ingestd.model.schema import Column, Table
from spark_jobs.lake.types import spark_type

RAW = "_cdc_raw"
_RAW_TYPE = MapType(StringType(), StringType())


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
