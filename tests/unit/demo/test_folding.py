from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ingestd.changes import change_schema
from ingestd.demo.folding import fold
from ingestd.schema import Column, Table, TableId

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


def test_keyed_fold_takes_the_newest_row_whatever_the_order_of_arrival() -> None:
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


def test_doubled_and_lost_changes_are_found_though_the_rows_look_right() -> None:
    doubled = [("c", 1, 1, row(1, "1.00", "a"))] * 2
    found = fold(raw(KEYED, doubled), COLUMNS, ["id"])
    assert found.repeated == 1
    assert "its key is there already" in found.faults[0]
    lost = fold(raw(KEYED, [("u", 2, 1, row(1, "1.00", "a"))]), COLUMNS, ["id"])
    assert "no row has its old key" in lost.faults[0]


def test_multiset_fold_takes_one_equal_row_away() -> None:
    a = row(1, "1.00", "a")
    amended = {**row(1, "2.00"), "_cdc_before": a, "_cdc_unchanged": ["body"]}
    changes = [("c", 1, 1, a), ("c", 1, 2, a), ("c", 1, 3, a), ("d", 2, 1, a), ("u", 3, 1, amended)]
    found = fold(raw(KEYLESS, changes), COLUMNS, [])
    assert dict(found.rows) == {("1", "1.00", "a"): 1, ("1", "2.00", "a"): 1}
    assert not found.faults
    gone = fold(raw(KEYLESS, [*changes, ("d", 4, 1, row(5))]), COLUMNS, [])
    assert "no row equals its old row" in gone.faults[0]


def test_only_what_a_truncate_during_the_snapshot_explains_is_excused() -> None:
    changes = [
        ("t", 10, -1, {}),  # the snapshot at 10 was read after the truncate at 20: empty
        ("u", 15, 1, row(1, "1.00", "not there")),
        ("t", 20, 1, {}),
        ("u", 30, 1, row(2, "1.00", "not there either")),
        ("t", 40, 1, {}),
    ]
    found = fold(raw(KEYED, changes), COLUMNS, ["id"])
    assert found.faults == ["u at (30, 1): no row has its old key"]
