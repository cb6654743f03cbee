"""Hashes of rows, computed by Spark from lake values, that are equal only for equal rows.

The same expressions hash the source's rows and the mirror's, so nothing depends on how Postgres
would hash or print a value. They are not the daemon's (`ingestd.digests`), which SQL can't compute:
they are neither recorded nor compared with those. Spark's xxhash64 skips nulls and treats -0.0 as
0.0; the flags and texts added here distinguish them. A text in `_cdc_raw` is part of its column's
value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DoubleType,
    FloatType,
    StructType,
)

RAW = "_cdc_raw"
WEIGHT = "_cdc_weight"
"""The column that says how often a row counts. No source column has such a name."""


@dataclass(frozen=True, slots=True)
class ComparedTable:
    """The compared columns of a table, by their lake names and types, in order.

    `key`: the names of those that identify a row; empty if only the whole row does. `ranges`: the
    number of ranges of key hashes, a power of two. `with_values`: carry the values as texts.
    """

    columns: tuple[tuple[str, DataType], ...]
    key: tuple[str, ...]
    ranges: int
    with_values: bool = False

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return [name for name, _ in self.columns]

    @property
    def key_columns(self) -> tuple[tuple[str, DataType], ...]:
        """The columns that identify a row: the key's, or all."""
        return tuple(c for c in self.columns if c[0] in self.key) if self.key else self.columns


@dataclass(frozen=True, slots=True)
class Value:
    """A column's value in a row: `column`, or if that is null its source text, `raw`."""

    column: Column
    raw: Column
    kind: DataType

    def parts(self) -> list[Column]:
        """Return the columns to hash."""
        return [*_parts(self.column, self.kind), self.raw]

    def text(self) -> Column:
        """Return the value as text for the report."""
        return f.coalesce(self.raw, _text(self.column, self.kind))


def named(name: str) -> Column:
    """Return the column with that name, whatever characters it contains."""
    return f.col("`" + name.replace("`", "``") + "`")


def value_of(name: str, kind: DataType) -> Value:
    """Return a lake column's value in a row that has `_cdc_raw`."""
    return Value(named(name), f.try_element_at(f.col(RAW), f.lit(name)), kind)


def key_hashes(values: Sequence[Value]) -> tuple[Column, Column]:
    """Return the hashes of the identifying values: 128 bits, as two longs."""
    parts = [part for value in values for part in value.parts()]
    return f.xxhash64(f.lit(1), *parts), f.xxhash64(f.lit(2), *parts)


def hashed(rows: DataFrame, comparison: ComparedTable) -> DataFrame:
    """Return h1, h2, bucket, row, hashes, key, WEIGHT and, if requested, `texts` of each row.

    `rows` has the compared columns and `_cdc_raw`; its WEIGHT, if any, says how often a row counts.
    h1, h2: hash of the key. `row`: of all columns. `hashes`: of each. `key`: the key as JSON.
    """
    values = [value_of(name, kind) for name, kind in comparison.columns]
    keys = [value_of(name, kind) for name, kind in comparison.key_columns]
    h1, h2 = key_hashes(keys)
    weight = f.col(WEIGHT) if WEIGHT in rows.columns else f.lit(1)
    row = rows.select(
        h1.alias("h1"),
        h2.alias("h2"),
        f.array(*(f.xxhash64(*value.parts()) for value in values)).alias("hashes"),
        _key_text(comparison).alias("key"),
        weight.cast("long").alias(WEIGHT),
        *_texts(comparison, values),
    )
    bits = comparison.ranges.bit_length() - 1
    bucket = f.shiftrightunsigned("h1", 64 - bits) if bits else f.lit(0)
    return row.withColumns({"bucket": bucket.cast("long"), "row": f.xxhash64("h2", "hashes")})


def _key_text(comparison: ComparedTable) -> Column:
    if not comparison.key:
        return f.lit(None).cast("string")
    keys = [value_of(name, kind).text().alias(name) for name, kind in comparison.key_columns]
    return f.to_json(f.struct(*keys))


def _texts(comparison: ComparedTable, values: Sequence[Value]) -> list[Column]:
    if not comparison.with_values:
        return []
    names = f.array(*map(f.lit, comparison.names))
    return [f.map_from_arrays(names, f.array(*(v.text() for v in values))).alias("texts")]


def _parts(value: Column, kind: DataType) -> list[Column]:
    if isinstance(kind, ArrayType):
        element = kind.elementType
        hashes = f.transform(value, lambda x: f.xxhash64(*_parts(x, element)))
        return [value.isNull(), f.size(value), hashes]
    if isinstance(kind, StructType):
        fields = [_parts(value.getField(field.name), field.dataType) for field in kind.fields]
        return [value.isNull(), *(part for parts in fields for part in parts)]
    if isinstance(kind, FloatType | DoubleType):
        return [value.isNull(), value, f.when(value == 0, value.cast("string"))]
    return [value.isNull(), value]


def _text(value: Column, kind: DataType) -> Column:
    if isinstance(kind, ArrayType | StructType):
        return f.to_json(value)
    if isinstance(kind, BinaryType):
        return f.concat(f.lit("\\x"), f.lower(f.hex(value)))
    return value.cast("string")
