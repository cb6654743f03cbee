"""The last row of each key by arrays, against the fold that goes row by row."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.lake.fold.plain import fold
from ingestd.lake.reference.changes import ReferenceChanges
from ingestd.lake.reference.last_rows import last_rows
from ingestd.lake.reference.raw_changes import key_hashes
from ingestd.model.changes import change_schema
from ingestd.model.schema import Column, Table, TableId
from ingestd.testing.oracle import folding as oracle
from ingestd.testing.oracle.server_text import text_function
from tests.harness.examples import examples

if TYPE_CHECKING:
    from collections.abc import Sequence

TABLE = Table(
    TableId("public", "t"),
    1,
    (
        Column("a", 23, -1, pa.int32(), identity=True),
        Column("b", 25, -1, pa.string(), identity=True),
        Column("note", 25, -1, pa.string()),
        Column("tags", 1009, -1, pa.list_(pa.field("element", pa.string()))),
    ),
    key=("a", "b"),
    before=("a", "b"),
)
SCHEMA = change_schema(TABLE)
KEY = ["a", "b"]


class HeldError(Exception):
    """A value that counts is kept as text only."""


def table(rows: Sequence[dict[str, Any]], schema: pa.Schema = SCHEMA) -> pa.Table:
    arrays = [pa.array([row.get(f.name) for row in rows], f.type) for f in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


class Source:
    """A table that logs its changes as a server does."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, str], dict[str, Any]] = {}
        self.log: list[dict[str, Any]] = []

    def do(self, draw: st.DrawFn) -> None:
        key = (draw(st.integers(0, 3)), draw(st.sampled_from(["x", "y"])))
        note = draw(st.sampled_from([None, "n", "m"]))
        tags = draw(st.sampled_from([None, [], ["t", None]]))
        action = draw(st.sampled_from(["write", "write", "move", "delete"]))
        old = self.rows.get(key)
        if action == "delete":
            if self.rows.pop(key, None) is not None:
                self._log("d", {"a": key[0], "b": key[1]})
            return
        row = {"a": key[0], "b": key[1], "note": note, "tags": tags}
        if old is None:
            self.rows[key] = row
            self._log("c", row)
            return
        before = None
        if action == "move":
            to = (draw(st.integers(0, 3)), key[1])
            if to != key and to in self.rows:
                return
            before = {"a": key[0], "b": key[1]} if to != key else None
            row["a"] = to[0]
        sent = dict(row)
        unchanged = draw(st.sets(st.sampled_from(["note", "tags", "b"])))
        if "b" in unchanged:  # a key that is stored apart: the server sends the old one
            before = {"a": key[0], "b": key[1]}
        for name in unchanged:
            row[name], sent[name] = old[name], None
        del self.rows[key]
        self.rows[to[0] if action == "move" else key[0], key[1]] = row
        extra = {"_cdc_before": before, "_cdc_unchanged": sorted(unchanged) or None}
        self._log("u", {**sent, **extra})

    def _log(self, op: str, row: dict[str, Any]) -> None:
        number = len(self.log)
        at = datetime(2026, 1, 1, tzinfo=UTC)
        place = {"_cdc_lsn": number // 3, "_cdc_seq": number % 3 + 1, "_cdc_ts": at}
        self.log.append({**row, **place, "_cdc_op": op})


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[dict[str, Any]], int]:
    source = Source()
    for _ in range(draw(st.integers(1, 25))):
        source.do(draw)
    return source.log, draw(st.integers(0, len(source.log)))


def plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda r: (r["a"], r["b"]))


def folded(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return plain(fold(table(log), KEY))


@pytest.mark.thorough
@examples(200)
@given(logs(), st.randoms())
def test_whole_log_equals_the_plain_fold(
    case: tuple[list[dict[str, Any]], int], random: Any
) -> None:
    log, _ = case
    shuffled = list(log)
    random.shuffle(shuffled)
    found = last_rows(table(shuffled), KEY, HeldError).to_pylist()
    kept = [{n: r[n] for n in TABLE_NAMES} for r in found if r["_cdc_op"] == "u"]
    assert plain(kept) == folded(log)
    keys = [(r["a"], r["b"]) for r in found]
    assert len(keys) == len(set(keys)), "a key came twice"


@pytest.mark.thorough
@examples(200)
@given(logs())
def test_a_part_put_onto_the_rows_before_equals_the_plain_fold(
    case: tuple[list[dict[str, Any]], int],
) -> None:
    log, cut = case
    own = pa.schema([SCHEMA.field(n) for n in TABLE_NAMES])
    before = table(folded(log[:cut]), own)
    [changes] = last_rows(table(log[cut:]), KEY, HeldError).combine_chunks().to_batches() or [None]
    if changes is None:
        assert cut == len(log)
        return
    put = ReferenceChanges(changes, KEY, "here")
    left = put.without_changed(before, put.find(before))
    after = pa.concat_tables([left, put.rows().cast(own)]).to_pylist()
    assert plain(after) == folded(log)


TABLE_NAMES = [c.name for c in TABLE.columns]


@pytest.mark.thorough
@examples(200)
@given(logs())
def test_the_folds_agree_with_the_oracle(case: tuple[list[dict[str, Any]], int]) -> None:
    raw = table(case[0])
    expected = oracle.fold(raw, TABLE_NAMES, KEY)
    assert not expected.faults
    found = last_rows(raw, KEY, HeldError).to_pylist()
    assert texts([row for row in found if row["_cdc_op"] == "u"]) == expected.rows
    assert texts(fold(raw, KEY)) == expected.rows


def texts(rows: list[dict[str, Any]]) -> Counter[oracle.Texts]:
    """Return rows as the oracle does."""
    text = {name: text_function(SCHEMA.field(name).type) for name in TABLE_NAMES}
    values = [[row[name] for name in TABLE_NAMES] for row in rows]
    return Counter(
        tuple(None if v is None else text[n](v) for n, v in zip(TABLE_NAMES, row, strict=True))
        for row in values
    )


def test_minus_zero_and_zero_are_one_key() -> None:
    schema = SCHEMA.set(0, pa.field("a", pa.float64()))
    place = schema.get_field_index("_cdc_before")
    old = pa.struct([("a", pa.float64()), ("b", pa.string())])
    schema = schema.set(place, pa.field("_cdc_before", old))
    first = {"a": -0.0, "b": "x", "note": "n", "_cdc_op": "c", "_cdc_lsn": 1, "_cdc_seq": 1}
    later = {**first, "a": 0.0, "note": None, "_cdc_op": "u", "_cdc_lsn": 2}
    later["_cdc_unchanged"] = ["note"]
    rows = table([later, first], schema)
    [found] = last_rows(rows, KEY, HeldError).to_pylist()
    assert (found["note"], found["_cdc_unchanged"]) == ("n", None)
    assert len(set(key_hashes(rows, KEY).tolist())) == 1


def test_i7_a_value_kept_as_text_is_refused_where_it_counts() -> None:
    first = {"a": 1, "b": "x", "_cdc_op": "c", "_cdc_lsn": 1, "_cdc_seq": 1}
    later = {**first, "_cdc_op": "u", "_cdc_lsn": 2}
    held = {**first, "_cdc_raw": [("note", "odd")]}
    assert last_rows(table([held, later]), KEY, HeldError).num_rows == 1
    with pytest.raises(HeldError, match="note"):
        last_rows(table([held]), KEY, HeldError)
    with pytest.raises(HeldError, match="b"):
        last_rows(table([{**held, "_cdc_raw": [("b", "odd")]}, later]), KEY, HeldError)


def test_a_log_of_another_shape_is_not_taken_for_a_key() -> None:
    whole = replace(TABLE, before=tuple(TABLE_NAMES))
    schema = change_schema(whole)
    row = {"a": 1, "b": "x", "note": "n", "_cdc_op": "u", "_cdc_lsn": 1, "_cdc_seq": 1}
    row["_cdc_before"] = {"a": 1, "b": "x", "note": "m"}
    [found] = last_rows(table([row], schema), KEY, HeldError).to_pylist()
    assert (found["note"], found["_cdc_op"], found["_cdc_before"]) == ("n", "u", None)
