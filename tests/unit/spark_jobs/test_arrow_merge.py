from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_jobs.fold.arrow_merge import merge

RAW = pa.map_(pa.string(), pa.string())
OWN = [("id", pa.int64()), ("note", pa.string()), ("gone", pa.string()), ("_cdc_raw", RAW)]
AT = [("_cdc_lsn", pa.int64()), ("_cdc_seq", pa.int64())]
MIRROR = pa.schema([*OWN, *AT])
OUTCOMES = pa.schema(
    [
        ("id", pa.int64()),
        ("note", pa.string()),
        ("_cdc_raw", RAW),
        *AT,
        ("_cdc_deleted", pa.bool_()),
        ("_cdc_kept", pa.list_(pa.string())),
    ]
)


def row(key: int, note: str | None, lsn: int, **more: Any) -> dict[str, Any]:
    return {"id": key, "note": note, "gone": "old", "_cdc_lsn": lsn, "_cdc_seq": 1} | more


def outcome(key: int, note: str | None, lsn: int, **more: Any) -> dict[str, Any]:
    row = {"id": key, "note": note, "_cdc_lsn": lsn, "_cdc_seq": 1}
    return row | {"_cdc_deleted": False, "_cdc_kept": None} | more


def after(
    old: list[dict[str, Any]], outcomes: list[dict[str, Any]], *key: str
) -> list[dict[str, Any]]:
    rows = pa.Table.from_pylist(old, MIRROR)
    merged = merge(rows, pa.Table.from_pylist(outcomes, OUTCOMES), key or ("id",), MIRROR)
    assert merged is not None
    parts = [merged.applied(rows.slice(first, 1), first) for first in range(len(old))]
    found = pa.concat_tables([*parts, merged.rows.slice(merged.added)])
    assert found.schema == MIRROR
    return sorted(found.to_pylist(), key=lambda row: (row["id"] or 0, row["note"] or ""))


def test_rows_are_replaced_removed_and_added() -> None:
    found = after(
        [row(1, "a", 10), row(2, "b", 10), row(3, "c", 10)],
        [outcome(1, "A", 20), outcome(2, None, 20, _cdc_deleted=True), outcome(4, "d", 20)],
    )
    assert [(r["id"], r["note"], r["gone"], r["_cdc_lsn"]) for r in found] == [
        (1, "A", None, 20),
        (3, "c", "old", 10),
        (4, "d", None, 20),
    ]


@pytest.mark.parametrize(("lsn", "seq"), [(9, 5), (10, 1), (10, 0)])
@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_row_of_a_later_position_stays(lsn: int, seq: int, is_deleted: bool) -> None:  # noqa: FBT001
    late = outcome(1, "late", lsn, _cdc_seq=seq, _cdc_deleted=is_deleted)
    assert [r["note"] for r in after([row(1, "newest", 10)], [late])] == ["newest"]


def test_a_deletion_of_a_row_that_is_not_there_changes_nothing() -> None:
    found = after([row(1, "a", 10)], [outcome(2, None, 20, _cdc_deleted=True)])
    assert [r["id"] for r in found] == [1]


def test_a_value_that_was_not_sent_is_kept_with_its_text() -> None:
    texts = [("note", "infinity"), ("gone", "x")]
    found = after(
        [row(1, None, 10, _cdc_raw=texts), row(2, "b", 10)],
        [
            outcome(1, None, 20, _cdc_kept=["note"], _cdc_raw=[("other", "y")]),
            outcome(2, None, 20, _cdc_kept=["note"]),
        ],
    )
    assert [(r["note"], r["_cdc_raw"]) for r in found] == [
        (None, [("note", "infinity"), ("other", "y")]),
        ("b", None),
    ]


def test_a_key_outside_its_column_is_identified_by_its_text() -> None:
    def key(text: str, note: str) -> dict[str, Any]:
        return {"id": None, "note": note, "_cdc_raw": [("id", text)]}

    old = [row(1, "a", 10), row(0, "", 10) | key("9e99", "b"), row(0, "", 10) | key("8e88", "c")]
    changes = [outcome(0, "", 20) | key("9e99", "B")]
    assert sorted(r["note"] for r in after(old, changes)) == ["B", "a", "c"]


def test_keys_of_several_columns() -> None:
    old = [row(1, "x", 10), row(1, "y", 10), row(2, "x", 10)]
    found = after(old, [outcome(1, "y", 20, _cdc_deleted=True), outcome(2, "y", 20)], "id", "note")
    assert [(r["id"], r["note"]) for r in found] == [(1, "x"), (2, "x"), (2, "y")]


def test_nothing_is_left() -> None:
    assert after([row(1, "a", 10)], [outcome(1, None, 20, _cdc_deleted=True)]) == []
    assert after([], []) == []


KEYS = st.tuples(st.integers(1, 4), st.sampled_from(["x", "y", None]))


@given(
    st.dictionaries(KEYS, st.integers(1, 5), max_size=8),
    st.dictionaries(KEYS, st.tuples(st.integers(1, 5), st.booleans(), st.booleans()), max_size=8),
    st.integers(1, 8),
)
def test_rows_become_what_they_do_one_by_one(
    old: dict[Any, int], changes: dict[Any, tuple[int, bool, bool]], size: int
) -> None:
    """Keys are `id` and `note`, some without a value; `gone` is kept, or not."""
    expected: dict[Any, Any] = {key: (lsn, "old") for key, lsn in old.items()}
    for key, (lsn, is_deleted, is_kept) in changes.items():
        if lsn <= old.get(key, 0):
            continue
        if is_deleted:
            expected.pop(key, None)
        else:
            expected[key] = (lsn, "old" if is_kept and key in old else None)
    rows = [row(number, note, lsn) for (number, note), lsn in old.items()]
    outcomes = [
        outcome(number, note, lsn, _cdc_deleted=deleted, _cdc_kept=["gone"] if kept else None)
        for (number, note), (lsn, deleted, kept) in changes.items()
    ]
    before = pa.Table.from_pylist(rows, MIRROR)
    merged = merge(before, pa.Table.from_pylist(outcomes, OUTCOMES), ("id", "note"), MIRROR)
    assert merged is not None
    parts = [merged.applied(before.slice(n, size), n) for n in range(0, len(rows), size)]
    found = pa.concat_tables([*parts, merged.rows.slice(merged.added)]).to_pylist()
    assert len(found) == len(expected)
    assert {(r["id"], r["note"]): (r["_cdc_lsn"], r["gone"]) for r in found} == expected
