"""When a slot that can't pass a row is replaced (`ingestd.postgres.wal.slots.slot`)."""

from __future__ import annotations

from ingestd.postgres.wal.slots.slot import RENEW_PAUSE_S, SlotDecodeGap


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
