"""What the stream told, held against what a look at the catalog found (I6, I7)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ingestd.capture.storage import Storage, StoredColumn, digest
from ingestd.capture.wal.told import Told
from ingestd.visibility import Visibility

TABLE, LEAF, XID = 16400, 16410, 800
SEEN, BEFORE = Visibility(810, 810), Visibility(790, 790)
RENAMED, WENT = "a column was renamed", "a partition was detached or dropped"


def stored(*names: str, leaves: tuple[int, ...] = ()) -> Storage:
    columns = tuple(
        StoredColumn(number, 23, -1, 700, has_missing=False, name=digest(name))
        for number, name in enumerate(names, start=1)
    )
    return Storage(columns, {o: o for o in leaves}, places=dict.fromkeys(leaves, ".1"))


THEN = stored("id", "n")


@pytest.mark.parametrize(
    ("told", "now", "reason"),
    [
        ([["id", "n", "x"]], stored("id", "n", "y"), RENAMED),
        ([["id", "n", "x"], ["id", "n", "y"]], stored("id", "n", "y"), RENAMED),
        ([["id", "n", "x"]], stored("id", "n", "x"), None),
        ([["id", "n", "x"], ["id", "n", "x", "y"]], stored("id", "n", "x", "y"), None),
        ([["id", "n", "x"]], stored("id", "n"), None),
        ([["id", "n"]], stored("id", "n", "y"), None),
    ],
    ids=["renamed", "told both", "added", "added both", "dropped", "told nothing"],
)
def test_i6_a_column_that_no_look_saw(
    told: list[list[str]], now: Storage, reason: str | None
) -> None:
    tables = Told()
    for names in told:
        tables.columns(TABLE, names, XID, THEN)
    assert tables.difference(TABLE, now.after(THEN), SEEN) == reason


def test_i6_a_column_that_came_and_went_is_a_former_one() -> None:
    told = Told()
    told.columns(TABLE, ["id", "n", "x"], XID, THEN)
    assert told.has_news(TABLE, THEN, SEEN)
    now = told.seen(TABLE, THEN, SEEN)
    assert now.former == {digest("x")}
    told.forget({TABLE: now}, SEEN)
    told.columns(TABLE, ["id", "n", "x"], XID, now)  # when the stream is read anew
    assert not told.has_news(TABLE, now, SEEN)


def test_i7_what_a_look_can_not_see_yet_is_judged_later() -> None:
    told = Told()
    told.columns(TABLE, ["id", "n", "x"], XID, THEN)
    told.partition(LEAF, TABLE, XID)
    assert not told.has_news(TABLE, THEN, BEFORE)
    assert told.seen(TABLE, THEN, BEFORE) == THEN
    told.forget({TABLE: THEN}, BEFORE)
    now = stored("id", "n", "x", leaves=(LEAF,)).after(THEN)
    assert told.difference(TABLE, now, SEEN) is None
    gone = stored("id", "n", "y").after(THEN)
    assert told.difference(TABLE, gone, SEEN) == RENAMED
    assert told.difference(TABLE, stored("id", "n"), SEEN) == WENT


def test_i6_what_an_earlier_run_was_told() -> None:
    told = Told()
    told.recorded(TABLE, ["id", "n", "x"], THEN)
    assert told.difference(TABLE, stored("id", "n", "x").after(THEN), SEEN) is None
    assert told.difference(TABLE, stored("id", "n", "y").after(THEN), SEEN) == RENAMED


def test_i6_a_partition_that_no_look_saw() -> None:
    told = Told()
    told.partition(LEAF, TABLE, XID)
    now = stored("id", "n", leaves=(LEAF + 1,))
    assert told.difference(TABLE, now, SEEN) == WENT
    assert told.difference(TABLE + 1, now, SEEN) is None
    told.forget({TABLE: now}, SEEN)
    told.partition(LEAF, TABLE, XID)  # when the stream is read anew
    assert not told.has_news(TABLE, now, SEEN)


@pytest.mark.parametrize("is_of_an_earlier_run", [True, False])
def test_i7_a_partition_that_a_look_saw_is_for_the_looks(*, is_of_an_earlier_run: bool) -> None:
    told, then = Told(), stored("id", "n", leaves=(LEAF,))
    if is_of_an_earlier_run:
        told.recorded(TABLE, ["id", "n"], then)
    else:
        told.forget({TABLE: then}, SEEN)
    told.partition(LEAF, TABLE, XID)
    gone = replace(then, files={}, places={})
    assert told.difference(TABLE, gone, SEEN) is None
