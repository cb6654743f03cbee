"""The life cycle of a table: each phase decides each trigger, and what a phase implies holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ingestd.model.lsn import Lsn
from ingestd.pipeline.table_state import TRANSITIONS, Phase, TrackedTable, Trigger
from tests.unit.pipeline.fixtures import A

BEING_READ = {Phase.READING, Phase.REREADING}
METHODS = {
    Trigger.NOT_LIVE: lambda table: table.expect_live(is_live=False),
    Trigger.REDEFINED: TrackedTable.redefine,
    Trigger.REQUESTED: lambda table: table.request(Lsn(10)),
    Trigger.CANCELLED: TrackedTable.cancel,
    Trigger.MISSED: lambda table: table.miss("gap"),
    Trigger.POSTPONED: TrackedTable.postpone,
    Trigger.BEGUN: lambda table: table.begin_snapshot(1, has_rows=True),
    Trigger.FAILED: TrackedTable.fail_snapshot,
    Trigger.ENDED: TrackedTable.end_snapshot,
    Trigger.STOPPED: TrackedTable.stop,
}


def test_each_phase_decides_each_trigger() -> None:
    assert set(TRANSITIONS) == set(Trigger) == set(METHODS)
    assert all(set(phases) == set(Phase) for phases in TRANSITIONS.values())


@given(st.lists(st.sampled_from(Trigger)))
def test_what_a_phase_implies_holds_after_any_triggers(triggers: list[Trigger]) -> None:
    table = TrackedTable(A)
    for trigger in triggers:
        if trigger is Trigger.CANCELLED and not table.snapshot.is_requested:
            continue  # TableSet refuses it
        before = table.phase
        METHODS[trigger](table)
        assert table.phase is TRANSITIONS[trigger][before]
        assert table.is_being_read == (table.phase in BEING_READ)
        if table.is_being_read and table.phase is Phase.READING:
            table.snapshot.remainder = "some"  # a split is durable
        if table.is_live or table.is_stopped:
            assert not table.recorded_progress
        if table.is_stopped:
            assert table.snapshot.point is None


@given(st.lists(st.sampled_from(Trigger)))
def test_i8_a_stopped_table_continues_if_redefined_or_requested(
    triggers: list[Trigger],
) -> None:
    table = TrackedTable(A)
    table.stop()
    for trigger in triggers:
        if trigger not in {Trigger.REDEFINED, Trigger.REQUESTED}:
            METHODS[trigger](table)
            assert table.is_stopped


@given(st.lists(st.sampled_from(Trigger)))
def test_i6_after_missed_changes_only_a_new_snapshot_is_live(
    triggers: list[Trigger],
) -> None:
    table = TrackedTable(A)
    table.request(Lsn(10))
    table.begin_snapshot(1, has_rows=True)
    table.miss("gap")
    begun = False
    for trigger in triggers:
        METHODS[trigger](table)
        begun |= trigger is Trigger.BEGUN
        if trigger is Trigger.CANCELLED:
            return  # refused by the TableSet: it was not live when it was requested
        assert begun or not table.is_live
