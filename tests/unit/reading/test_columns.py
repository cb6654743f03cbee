"""Columns that changed: their values are those of the source, by its names."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

import ingestd
from ingestd.lake.fold.raw_texts import RAW_TYPE, TextEntries
from ingestd.model.schema import Column, Table
from tests.harness.colliding import texts_of_one_hash
from tests.harness.raw_lake import RawLake
from tests.unit.lake.rows import make_table

AMOUNT = Column("amount", 23, -1, pa.int32(), "integer")
NEWER = Column("amount", 1700, -1, pa.decimal128(4, 2), "numeric(4,2)", stored_as="amount__v2")
BEFORE = make_table("orders", AMOUNT)


def altered(*columns: Column) -> Table:
    return replace(BEFORE, columns=(*BEFORE.columns[:2], *columns))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> RawLake:
    """A table that is live, with rows 1 and 2, whose `amount` is an integer."""
    raw = RawLake(tmp_path_factory.mktemp("filled"))
    raw.next_lsn()
    rows = [{"id": n, "amount": n, "note": "a"} for n in (1, 2)]
    place = {"_cdc_lsn": raw.lsn, "_cdc_seq": 0, "_cdc_op": "r"}
    raw.commit({BEFORE: [{**place, "_cdc_seq": -1, "_cdc_op": "t"}, *(place | r for r in rows)]})
    raw.record("live", BEFORE, snapshot_lsn=raw.lsn)
    return raw


@pytest.fixture
def lake(filled: RawLake, tmp_path: Path) -> RawLake:
    return filled.copied_to(tmp_path / "lake")


def current(lake: RawLake, *, merge_versions: bool = True) -> list[dict[str, object]]:
    table = ingestd.open_lake(str(lake.uri)).source("shop").table("public.orders")
    found = table.current(merge_versions=merge_versions).sort_by("id").to_pylist()
    return [{n: v for n, v in row.items() if n != "note"} for row in found]


def change(lake: RawLake, table: Table, **row: object) -> None:
    lake.commit({table: [{"_cdc_lsn": lake.next_lsn(), "_cdc_seq": 1, **row}]})


def test_a_column_of_another_type_is_one_column(lake: RawLake) -> None:
    """Values of the older type that the newest can't hold are texts."""
    newer = altered(NEWER)
    lake.record("live", newer, snapshot_lsn=110)
    change(lake, newer, id=3, amount__v2=Decimal("1.50"))
    change(lake, newer, id=2, _cdc_op="u", _cdc_unchanged=["amount__v2"], note="b")
    texts = {1: "1", 2: "2"}
    assert current(lake) == [
        {"id": n, "amount": None, "_cdc_raw": [("amount", text)]} for n, text in texts.items()
    ] + [{"id": 3, "amount": Decimal("1.50"), "_cdc_raw": None}]
    assert [row["amount"] for row in current(lake, merge_versions=False)] == [1, None, None]


def test_a_column_that_was_re_created_has_no_earlier_values(lake: RawLake) -> None:
    lake.record("live", altered(), snapshot_lsn=110)
    lake.next_lsn()
    again = altered(replace(AMOUNT, missing="7"))
    lake.record("live", again, snapshot_lsn=110)
    change(lake, again, id=3, amount=8)
    assert [row["amount"] for row in current(lake)] == [7, 7, 8]


def test_a_missing_value_may_be_a_text(lake: RawLake) -> None:
    added = Column("price", 1700, -1, pa.decimal128(4, 2), "numeric", missing="NaN")
    newer = altered(AMOUNT, added)
    lake.next_lsn()
    lake.record("live", newer, snapshot_lsn=110)
    change(lake, newer, id=2, _cdc_op="u", amount=3, price=Decimal("1.00"))
    assert current(lake) == [
        {"id": 1, "amount": 1, "price": None, "_cdc_raw": [("price", "NaN")]},
        {"id": 2, "amount": 3, "price": Decimal("1.00"), "_cdc_raw": None},
    ]


def test_markers_and_deletes_have_no_missing_values(lake: RawLake) -> None:
    """They are the rows of the raw table: a `d` has its key, a `t` nothing."""
    change(lake, BEFORE, id=1, _cdc_op="d")
    lake.record("live", altered(), snapshot_lsn=110)
    lake.next_lsn()
    lake.record("live", altered(replace(AMOUNT, missing="7")), snapshot_lsn=110)
    change(lake, BEFORE, id=9)
    table = ingestd.open_lake(str(lake.uri)).source("shop").table("public.orders")
    found = table.changes().read_all()
    rows = zip(*(found[name].to_pylist() for name in ("_cdc_op", "id", "amount")), strict=True)
    assert sorted(rows, key=str) == [
        ("c", 9, None),
        ("d", 1, None),
        ("r", 1, 7),
        ("r", 2, 7),
        ("t", None, None),
    ]
    assert table.history({"id": 1})["amount"].to_pylist() == [None, 7, None]


@pytest.mark.parametrize("merge_versions", [True, False])
def test_a_key_of_another_type_is_one_column(lake: RawLake, *, merge_versions: bool) -> None:
    newer_id = Column("id", 20, -1, pa.int64(), "bigint", identity=True, stored_as="id__v2")
    newer = replace(BEFORE, columns=(newer_id, *BEFORE.columns[1:]))
    lake.record("live", newer, snapshot_lsn=110)
    change(lake, newer, id__v2=2, amount=5, _cdc_op="u")
    change(lake, newer, id__v2=1 << 40, amount=6)
    found = current(lake, merge_versions=merge_versions)
    assert [(row["id"], row["amount"]) for row in found] == [(1, 1), (2, 5), (1 << 40, 6)]


KEYS = {
    "NaN": (pa.float64(), float("nan"), 1.0),
    "list": (pa.list_(pa.int32()), [1, 2], [1]),
    "text": (pa.string(), "", "a"),
    "decimal": (pa.decimal128(4, 2), Decimal("1.50"), Decimal("1.51")),
}


@pytest.mark.parametrize("name", KEYS)
def test_histories_of_keys_of_any_type(name: str, tmp_path: Path) -> None:
    kind, key, other = KEYS[name]
    column = Column("k", 0, -1, kind, "k", identity=True)
    columns = (column, *(replace(c, identity=False) for c in BEFORE.columns[:2]))
    table = replace(BEFORE, columns=columns, key=("k",), before=("k",))
    lake = RawLake(tmp_path / "lake")
    lake.record("live", table, snapshot_lsn=1)
    change(lake, table, k=key, id=1, note="a")
    change(lake, table, k=other, id=2, note="b")
    change(lake, table, k=key, id=3, _cdc_op="u", _cdc_unchanged=["note"])
    read = ingestd.open_lake(str(lake.uri)).source("shop").table("public.orders")
    found = read.history({"k": key})
    assert [found[n].to_pylist() for n in ("id", "note")] == [[1, 3], ["a", "a"]]
    assert read.history({"k": None}).num_rows == 0


@pytest.mark.attack("table owner")
def test_refuted_a_history_has_no_key_of_the_same_hash(tmp_path: Path) -> None:
    """Who may insert a row could add changes to the history of another one."""
    key, other = texts_of_one_hash()
    column = Column("k", 25, -1, pa.string(), "text", identity=True)
    columns = (column, *(replace(c, identity=False) for c in BEFORE.columns[:2]))
    table = replace(BEFORE, columns=columns, key=("k",), before=("k",))
    lake = RawLake(tmp_path / "lake")
    lake.record("live", table, snapshot_lsn=1)
    change(lake, table, k=key, id=1, note="a")
    change(lake, table, k=other, id=2, note="b")
    read = ingestd.open_lake(str(lake.uri)).source("shop").table("public.orders")
    assert read.history({"k": key})["id"].to_pylist() == [1]


def test_unsent_parts_of_a_key_are_in_the_old_row(tmp_path: Path) -> None:
    key = ("id", "part")
    part = Column("part", 25, -1, pa.string(), "text", identity=True)
    table = replace(make_table("orders", part), key=key, before=key)
    lake = RawLake(tmp_path / "lake")
    lake.record("live", table, snapshot_lsn=1)
    change(lake, table, id=1, part="long", note="a")
    old = {"id": 1, "part": "long"}
    unsent = {"_cdc_unchanged": ["part"], "_cdc_before": old}
    change(lake, table, _cdc_op="u", id=2, note="b", **unsent)
    assert current(lake) == [{"id": 2, "part": "long", "_cdc_raw": None}]


def test_entries_of_texts_are_renamed_and_dropped() -> None:
    raw = pa.array([None, [("b", "1"), ("a", "2")], [("c", "3")], []], RAW_TYPE)
    entries = TextEntries.from_column(raw.slice(1))
    found = entries.renamed({"a": "x", "b": "y"}.get).with_more("z", {2: "4"})
    assert found.to_column(3).to_pylist() == [[("x", "2"), ("y", "1")], None, [("z", "4")]]
    replaced = found.with_more("x", {0: "5"}).to_column(3)
    assert replaced.to_pylist() == [[("x", "5"), ("y", "1")], None, [("z", "4")]]
