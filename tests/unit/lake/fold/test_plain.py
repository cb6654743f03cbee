"""Folding a raw table, against a plain model of a table."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.lake.fold.plain import fold
from ingestd.model.schema import Column
from tests.unit.lake.rows import make_batch, make_table

T = make_table("t", Column("big", 25, -1, pa.string(), "text"))
FULL = replace(T, before=("id", "note", "big"), replica_identity="f", key=())

keys = st.integers(0, 4)
text = st.sampled_from(["a", "b", None])
steps = st.lists(
    st.tuples(st.sampled_from("cukdtr"), keys, keys, text, text, st.booleans()), max_size=30
)


def as_table(table: Any, changes: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_batches([make_batch(table, changes).rows])


def sorted_rows(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(str([row[n] for n in ("id", "note", "big")]) for row in rows)


@given(steps, st.randoms(use_true_random=False))
def test_keyed_changes_fold_to_the_table(script: list[Any], shuffle: random.Random) -> None:
    model: dict[int, dict[str, Any]] = {}
    changes: list[dict[str, Any]] = []
    for at, (op, key, other, note, big, unsent) in enumerate(script, 1):
        position = {"_cdc_lsn": 100 * (at // 3), "_cdc_seq": at}
        if op == "t":
            model.clear()
            changes.append({"_cdc_op": "t", **position})
        elif op == "d" and key in model:
            del model[key]
            changes.append({"_cdc_op": "d", "id": key, **position})
        elif op in "cr" and key not in model:
            model[key] = {"id": key, "note": note, "big": big}
            changes.append({"_cdc_op": op, **model[key], **position})
        elif op in "uk" and key in model:
            moves = op == "k" and other not in model
            old = model.pop(key)
            new_key = other if moves else key
            value = old["big"] if unsent else big
            model[new_key] = {"id": new_key, "note": note, "big": value}
            changes.append(
                {
                    "_cdc_op": "u",
                    **model[new_key],
                    **({"big": None, "_cdc_unchanged": ["big"]} if unsent else {}),
                    **({"_cdc_before": {"id": key}} if moves else {}),
                    **position,
                }
            )
    shuffle.shuffle(changes)
    assert sorted_rows(fold(as_table(T, changes), T.key)) == sorted_rows(list(model.values()))


@given(steps)
def test_a_table_without_key_folds_to_a_multiset(script: list[Any]) -> None:
    model: Counter[tuple[Any, ...]] = Counter()
    changes: list[dict[str, Any]] = []
    for at, (op, key, other, note, big, unsent) in enumerate(script, 1):
        position = {"_cdc_lsn": 100, "_cdc_seq": at}
        present = sorted(model.elements(), key=str)
        if op == "t":
            model.clear()
            changes.append({"_cdc_op": "t", **position})
        elif op in "cr":
            model[key, note, big] += 1
            changes.append({"_cdc_op": op, "id": key, "note": note, "big": big, **position})
        elif present:
            old = present[key % len(present)]
            model[old] -= 1
            named = dict(zip(("id", "note", "big"), old, strict=True))
            if op == "d":
                changes.append({"_cdc_op": "d", **named, "_cdc_before": named, **position})
                continue
            new = (other, note, old[2] if unsent else big)
            model[new] += 1
            sent = {"id": other, "note": note, "big": None if unsent else big}
            changes.append(
                {
                    "_cdc_op": "u",
                    **sent,
                    "_cdc_before": named,
                    "_cdc_unchanged": ["big"] if unsent else None,
                    **position,
                }
            )
    folded = [(r["id"], r["note"], r["big"]) for r in fold(as_table(FULL, changes), ())]
    assert Counter(folded) == +model


def test_rows_below_a_marker_that_arrives_last_are_void() -> None:
    changes = [
        {"_cdc_op": "c", "id": 1, "_cdc_lsn": 10, "_cdc_seq": 1},
        {"_cdc_op": "r", "id": 2, "_cdc_lsn": 50, "_cdc_seq": 0},
        {"_cdc_op": "u", "id": 2, "note": "new", "_cdc_lsn": 50, "_cdc_seq": 1},
        {"_cdc_op": "t", "_cdc_lsn": 50, "_cdc_seq": -1},
    ]
    assert fold(as_table(T, changes), T.key) == [{"id": 2, "note": "new", "big": None}]


@pytest.mark.parametrize("key", [("id",), ()])
def test_lossless_raw_text_takes_the_place_of_the_value(key: tuple[str, ...]) -> None:
    changes = [
        {"id": 1, "_cdc_raw": [("note", "infinity")], "_cdc_lsn": 10, "_cdc_seq": 1},
        {"id": 2, "note": "x", "_cdc_lsn": 10, "_cdc_seq": 2},
        {
            "_cdc_op": "d",
            "_cdc_before": {"id": None, "note": "x"},
            "note": "x",
            "_cdc_raw": [("_cdc_before.id", "2"), ("id", "2")],
            "_cdc_lsn": 10,
            "_cdc_seq": 3,
        },
        {"id": 3, "_cdc_raw": [("id", "1e400")], "_cdc_lsn": 10, "_cdc_seq": 4},
        {"_cdc_op": "d", "_cdc_raw": [("id", "1e400")], "_cdc_lsn": 10, "_cdc_seq": 5},
    ]
    found = fold(as_table(FULL, changes), key)
    assert {"id": 1, "note": "infinity", "big": None} in found
    assert all(row["id"] != "1e400" for row in found)
