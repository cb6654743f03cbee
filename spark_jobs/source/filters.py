"""Spark's filters as predicates that a page source may apply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)
from pyspark.sql.datasource import IsNull as SparkIsNull

from ingestd.model.predicates import (
    ColumnPredicate,
    IsNull,
    NotNull,
    OneOf,
    Operator,
    Predicate,
    PredicateValue,
)
from ingestd.model.schema import Column
from ingestd.postgres.snapshot.pushdown import condition

_OPERATORS: Mapping[type[Filter], Operator] = {
    EqualTo: "=",
    EqualNullSafe: "=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}
_FIRST_GREGORIAN = date(1582, 10, 15)
_NEGATED: Mapping[Operator, Operator] = {
    "=": "<>",
    ">": "<=",
    ">=": "<",
    "<": ">=",
    "<=": ">",
}


def predicate_of(spark_filter: Filter, columns: Mapping[str, Column]) -> Predicate | None:
    """Return the predicate that Postgres applies exactly as Spark would; None: left to Spark.

    The filter is a top-level condition of a WHERE, so null counts as false. `columns`: by the
    lake's names.
    """
    predicate = _translated(spark_filter, columns)
    if predicate is None:
        return None
    column = next(c for c in columns.values() if c.name == predicate.column)
    return None if condition(column, predicate) is None else predicate


def _translated(spark_filter: Filter, columns: Mapping[str, Column]) -> Predicate | None:
    is_negated = isinstance(spark_filter, Not)
    inner = spark_filter.child if isinstance(spark_filter, Not) else spark_filter
    path: Sequence[str] = getattr(inner, "attribute", ())
    if len(path) != 1 or path[0] not in columns:
        return None
    name = columns[path[0]].name
    if isinstance(inner, SparkIsNull | IsNotNull):
        asks_for_null = isinstance(inner, SparkIsNull) is not is_negated
        return IsNull(name) if asks_for_null else NotNull(name)
    if isinstance(inner, In):
        if is_negated:
            return None
        # `x IN (1, NULL)` is true for 1 alone.
        values = tuple(v for v in inner.value if v is not None)
        return None if any(map(_may_be_another, values)) else OneOf(name, values)
    return _comparison(name, inner, is_negated=is_negated)


def _may_be_another(value: object) -> bool:
    """Return whether Spark may have passed a value that differs from the query's.

    The calendar that Spark uses here lacks the days from 1582-10-05 to 14, which become the 15th.
    One more day on both sides allows for time zones.
    """
    day = value.date() if isinstance(value, datetime) else value
    return isinstance(day, date) and abs(day - _FIRST_GREGORIAN) <= timedelta(days=1)


def _comparison(name: str, inner: Filter, *, is_negated: bool) -> Predicate | None:
    operator = _OPERATORS.get(type(inner))
    value = getattr(inner, "value", None)
    if operator is None or not isinstance(value, PredicateValue) or _may_be_another(value):
        return None
    if is_negated:
        if isinstance(inner, EqualNullSafe):  # true for null, unlike `<>`
            return None
        operator = _NEGATED[operator]
    return ColumnPredicate(name, operator, value)
