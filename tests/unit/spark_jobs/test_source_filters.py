"""Spark's filters as predicates."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark.sql import datasource as spark

from ingestd.model.predicates import ColumnPredicate, IsNull, NotNull, OneOf, Predicate
from ingestd.model.schema import Column
from spark_jobs.source.filters import predicate_of

COLUMNS = {
    "id": Column("id", 23, -1, pa.int32()),
    "Id__v2": Column("Id", 20, -1, pa.int64(), stored_as="Id__v2"),
    "t": Column("t", 25, -1, pa.string()),
    "d": Column("d", 701, -1, pa.float64()),
    "n": Column("n", 1700, ((12 << 16) | 2) + 4, pa.decimal128(12, 2)),
}
ID, T = ("id",), ("t",)

TAKEN: list[tuple[spark.Filter, Predicate]] = [
    (spark.EqualTo(ID, 1), ColumnPredicate("id", "=", 1)),
    (spark.EqualTo(("Id__v2",), 1), ColumnPredicate("Id", "=", 1)),
    (spark.EqualNullSafe(ID, 1), ColumnPredicate("id", "=", 1)),
    (spark.GreaterThan(ID, 1), ColumnPredicate("id", ">", 1)),
    (spark.LessThanOrEqual(("d",), 1.5), ColumnPredicate("d", "<=", 1.5)),
    (spark.In(ID, (1, None, 2)), OneOf("id", (1, 2))),
    (spark.IsNull(ID), IsNull("id")),
    (spark.IsNotNull(ID), NotNull("id")),
    (spark.Not(spark.IsNull(ID)), NotNull("id")),
    (spark.Not(spark.EqualTo(ID, 1)), ColumnPredicate("id", "<>", 1)),
    (spark.Not(spark.GreaterThan(ID, 1)), ColumnPredicate("id", "<=", 1)),
    (spark.EqualTo(T, "a"), ColumnPredicate("t", "=", "a")),
    (spark.LessThan(("n",), Decimal("1.50")), ColumnPredicate("n", "<", Decimal("1.50"))),
]
LEFT: list[spark.Filter] = [
    spark.EqualTo(ID, None),
    spark.EqualTo(("s", "id"), 1),
    spark.EqualTo(("_cdc_raw",), {}),
    spark.Not(spark.EqualNullSafe(ID, 1)),
    spark.Not(spark.In(ID, (1,))),
    spark.GreaterThan(T, "a"),
    spark.EqualTo(T, "ä"),
    spark.IsNull(T),
    spark.GreaterThan(("d",), 1.0),
    spark.EqualTo(("d",), float("nan")),
    spark.StringStartsWith(T, "a"),
    spark.EqualTo(ID, "1"),
]


@pytest.mark.parametrize(("given", "wanted"), TAKEN, ids=str)
def test_what_postgres_decides_alike_is_taken(given: spark.Filter, wanted: Predicate) -> None:
    assert predicate_of(given, COLUMNS) == wanted


@pytest.mark.parametrize("given", LEFT, ids=str)
def test_the_rest_is_sparks(given: spark.Filter) -> None:
    assert predicate_of(given, COLUMNS) is None
