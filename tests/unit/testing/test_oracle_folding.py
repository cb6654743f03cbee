from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ingestd.model.changes import change_schema
from ingestd.model.schema import Column, Table, TableId
from ingestd.testing.oracle.folding import fold
from ingestd.testing.oracle.schema_history import SchemaHistory

if TYPE_CHECKING:
    from collections.abc import Sequence

COLUMNS = ("id", "price", "body")
KEYED = Table(
    TableId("public", "t"),
    1,
    (
        Column("id", 23, -1, pa.int32(), identity=True),
        Column("price", 1700, -1, pa.decimal128(10, 2)),
        Column("body", 25, -1, pa.string()),
    ),
    key=("id",),
    before=("id",),
)
KEYLESS = Table(KEYED.id, 1, KEYED.columns, replica_identity="f", before=COLUMNS)


def raw(table: Table, changes: Sequence[tuple[str, int, int, dict[str, Any]]]) -> pa.Table:
    """(op, lsn, seq, values by column): a raw table without what the fold does not read."""
    rows = [{"_cdc_op": o, "_cdc_lsn": a, "_cdc_seq": s, **values} for o, a, s, values in changes]
    return pa.Table.from_pylist(rows, change_schema(table))


def row(identifier: int, price: str | None = None, body: str | None = None) -> dict[str, Any]:
    return {"id": identifier, "price": None if price is None else Decimal(price), "body": body}


def test_keyed_fold_takes_the_newest_row_in_any_arrival_order() -> None:
    found = fold(
        raw(
            KEYED,
            [
                ("u", 30, 1, row(1, "2.50", "new")),
                ("d", 30, 2, row(2)),
                ("t", 10, -1, {}),
                ("r", 10, 0, row(1, "1.00", "old")),
                ("r", 10, 0, row(2, "1.00", "old")),
                ("c", 5, 1, row(9, "1.00", "void")),
            ],
        ),
        COLUMNS,
        ["id"],
    )
    assert dict(found.rows) == {("1", "2.50", "new"): 1}
    assert (found.changes, found.repeated, found.faults) == (6, 0, [])


def test_key_change_takes_unsent_values_from_under_the_old_key() -> None:
    moved = {**row(7, "3.00"), "_cdc_before": {"id": 1}, "_cdc_unchanged": ["body"]}
    found = fold(
        raw(KEYED, [("c", 1, 1, row(1, "1.00", "large")), ("u", 2, 1, moved)]), COLUMNS, ["id"]
    )
    assert dict(found.rows) == {("7", "3.00", "large"): 1}
    assert not found.faults


def test_values_that_a_column_cannot_hold_come_from_raw() -> None:
    odd = {**row(1), "_cdc_raw": [("price", "NaN")]}
    found = fold(raw(KEYED, [("c", 1, 1, odd)]), COLUMNS, ["id"])
    assert dict(found.rows) == {("1", "NaN", None): 1}


def test_duplicate_and_lost_changes_are_found_behind_right_rows() -> None:
    doubled = [("c", 1, 1, row(1, "1.00", "a"))] * 2
    found = fold(raw(KEYED, doubled), COLUMNS, ["id"])
    assert found.repeated == 1
    assert "its key exists already" in found.faults[0]
    lost = fold(raw(KEYED, [("u", 2, 1, row(1, "1.00", "a"))]), COLUMNS, ["id"])
    assert "no row has its old key" in lost.faults[0]


def test_a_key_of_all_columns_is_a_key() -> None:
    """A row that is read after it was streamed is the same row."""
    twice = [("t", 1, -1, {}), ("c", 2, 1, row(1)), ("r", 3, 0, row(1))]
    found = fold(raw(KEYED, twice), ["id"], ["id"])
    assert dict(found.rows) == {("1",): 1}
    assert not found.faults


def test_multiset_fold_takes_one_equal_row_away() -> None:
    a = row(1, "1.00", "a")
    amended = {**row(1, "2.00"), "_cdc_before": a, "_cdc_unchanged": ["body"]}
    changes = [("c", 1, 1, a), ("c", 1, 2, a), ("c", 1, 3, a), ("d", 2, 1, a), ("u", 3, 1, amended)]
    found = fold(raw(KEYLESS, changes), COLUMNS, [])
    assert dict(found.rows) == {("1", "1.00", "a"): 1, ("1", "2.00", "a"): 1}
    assert not found.faults
    gone = fold(raw(KEYLESS, [*changes, ("d", 4, 1, row(5))]), COLUMNS, [])
    assert "no row equals its old row" in gone.faults[0]


def test_only_faults_of_a_truncate_in_the_snapshot_are_excused() -> None:
    changes = [
        ("t", 10, -1, {}),  # the snapshot at 10 was read after the truncate at 20: empty
        ("u", 15, 1, row(1, "1.00", "not there")),
        ("t", 20, 1, {}),
        ("u", 30, 1, row(2, "1.00", "not there either")),
        ("t", 40, 1, {}),
    ]
    found = fold(raw(KEYED, changes), COLUMNS, ["id"])
    assert found.faults == ["u at (30, 1): no row has its old key"]


def event(at_lsn: int, *columns: dict[str, Any], snapshot_lsn: int = 0) -> dict[str, Any]:
    """Make a row of `_tables`, as far as the fold reads it."""
    return {
        "table": "public.t",
        "state": "live",
        "snapshot_lsn": snapshot_lsn,
        "at": at_lsn,
        "at_lsn": at_lsn,
        "replica_identity": "d",
        "columns": [
            {"source_name": c["name"], "missing": None, "identity": c["name"] == "id", **c}
            for c in columns
        ],
    }


ID, BODY = {"name": "id"}, {"name": "body"}
PRICE_V2 = {"name": "price__v2", "source_name": "price"}


def evolved(*names: str) -> Table:
    columns = [Column(n, 25, -1, pa.string()) for n in names if n != "id"]
    return Table(KEYED.id, 1, (KEYED.columns[0], *columns), key=("id",), before=names)


def test_each_value_is_in_one_version_of_its_column() -> None:
    table = evolved("id", "price", "price__v2")
    history = SchemaHistory([event(0, ID, {"name": "price"}), event(20, ID, PRICE_V2)])
    changes: list[tuple[str, int, int, dict[str, Any]]] = [
        ("c", 10, 1, {"id": 1, "price": "old"}),
        ("c", 20, 1, {"id": 2, "price__v2": "new"}),
        ("c", 30, 1, {"id": 3, "_cdc_raw": [("price__v2", "odd")]}),
    ]
    found = fold(raw(table, changes), ["id", "price"], ["id"], history)
    assert found.faults == []
    assert set(found.rows) == {("1", "old"), ("2", "new"), ("3", "odd")}
    both = [("c", 30, 1, {"id": 3, "price": "a", "price__v2": "b"})]
    found = fold(raw(table, both), ["id", "price"], ["id"], history)
    assert found.faults == ["c at (30, 1): column price has 2 values"]


def test_changes_before_a_rows_chunk_is_read_are_no_faults() -> None:
    chunked: list[tuple[str, int, int, dict[str, Any]]] = [
        ("t", 10, -1, {}),
        ("d", 15, 1, row(1)),  # exists at 10, deleted when its chunk was read
        ("d", 25, 1, row(2)),
    ]
    nothing_read = [event(5, ID, snapshot_lsn=3), event(20, ID, snapshot_lsn=10)]
    found = fold(raw(KEYED, chunked), COLUMNS, ["id"], SchemaHistory(nothing_read))
    assert found.faults == ["d at (25, 1): no row has its old key"]
    read = [*chunked, ("r", 16, 0, row(3))]
    found = fold(raw(KEYED, read), COLUMNS, ["id"])
    assert found.faults == ["d at (25, 1): no row has its old key"]
    at_one_point = [*chunked, ("r", 10, 0, row(3))]
    found = fold(raw(KEYED, at_one_point), COLUMNS, ["id"], SchemaHistory(nothing_read))
    assert [fault[:10] for fault in found.faults] == ["d at (15, ", "d at (25, "]


def test_rows_from_before_a_column_have_what_is_missing() -> None:
    table = evolved("id", "body")
    with_default = {"name": "body", "missing": "five"}
    history = SchemaHistory([event(0, ID), event(20, ID, with_default)])
    changes: list[tuple[str, int, int, dict[str, Any]]] = [
        ("c", 10, 1, {"id": 1}),
        ("c", 20, 1, {"id": 2}),
        ("c", 20, 2, {"id": 3, "body": "x"}),
    ]
    found = fold(raw(table, changes), ["id", "body"], ["id"], history)
    assert set(found.rows) == {("1", "five"), ("2", None), ("3", "x")}


def test_values_of_a_dropped_column_do_not_reach_its_namesake() -> None:
    history = SchemaHistory([event(0, ID, BODY), event(15, ID), event(20, ID, BODY)])
    changes = [
        ("c", 10, 1, {"id": 1, "body": "the old one's"}),
        ("c", 20, 1, {"id": 2, "body": "x"}),
    ]
    found = fold(raw(evolved("id", "body"), changes), ["id", "body"], ["id"], history)
    assert set(found.rows) == {("1", None), ("2", "x")}


def test_old_rows_are_found_by_the_key_of_their_time() -> None:
    table = evolved("id", "code", "body")
    code = {"name": "code", "identity": True}
    history = SchemaHistory(
        [
            event(0, ID, {"name": "code"}, BODY),
            event(20, {"name": "id", "identity": False}, code, BODY),
        ]
    )
    changes: list[tuple[str, int, int, dict[str, Any]]] = [
        ("c", 10, 1, {"id": 1, "code": "a", "body": "x"}),
        ("c", 10, 2, {"id": 2, "code": "b", "body": "x"}),
        ("u", 10, 3, {"id": 1, "code": "c", "body": "y"}),
        ("d", 20, 1, {"id": 2}),  # in the transaction that moved the key, before that
        ("u", 20, 2, {"id": 9, "code": "c", "body": "z"}),
        ("d", 30, 1, {"code": "c"}),
        ("c", 30, 2, {"id": 9, "code": "d"}),
    ]
    found = fold(raw(table, changes), ["id", "code", "body"], ["code"], history)
    assert found.faults == []
    assert set(found.rows) == {("9", "d", None)}
