"""Predicates that Postgres can apply with exactly the result of the reader.

The reader compares the lake's values, Postgres its own. So only types are supported whose values
are known to be the same in the lake, and only comparisons with the same meaning on both sides. The
reader must apply what needs a collation (ranges of texts), what ignores blanks (char(n)), what
compares NaN, and what is masked or of a configured type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from types import MappingProxyType
from typing import LiteralString
from uuid import UUID

import pyarrow as pa
from psycopg import sql

from ingestd.decode.type_mapping import lake_type
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

_INT8 = range(-(1 << 63), 1 << 63)

_EVERY: frozenset[Operator] = frozenset({"=", "<>", "<", "<=", ">", ">="})


@dataclass(frozen=True, slots=True)
class _Kind:
    """The properties of a type's values.

    `literal` returns a value as text of the type `literal_type`; None for one that can't be
    compared with the same meaning. `operators`: those with the same meaning on both sides. `held`:
    a condition that is true for values that the lake's column can hold (None: all); the others are
    null there. `is_null_known`: false for texts, which may be invalid UTF-8.
    """

    literal_type: str
    literal: Callable[[PredicateValue], str | None]
    operators: frozenset[Operator] = _EVERY
    held: LiteralString | None = None
    is_null_known: bool = True


def condition(column: Column, predicate: Predicate) -> sql.Composable | None:
    """Return SQL that is certain to be true for the same rows; None if there is none."""
    kind = _kind(column)
    if kind is None:
        return None
    name = sql.Identifier(column.name)
    held = sql.SQL(kind.held or "true").format(name)
    if isinstance(predicate, IsNull | NotNull):
        if not kind.is_null_known:
            return None
        missing = sql.SQL("({} IS NULL OR NOT {})").format(name, held)
        return missing if isinstance(predicate, IsNull) else sql.SQL("NOT {}").format(missing)
    if isinstance(predicate, OneOf):
        return _one_of(name, kind, predicate)
    compared = _comparison(name, kind, predicate)
    return None if compared is None else sql.SQL("({} AND {})").format(compared, held)


def _kind(column: Column) -> _Kind | None:
    if column.mask is not None or column.is_override:
        return None
    kind = _KINDS.get(column.type_oid)
    is_usual = column.type == lake_type(column.type_oid, column.typmod)
    if column.type_oid == _NUMERIC and not pa.types.is_decimal(column.type):
        return None
    return kind if is_usual else None


def _one_of(name: sql.Identifier, kind: _Kind, predicate: OneOf) -> sql.Composable | None:
    found: list[sql.Composable] = [sql.SQL("false")]
    for value in predicate.values:
        compared = _comparison(name, kind, ColumnPredicate(predicate.column, "=", value))
        if compared is None:
            return None
        found.append(compared)
    return sql.SQL("({})").format(sql.SQL(" OR ").join(found))


def _comparison(
    name: sql.Identifier, kind: _Kind, predicate: ColumnPredicate
) -> sql.Composable | None:
    text = kind.literal(predicate.value)
    if text is None or predicate.operator not in kind.operators:
        return None
    compared = sql.SQL("{} OPERATOR(pg_catalog.{}) {}::pg_catalog.{}").format(
        name, sql.SQL(predicate.operator), text, sql.Identifier(kind.literal_type)
    )
    if kind is not _TEXT:
        return compared
    # An index can serve the first. Texts that are equal by a collation may still differ.
    return sql.SQL('({} AND {} COLLATE pg_catalog."C" OPERATOR(pg_catalog.=) {})').format(
        compared, name, text
    )


# --- literals --------------------------------------------------------------------------------


def _bool(value: PredicateValue) -> str | None:
    return str(value) if isinstance(value, bool) else None


def _integer(value: PredicateValue) -> str | None:
    is_integer = isinstance(value, int) and not isinstance(value, bool) and value in _INT8
    return str(value) if is_integer else None


def _float(value: PredicateValue) -> str | None:
    return repr(value) if isinstance(value, float) and not math.isnan(value) else None


def _decimal(value: PredicateValue) -> str | None:
    return str(value) if isinstance(value, Decimal) and value.is_finite() else None


def _bytes(value: PredicateValue) -> str | None:
    return "\\x" + value.hex() if isinstance(value, bytes) else None


def _ascii(value: PredicateValue) -> str | None:
    """Return ASCII texts only: the database's encoding may lack other characters."""
    is_safe = isinstance(value, str) and value.isascii() and "\0" not in value
    return str(value) if is_safe else None


def _uuid(value: PredicateValue) -> str | None:
    """Return canonical texts only: the lake has the server's text, whose order is the bytes'."""
    try:
        return value if isinstance(value, str) and str(UUID(value)) == value else None
    except ValueError:
        return None


def _date(value: PredicateValue) -> str | None:
    if isinstance(value, datetime) or not isinstance(value, date):
        return None
    return value.isoformat()


def _timestamp(value: PredicateValue) -> str | None:
    if not isinstance(value, datetime) or value.tzinfo is not None:
        return None
    return value.isoformat()


def _timestamptz(value: PredicateValue) -> str | None:
    if not isinstance(value, datetime) or value.tzinfo is None:
        return None
    try:
        return value.astimezone(UTC).isoformat()
    except OverflowError:  # before year 1 or after 9999 in UTC
        return None


_NUMERIC = 1700
_TEXT = _Kind("text", _ascii, frozenset({"="}), is_null_known=False)
_INTEGER = _Kind("int8", _integer)
# NaN is above everything in Postgres and in Spark, and can't be compared in Arrow.
_FLOAT = _Kind("float8", _float, frozenset({"=", "<", "<="}))
_KINDS: Mapping[int, _Kind] = MappingProxyType(
    {
        16: _Kind("bool", _bool, frozenset({"=", "<>"})),
        17: _Kind("bytea", _bytes),
        20: _INTEGER,
        21: _INTEGER,
        23: _INTEGER,
        25: _TEXT,
        700: _FLOAT,
        701: _FLOAT,
        1043: _TEXT,
        1082: _Kind("date", _date, held="({0} BETWEEN '0001-01-01' AND '9999-12-31')"),
        1114: _Kind("timestamp", _timestamp, held="({0} >= '0001-01-01' AND {0} < '10000-01-01')"),
        1184: _Kind(
            "timestamptz",
            _timestamptz,
            held="({0} >= '0001-01-01 00:00:00+00' AND {0} < '10000-01-01 00:00:00+00')",
        ),
        _NUMERIC: _Kind("numeric", _decimal, held="({0} <> 'NaN')"),
        2950: _Kind("uuid", _uuid),
    }
)
