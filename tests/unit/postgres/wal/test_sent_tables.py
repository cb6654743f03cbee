"""Which tables the slot sends completely (`ingestd.postgres.wal.slots.sent_tables`)."""

from __future__ import annotations

import itertools

import pytest

from ingestd.model.lake_state import LakeState, RegisteredTable, TableState
from ingestd.model.schema import Table, TableId
from ingestd.postgres.wal.slots.sent_tables import SentTables

A, B = (Table(TableId("public", name), oid, ()) for name, oid in (("a", 7), ("b", 8)))


def lake(a: TableState = TableState.LIVE) -> LakeState:
    states = {A: a, B: TableState.LIVE}
    return LakeState(
        tables={
            t.id: RegisteredTable(t.id, t.oid, 1, state, None, None) for t, state in states.items()
        }
    )


def given_up() -> tuple[SentTables, dict[TableId, int]]:
    kept: dict[TableId, int] = {}
    sent = SentTables(kept)
    sent.keep_live(lake())
    sent.publish([A, B])
    return sent, kept


def test_live_tables_are_sent_by_a_slot_that_is_moved() -> None:
    sent, kept = given_up()
    assert sent.has_all([A, B])
    assert SentTables(kept).has_all([A, B])  # the next attempt
    assert not SentTables({}).has_all([A])
    sent, kept = SentTables({}), {}
    sent.keep_live(lake(TableState.SNAPSHOTTING))
    sent.publish([A, B])
    assert sent.has_all([B])
    assert not sent.has_all([A])


@pytest.mark.parametrize("order", itertools.permutations(["compare", "discover", "compare again"]))
def test_an_interrupted_table_is_waited_for_in_any_order(order: tuple[str, ...]) -> None:
    kept: dict[TableId, int] = {}
    sent = SentTables(kept)
    for step in order:
        if step == "discover":
            sent.interrupt([A.id])
        else:
            sent.keep_live(lake())
    sent.publish([A, B])
    for each in (sent, SentTables(kept)):
        assert each.has_all([B])
        assert not each.has_all([A])


@pytest.mark.parametrize("published", [[B], [B, Table(A.id, 9, ())]])
def test_a_table_that_is_not_published_is_waited_for(published: list[Table]) -> None:
    """It is refused, locked, re-created or renamed; also when it returns."""
    sent, kept = given_up()
    sent.publish(published)
    sent.publish([A, B])
    for each in (sent, SentTables(kept)):
        assert each.has_all([B])
        assert not each.has_all([A])


def test_a_new_slot_waited_for_the_writers_of_its_tables() -> None:
    sent, kept = given_up()
    sent.interrupt([A.id])
    sent.publish([A], is_new=True)
    assert sent.has_all([A])
    assert not sent.has_all([B])
    assert not kept  # `_tables` need not have them
    sent.interrupt([A.id])
    assert not sent.has_all([A])
    sent.publish([A, B], is_new=True)
    sent.publish([A, B])
    assert not sent.has_all([A])
