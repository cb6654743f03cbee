"""When a slot that can't pass a row is replaced (`ingestd.postgres.wal.slots.slot`)."""

from __future__ import annotations

from ingestd.model.schema import TableId
from ingestd.postgres.wal.slots.slot import MOST_RENEWALS, RENEW_PAUSE_S, SlotDecodeGap


def test_failures_are_counted_at_one_row() -> None:
    gap = SlotDecodeGap()
    assert [gap.fail(at) for at in ("0/1", "0/1", "0/2", "0/1", "0/1", "0/1")] == [1, 2, 1, 1, 2, 3]
    gap.renewed()
    assert gap.fail("0/1") == 1


def test_a_slot_is_replaced_once_for_each_table() -> None:
    now = [0.0]
    gap = SlotDecodeGap(monotonic=lambda: now[0])
    nothing = frozenset[int]()
    assert gap.may_renew(nothing)
    gap.undecodable = "a row"
    gap.renewed()
    assert gap.why("p") is None
    assert not gap.may_renew(nothing)
    assert gap.may_renew({7})
    gap.unsendable[7] = "a row"
    gap.undecodable = "another row"
    gap.renewed()
    assert not gap.may_renew({7, 8})  # still sent, against the publication
    assert gap.may_renew({8})
    now[0] = RENEW_PAUSE_S
    assert gap.may_renew(nothing)


def test_a_slot_made_for_other_reasons_does_not_count() -> None:
    gap = SlotDecodeGap(lacks_publication=True)
    gap.renewed()
    assert gap.why("p") is None
    assert gap.may_renew(frozenset())


def test_a_table_in_the_place_of_another_is_no_news() -> None:
    name = TableId("public", "big")
    gap = SlotDecodeGap(unsendable=dict.fromkeys((7, name), "a row"), undecodable="a row")
    gap.renewed()
    assert not gap.may_renew({8, name})
    assert gap.may_renew({8, TableId("public", "other")})


def test_new_tables_do_not_replace_the_slot_without_end() -> None:
    now = [0.0]
    gap = SlotDecodeGap(monotonic=lambda: now[0])
    allowed = []
    for oid in range(2 * MOST_RENEWALS):
        allowed.append(gap.may_renew({oid}))
        if allowed[-1]:
            gap.undecodable = gap.unsendable[oid] = "a row"
            gap.renewed()
        now[0] += 1
    assert allowed == [True] * MOST_RENEWALS + [False] * MOST_RENEWALS
    now[0] = RENEW_PAUSE_S
    assert gap.may_renew({100})


def test_a_moved_slot_may_pass_another_row_of_the_table() -> None:
    gap = SlotDecodeGap(unsendable={7: "a row"}, undecodable="a row")
    gap.renewed(is_moved=True)
    assert gap.may_renew({7})
    gap.undecodable = "a row"
    gap.renewed()
    assert not gap.may_renew({7})
