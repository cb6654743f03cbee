"""The differences of two sets of hashed rows: by range, then by row in ranges that differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from spark_jobs.reconciling.row_hashes import WEIGHT, ComparedTable

MISSING, EXTRA, DIFFERENT = "missing", "extra", "different"
"""In the source only; in the mirror only, or too often; in both with different values."""

_HALF = 0xFFFF_FFFF


class RangeSums(NamedTuple):
    """The rows in a range of key hashes: their number, and sums of the halves of their hashes."""

    rows: int
    low: int
    high: int


NOTHING = RangeSums(0, 0, 0)
Ranges = Mapping[int, RangeSums]


def sums_by_range(rows: DataFrame) -> Ranges:
    """Return the number and hash sums of hashed rows, by bucket. One pass, no shuffle of rows."""
    weight, row = f.col(WEIGHT), f.col("row")
    found = rows.groupBy("bucket").agg(
        f.sum(weight),
        f.sum(weight * row.bitwiseAND(f.lit(_HALF))),
        f.sum(weight * f.shiftrightunsigned(row, 32)),
    )
    return {row[0]: RangeSums(*row[1:]) for row in found.collect()}


def differing_ranges(expected: Ranges, there: Ranges) -> list[int]:
    """Return the ranges whose rows are not the same, in order."""
    every = expected.keys() | there.keys()
    return sorted(b for b in every if expected.get(b, NOTHING) != there.get(b, NOTHING))


def total_rows(ranges: Ranges) -> int:
    """Return the number of rows in all ranges."""
    return sum(found.rows for found in ranges.values())


def differences(
    expected: DataFrame, there: DataFrame, ranges: Collection[int], comparison: ComparedTable
) -> DataFrame:
    """Return a row for each key (or whole row, without a key) that differs in these ranges.

    kind; count: how many rows are missing or extra; key: as JSON, null for whole rows; columns:
    names of the differing ones, null except for DIFFERENT; row: the row's hash, which identifies
    whole rows; and if the comparison has values, source_values and mirror_values: of those columns,
    or of all.
    """
    sides = [_side(frame, ranges, side) for side, frame in enumerate((expected, there))]
    values = (
        [_of(0, f.col("texts")).alias("ours"), _of(1, f.col("texts")).alias("theirs")]
        if comparison.with_values
        else []
    )
    found = (
        sides[0]
        .unionByName(sides[1])
        .groupBy("h1", "h2")
        .agg(
            f.coalesce(f.sum(f.when(f.col("side") == 0, f.col(WEIGHT))), f.lit(0)).alias("wanted"),
            f.coalesce(f.sum(f.when(f.col("side") == 1, f.col(WEIGHT))), f.lit(0)).alias("found"),
            f.max("key").alias("key"),
            f.max("row").alias("row"),
            _of(0, f.col("hashes")).alias("hashes"),
            _of(1, f.col("hashes")).alias("their_hashes"),
            *values,
        )
    )
    surplus = f.col("found") - f.col("wanted")
    same = f.col("hashes") == f.col("their_hashes")
    kind = (
        f.when(surplus < 0, MISSING)
        .when(surplus > 0, EXTRA)
        .when((f.col("wanted") > 0) & ~same, DIFFERENT)
    )
    found = found.withColumn("kind", kind).where("kind IS NOT NULL")
    columns = f.when(f.col("kind") == DIFFERENT, _differing(comparison))
    found = found.withColumn("columns", columns)
    shown = []
    if comparison.with_values:
        shown = [_shown("ours").alias("source_values"), _shown("theirs").alias("mirror_values")]
    count = f.greatest(f.abs(surplus), f.lit(1)).alias("count")
    return found.select("kind", count, "key", "columns", f.hex("row").alias("row"), *shown)


def _side(frame: DataFrame, ranges: Collection[int], side: int) -> DataFrame:
    return frame.where(f.col("bucket").isin(*ranges)).withColumn("side", f.lit(side))


def _of(side: int, column: Column) -> Column:
    """Return the value of one side. Its rows of a key are one, or all the same."""
    return f.any_value(f.when(f.col("side") == side, column), ignoreNulls=True)


def _differing(comparison: ComparedTable) -> Column:
    ours, theirs = f.col("hashes"), f.col("their_hashes")
    each = [
        f.when(ours[number] != theirs[number], f.lit(name))
        for number, name in enumerate(comparison.names)
    ]
    return f.array_compact(f.array(*each))


def _shown(texts: str) -> Column:
    """Return the values of the differing columns, or of all if only one side has the row."""
    columns = f.col("columns")
    return f.map_filter(
        f.col(texts), lambda name, _: columns.isNull() | f.array_contains(columns, name)
    )
