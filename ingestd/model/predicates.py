"""Conditions on a table's rows, as readers pass them to a `ingestd.ports.PageSource`.

Each refers to one column, by the source's name, and to the value as stored in the lake: null if the
column's type can't hold the source's value. As in SQL, a comparison with null is not true. Several
are combined with AND.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

PredicateValue = bool | int | float | Decimal | str | bytes | date | datetime
"""Never null. A datetime is aware for timestamptz, naive for timestamp."""
Operator = Literal["=", "<>", "<", "<=", ">", ">="]


@dataclass(frozen=True, slots=True)
class ColumnPredicate:
    """`column` `operator` `value`."""

    column: str
    operator: Operator
    value: PredicateValue


@dataclass(frozen=True, slots=True)
class OneOf:
    """`column` IN `values`; with no values it is true for no row."""

    column: str
    values: tuple[PredicateValue, ...]


@dataclass(frozen=True, slots=True)
class IsNull:
    """`column` IS NULL."""

    column: str


@dataclass(frozen=True, slots=True)
class NotNull:
    """`column` IS NOT NULL."""

    column: str


Predicate = ColumnPredicate | OneOf | IsNull | NotNull

_COMPARE: Mapping[Operator, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        "=": operator.eq,
        "<>": operator.ne,
        "<": operator.lt,
        "<=": operator.le,
        ">": operator.gt,
        ">=": operator.ge,
    }
)


def kept(rows: pa.RecordBatch, predicates: Sequence[Predicate]) -> pa.RecordBatch:
    """Return the rows for which all predicates are true, as a reader must for `remaining`.

    The predicates' columns are named as in `rows`. Raises pyarrow.ArrowInvalid for values that
    can't be compared with the column, KeyError for a missing column.
    """
    for predicate in predicates:
        if rows.schema.get_field_index(predicate.column) < 0:
            raise KeyError(predicate.column)
        rows = rows.filter(_expression(predicate))
    return rows


def _expression(predicate: Predicate) -> pc.Expression:
    field = pc.field(predicate.column)
    match predicate:
        case ColumnPredicate(_, chosen, value):
            return _COMPARE[chosen](field, value)
        case OneOf(_, values):
            nothing = pc.scalar(False)  # noqa: FBT003 - SQL's false
            return functools.reduce(operator.or_, [field == v for v in values], nothing)
        case IsNull():
            return field.is_null()
        case NotNull():
            return field.is_valid()
