"""The fold by arrays against the fold of one row after another."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.lake.fold.outcomes import fold_row_by_row
from ingestd.lake.fold.vectorized import above_truncate, fold_to_outcomes

RAW = pa.map_(pa.string(), pa.string())
COLUMNS = ("id", "part", "a", "b")
BEFORE = pa.struct([("id", pa.int64()), ("part", pa.string()), ("a", pa.string())])
SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("part", pa.string()),
        ("a", pa.string()),
        ("b", pa.string()),
        ("_cdc_op", pa.string()),
        ("_cdc_lsn", pa.int64()),
        ("_cdc_seq", pa.int64()),
        ("_cdc_ts", pa.timestamp("us", "UTC")),
        ("_cdc_unchanged", pa.list_(pa.string())),
        ("_cdc_before", BEFORE),
        ("_cdc_raw", RAW),
    ]
)
KEYS = st.tuples(st.integers(1, 3), st.sampled_from("xy"))
TEXTS = st.sampled_from(["p", "q", None])


@st.composite
def _changes(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw changes of few keys, in positions of their own, in any order."""
    count = draw(st.integers(1, 10))
    return draw(st.permutations([_change(draw, place) for place in range(count)]))


def _change(draw: st.DrawFn, place: int) -> dict[str, Any]:
    op, (number, part) = draw(st.sampled_from("cuuuud")), draw(KEYS)
    row: dict[str, Any] = {"id": number, "part": part, "_cdc_op": op}
    row |= {"_cdc_lsn": place // 3, "_cdc_seq": place % 3, "_cdc_ts": place}
    if op == "d":
        return row
    row |= {"a": draw(TEXTS), "b": draw(TEXTS)}
    if op == "u":
        unsent = draw(st.lists(st.sampled_from("ab"), unique=True))
        row |= dict.fromkeys(unsent) | {"_cdc_unchanged": unsent or None}
        if draw(st.booleans()):
            old, old_part = draw(st.one_of(st.just((number, part)), KEYS))
            row["_cdc_before"] = {"id": old, "part": old_part, "a": draw(TEXTS)}
    if draw(st.integers(0, 9)) == 0:
        row["_cdc_raw"] = [(draw(st.sampled_from(["a", "id", "_cdc_before.a"])), "text")]
    return row


def _by_key(outcomes: pa.Table, under_old_key: Any, key: tuple[str, ...]) -> dict[Any, Any]:
    owned: dict[int, set[Any]] = {}
    for number, name, whose in under_old_key:
        owned.setdefault(number, set()).add((name, whose))
    found = {}
    for number, row in enumerate(outcomes.to_pylist()):
        row["_cdc_kept"] = sorted(row["_cdc_kept"] or ())
        mine = (*(row[k] for k in key), dict(row["_cdc_raw"] or ()).get("id"))
        assert mine not in found
        found[mine] = (row, owned.get(number))
    return found


@pytest.mark.parametrize("key", [("id",), ("id", "part")])
@given(rows=_changes())
def test_it_is_the_fold_of_one_after_another(
    key: tuple[str, ...], rows: list[dict[str, Any]]
) -> None:
    changes = pa.Table.from_pylist(rows, SCHEMA)
    expected = fold_row_by_row(changes, COLUMNS, key)
    found = fold_to_outcomes(changes, COLUMNS, key)
    assert found is not None
    assert found.outcomes.schema == expected.outcomes.schema
    assert _by_key(found.outcomes, found.kept_under_old_key, key) == _by_key(
        expected.outcomes, expected.kept_under_old_key, key
    )


def test_too_many_rows_to_be_folded_singly() -> None:
    rows = [
        {"id": n, "_cdc_op": "u", "_cdc_lsn": n, "_cdc_seq": 0, "_cdc_raw": [("a", "NaN")]}
        for n in range(2)
    ]
    assert (
        fold_to_outcomes(pa.Table.from_pylist(rows, SCHEMA), COLUMNS, ("id",), max_singly=1) is None
    )
    plain = [row | {"_cdc_raw": None} for row in rows]
    assert (
        fold_to_outcomes(pa.Table.from_pylist(plain, SCHEMA), COLUMNS, ("id",), max_singly=1)
        is not None
    )


def test_too_many_values_kept_under_old_keys() -> None:
    row = {"_cdc_op": "u", "_cdc_seq": 0, "_cdc_unchanged": ["b"]}
    rows = [{**row, "id": n, "_cdc_lsn": n, "_cdc_before": {"id": n + 5}} for n in range(2)]
    changes = pa.Table.from_pylist(rows, SCHEMA)
    found = fold_to_outcomes(changes, COLUMNS, ("id",))
    assert found is not None
    assert sorted(found.kept_under_old_key) == [(0, "b", (5,)), (1, "b", (6,))]
    assert fold_to_outcomes(changes, COLUMNS, ("id",), max_singly=1) is None


def test_what_a_truncate_voids_goes_by_position() -> None:
    rows = [
        {"id": 1, "_cdc_op": "r", "_cdc_lsn": 5, "_cdc_seq": 0},
        {"id": 2, "_cdc_op": "c", "_cdc_lsn": 7, "_cdc_seq": 1},
        {"_cdc_op": "t", "_cdc_lsn": 5, "_cdc_seq": 3},
        {"id": 3, "_cdc_op": "c", "_cdc_lsn": 5, "_cdc_seq": 4},
        {"id": 4, "_cdc_op": "c", "_cdc_lsn": 5, "_cdc_seq": 2},
        {"_cdc_op": "t", "_cdc_lsn": 5, "_cdc_seq": -1},
    ]
    left = above_truncate(pa.Table.from_pylist(rows, SCHEMA))
    assert left["id"].to_pylist() == [2, 3]


def test_a_column_that_is_dropped_is_kept_by_no_outcome() -> None:
    row = {"id": 1, "_cdc_op": "u", "_cdc_lsn": 5, "_cdc_seq": 0, "_cdc_unchanged": ["b"]}
    for raw in (None, [("a", "NaN")]):
        changes = pa.Table.from_pylist([row | {"_cdc_raw": raw}], SCHEMA)
        found = fold_to_outcomes(changes, ("id", "a"), ("id",))
        assert found is not None
        assert found.outcomes["_cdc_kept"].to_pylist() == [None]
