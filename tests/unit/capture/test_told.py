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
    assert tables.by(SEEN).difference(TABLE, now.after(THEN)) == reason


def test_i6_a_column_that_came_and_went_is_a_former_one() -> None:
    told = Told()
    told.columns(TABLE, ["id", "n", "x"], XID, THEN)
    unseen = told.by(SEEN)
    assert unseen.has_news(TABLE, THEN)
    now = unseen.taken(TABLE, THEN)
    assert now.former == {digest("x")}
    told.forget(unseen, [now])
    told.columns(TABLE, ["id", "n", "x"], XID, now)  # when the stream is read anew
    assert not told.by(SEEN).has_news(TABLE, now)


def test_i7_what_a_look_can_not_see_yet_is_judged_later() -> None:
    told = Told()
    told.columns(TABLE, ["id", "n", "x"], XID, THEN)
    told.partition(LEAF, TABLE, XID)
    early = told.by(BEFORE)
    assert not early.has_news(TABLE, THEN)
    assert early.taken(TABLE, THEN) == THEN
    told.forget(early, [THEN])
    late = told.by(SEEN)
    now = stored("id", "n", "x", leaves=(LEAF,)).after(THEN)
    assert late.difference(TABLE, now) is None
    assert late.difference(TABLE, stored("id", "n", "y").after(THEN)) == RENAMED
    assert late.difference(TABLE, stored("id", "n")) == WENT


def test_i6_what_is_told_while_tables_are_looked_at_is_for_the_next_look() -> None:
    told = Told()
    told.columns(TABLE, ["id", "n", "x"], XID, THEN)
    unseen = told.by(SEEN)
    told.columns(TABLE, ["id", "n", "z"], XID, THEN)
    told.partition(LEAF, TABLE, XID)
    now = unseen.taken(TABLE, stored("id", "n", "x").after(THEN))
    told.forget(unseen, [now])
    later = stored("id", "n", "y").after(now)
    assert told.by(SEEN).difference(TABLE, later) == RENAMED
    assert told.by(SEEN).difference(TABLE, stored("id", "n")) == WENT


def test_i6_what_an_earlier_run_was_told() -> None:
    told = Told()
    told.recorded(TABLE, ["id", "n", "x"], THEN)
    unseen = told.by(SEEN)
    assert unseen.difference(TABLE, stored("id", "n", "x").after(THEN)) is None
    assert unseen.difference(TABLE, stored("id", "n", "y").after(THEN)) == RENAMED


def test_i6_a_partition_that_no_look_saw() -> None:
    told = Told()
    told.partition(LEAF, TABLE, XID)
    now, unseen = stored("id", "n", leaves=(LEAF + 1,)), told.by(SEEN)
    assert unseen.difference(TABLE, now) == WENT
    assert unseen.difference(TABLE + 1, now) is None
    told.forget(unseen, [now])
    told.partition(LEAF, TABLE, XID)  # when the stream is read anew
    assert not told.by(SEEN).has_news(TABLE, now)


@pytest.mark.parametrize("is_of_an_earlier_run", [True, False])
def test_i7_a_partition_that_a_look_saw_is_for_the_looks(*, is_of_an_earlier_run: bool) -> None:
    told, then = Told(), stored("id", "n", leaves=(LEAF,))
    if is_of_an_earlier_run:
        told.recorded(TABLE, ["id", "n"], then)
    else:
        told.forget(told.by(SEEN), [then])
    told.partition(LEAF, TABLE, XID)
    gone = replace(then, files={}, places={})
    assert told.by(SEEN).difference(TABLE, gone) is None
