"""The fold of a raw table's change log to the table's current rows (design section 2).

Plain Python, row by row: the reading that the contract states, for checks and small tables. Spark
does the same at scale.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from ingestd.model.changes import DELETE, OF_BEFORE, RESERVED_PREFIX, TRUNCATE

Row = dict[str, Any]


def fold(rows: pa.Table, key: Sequence[str]) -> list[Row]:
    """Return the current rows, source columns only, in no particular order.

    `rows` has the raw schema (or the change schema), in any order: rows are ordered by position
    (`_cdc_lsn`, `_cdc_seq`), not by arrival. `key` names the key's columns; it is empty for a table
    without a key, whose rows are a multiset. A value that its column can't hold is returned as the
    source's text, from `_cdc_raw`.
    """
    columns = [name for name in rows.schema.names if not name.startswith(RESERVED_PREFIX)]
    return fold_rows(rows.to_pylist(maps_as_pydicts="strict"), columns, key)


def fold_rows(changes: Sequence[Row], columns: Sequence[str], key: Sequence[str]) -> list[Row]:
    """Return the same as `fold`, for changes as dicts of their columns' values."""
    changes = sorted(changes, key=lambda change: (change["_cdc_lsn"], change["_cdc_seq"]))
    if key:
        return _fold_keyed(changes, columns, key)
    return _fold_multiset(changes, columns)


def _fold_keyed(changes: Iterable[Row], columns: Sequence[str], key: Sequence[str]) -> list[Row]:
    current: dict[Hashable, Row] = {}
    for change in changes:
        if change["_cdc_op"] == TRUNCATE:  # removes every row at a lower position
            current.clear()
            continue
        row, before = _values(change, columns), _before(change)
        old_key = _identity({**row, **(before or {})}, key)
        if change["_cdc_op"] == DELETE:
            current.pop(old_key, None)
            continue
        # An update with another key removes the old row, which has the values that were not sent.
        old = current.pop(old_key, None) if before is not None else current.get(old_key)
        _fill_unsent(change, row, before, old)
        current[_identity(row, key)] = row
    return list(current.values())


def _fold_multiset(changes: Iterable[Row], columns: Sequence[str]) -> list[Row]:
    current: dict[Hashable, list[Row]] = {}
    for change in changes:
        operation = change["_cdc_op"]
        if operation == TRUNCATE:
            current.clear()
            continue
        row, before = _values(change, columns), _before(change)
        gone = before if before is not None else row if operation == DELETE else None
        if gone is not None:
            equal = current.get(_identity(gone, columns))
            if equal:
                equal.pop()
        if operation != DELETE:
            _fill_unsent(change, row, before, None)
            current.setdefault(_identity(row, columns), []).append(row)
    return [row for equal in current.values() for row in equal]


def _values(change: Row, columns: Sequence[str]) -> Row:
    raw = change["_cdc_raw"] or {}
    return {name: raw.get(name, change[name]) for name in columns}


def _before(change: Row) -> Row | None:
    before = change["_cdc_before"]
    if before is None:
        return None
    raw = change["_cdc_raw"] or {}
    return {name: raw.get(OF_BEFORE + name, value) for name, value in before.items()}


def _fill_unsent(
    change: Row, row: Row, before: Mapping[str, Any] | None, old: Mapping[str, Any] | None
) -> None:
    """Fill in values that the server did not send: from the old row it sent, or from ours."""
    for name in change["_cdc_unchanged"] or ():
        if old is not None:
            row[name] = old.get(name)
        elif before is not None and name in before:
            row[name] = before[name]


def _identity(row: Mapping[str, Any], names: Sequence[str]) -> Hashable:
    return tuple(hashable(row.get(name)) for name in names)


def hashable(value: Any) -> Hashable:  # noqa: ANN401 - any Arrow value
    """Return the value so that it compares as in Postgres: NaN equals NaN."""
    if isinstance(value, float) and math.isnan(value):
        return math.nan  # this one object equals itself
    if isinstance(value, list):
        return tuple(hashable(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, hashable(item)) for name, item in value.items())
    found: Hashable = value
    return found
