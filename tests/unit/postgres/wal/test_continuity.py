"""The verdicts of `continuity` on a slot and a server: a gap is never silent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr

from ingestd.model.errors import OperatorError, TransientError
from ingestd.model.lake_state import LakeState, RegisteredTable, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from ingestd.ports import Fresh, LakeLost, Lost, Resumed
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.continuity import SlotContinuity, judge
from ingestd.postgres.wal.server import WalServer, parse_history
from ingestd.postgres.wal.slots.slot import Slot

ORDERS = TableId("public", "orders")
SETTINGS = WalSettings(
    kind="wal", dsn=SecretStr("host=h"), tables=["public.*"], slot="shop", publication="shop"
)
SERVER = WalServer(
    version=180000,
    version_text="18.0",
    wal_level="logical",
    in_recovery=False,
    database="shop",
    role="ingestd",
    may_replicate=True,
    may_create=True,
    system_identifier="7",
    timeline=1,
    max_slots=10,
    used_slots=1,
    max_senders=10,
    sender_timeout_s=60.0,
)
SLOT = Slot(
    plugin="pgoutput",
    slot_type="logical",
    database="shop",
    active_pid=None,
    confirmed="0/500",
    restart="0/400",
    wal_status="reserved",
    safe_bytes=None,
    retained_bytes=1,
    current="0/900",
    flushed="0/900",
    holder=None,
    invalid=None,
    failover=False,
    two_phase=False,
    read_transactions=0,
    keep_size="1GB",
    idle_timeout="1min",
)
FOUND = SlotContinuity(SERVER, Lsn(0x900), SLOT, has_publication=True, switched={})
PROMOTED = replace(FOUND, server=replace(SERVER, timeline=2), switched={1: Lsn(0x600)})


def lake(**changes: Any) -> LakeState:
    live = RegisteredTable(ORDERS, 1, 1, TableState.LIVE, None, Lsn(1))
    whole = LakeState(3, Lsn(0x500), {ORDERS: Lsn(0x480)}, {ORDERS: live}, "7/1")
    return replace(whole, **changes)


def reason(found: SlotContinuity, committed: LakeState) -> str:
    verdict = judge(found, SETTINGS, committed, where="source shop")
    assert isinstance(verdict, Lost), verdict
    return verdict.reason


def slot(**changes: Any) -> Slot:
    return replace(SLOT, **changes)


def test_an_intact_slot_is_resumed() -> None:
    for committed in (lake(), lake(position=Lsn(0x700)), lake(server_id=None)):
        assert judge(FOUND, SETTINGS, committed, where="x") == Resumed()


def test_a_lake_without_rows_that_count_is_fresh() -> None:
    other = replace(FOUND, slot=None, server=replace(SERVER, system_identifier="8", timeline=9))
    for committed in (LakeState(), lake(position=None), lake(tables={})):
        assert judge(other, SETTINGS, committed, where="x") == Fresh()


HALF = RegisteredTable(ORDERS, 1, 1, TableState.SNAPSHOTTING, None, Lsn(1), progress="0-9")
OTHER_SERVER = replace(FOUND, server=replace(SERVER, system_identifier="8"))


@pytest.mark.parametrize(
    ("found", "committed", "told"),
    [
        (FOUND, LakeState(), "was read to 0/500, and the lake has nothing of this source"),
        (FOUND, LakeState(lake_id="another"), "the lake has nothing of this source"),
        (replace(FOUND, has_publication=False), LakeState(), "nothing of this source"),
        (replace(FOUND, slot=slot(invalid="wal_removed")), LakeState(), "nothing of this source"),
        (replace(FOUND, slot=slot(confirmed="0/501")), lake(), "read to 0/501, and the lake ends"),
        (replace(FOUND, slot=slot(confirmed="0/501")), lake(tables={ORDERS: HALF}), "older copy"),
        (
            replace(FOUND, slot=slot(confirmed="0/501"), has_publication=False),
            lake(),
            "older copy",
        ),
        (replace(PROMOTED, slot=slot(confirmed="0/800")), lake(), "older copy"),
        (OTHER_SERVER, lake(), "another source's lake"),
    ],
)
@pytest.mark.parametrize("who", ["ours", "theirs, and read", "theirs, and never read"])
def test_a_lake_that_the_slot_was_not_read_into_is_lost(
    found: SlotContinuity, committed: LakeState, told: str, who: str
) -> None:
    """Of a slot that is not ours to make, only its statistics say that it was read."""
    settings = SETTINGS.model_copy(update={"manage": who == "ours"})
    assert found.slot is not None
    is_read = who == "theirs, and read"
    found = replace(found, slot=replace(found.slot, read_transactions=int(is_read)))
    verdict = judge(found, settings, committed, where="x")
    if who == "theirs, and never read":
        assert isinstance(verdict, Fresh if committed.has_nothing else Lost)
    else:
        assert isinstance(verdict, LakeLost)
        assert told in verdict.reason


@pytest.mark.parametrize(
    ("found", "committed", "who"),
    [
        (replace(FOUND, slot=None), LakeState(), "ours"),
        (FOUND, LakeState(server_id="7/1"), "ours"),  # a start that was cut short
        (FOUND, LakeState(), "theirs"),  # the slot is created by hand before the first start
        (FOUND, lake(tables={}), "ours"),
    ],
)
def test_a_first_start_is_no_lost_lake(
    found: SlotContinuity, committed: LakeState, who: str
) -> None:
    settings = SETTINGS.model_copy(update={"manage": who == "ours"})
    assert judge(found, settings, committed, where="x") == Fresh()


def test_a_snapshot_half_done_needs_continuity_as_well() -> None:
    assert "does not exist" in reason(replace(FOUND, slot=None), lake(tables={ORDERS: HALF}))


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (replace(FOUND, slot=None), "slot 'shop' does not exist"),
        (replace(FOUND, has_publication=False), "publication 'shop' does not exist"),
        (replace(FOUND, slot=slot(invalid="wal_removed")), "max_slot_wal_keep_size = 1GB"),
        (replace(FOUND, slot=slot(invalid="idle_timeout")), "slot_timeout = 1min"),
        (replace(FOUND, slot=slot(invalid="rows_removed")), "hot_standby_feedback"),
        (replace(FOUND, slot=slot(invalid="conflict")), "recovery conflicted"),
        (
            replace(FOUND, slot=slot(invalid="unfinished", restart=None)),
            "creation did not complete",
        ),
        (replace(FOUND, slot=slot(invalid="of_a_later_version")), "of_a_later_version"),
        (replace(OTHER_SERVER, slot=None), "is not the one that the"),
        (replace(OTHER_SERVER, slot=slot(invalid="wal_removed")), "is not the one that the"),
        (replace(FOUND, server=replace(SERVER, timeline=2)), "does not have the lake's timeline"),
        (replace(PROMOTED, slot=None), "it has no slot 'shop' (a standby with sync_repl"),
        (
            replace(PROMOTED, switched={1: Lsn(0x4FF)}, slot=slot(confirmed="0/4FF")),
            "never received",
        ),
        (
            replace(PROMOTED, server=replace(PROMOTED.server, version=150000, version_text="15.1")),
            "PostgreSQL 15.1 does not keep slots",
        ),
    ],
)
def test_every_loss_has_its_own_reason(found: SlotContinuity, told: str) -> None:
    assert told in reason(found, lake())


def test_a_promoted_standby_with_the_slot_is_resumed() -> None:
    assert judge(PROMOTED, SETTINGS, lake(), where="x") == Resumed()
    at_the_switch = replace(PROMOTED, switched={1: Lsn(0x500)})
    assert judge(at_the_switch, SETTINGS, lake(), where="x") == Resumed()


def test_a_table_ahead_of_the_position_counts_for_the_switch() -> None:
    """I4: after a crash between two tables' commits, one has rows above the lake's position."""
    ahead = lake(watermarks={ORDERS: Lsn(0x601)})
    assert "the lake ends at 0/601" in reason(PROMOTED, ahead)


def test_a_slot_already_read_on_the_new_timeline_is_resumed() -> None:
    """Promoted under the stream, which continued; the lake records that at a start only."""
    found = replace(PROMOTED, switched={1: Lsn(0x300)}, slot=slot(confirmed="0/480"))
    assert judge(found, SETTINGS, lake(), where="x") == Resumed()


def test_a_server_behind_the_lake_is_lost_and_must_catch_up() -> None:
    behind = replace(FOUND, current=Lsn(0x4FF), slot=None)
    for committed in (lake(), lake(server_id="8/1")):
        verdict = judge(behind, SETTINGS, committed, where="source shop")
        assert isinstance(verdict, Lost)
        assert verdict.is_behind
        assert "restored from an older backup" in verdict.reason
        assert "generate_series(1, 1)" in (verdict.remedy or "")
    with pytest.raises(OperatorError, match="restored from an older backup"):
        judge(behind, SETTINGS, lake(tables={}), where="source shop")
    standby = replace(behind, server=replace(SERVER, in_recovery=True))
    with pytest.raises(TransientError) as waits:
        judge(standby, SETTINGS, lake(), where="source shop")
    assert waits.value.reason == "standby_behind"


def test_a_slot_that_is_not_ours_is_no_loss() -> None:
    for theirs in (slot(plugin="test_decoding"), slot(database="other"), slot(slot_type="x")):
        with pytest.raises(OperatorError, match="ingestd needs a logical pgoutput slot"):
            judge(replace(FOUND, slot=theirs), SETTINGS, lake(), where="x")


def test_a_slot_of_two_phases_is_refused() -> None:
    """It sends prepared transactions as such, whatever is asked for."""
    early = replace(FOUND, slot=slot(two_phase=True))
    with pytest.raises(OperatorError, match="prepared transactions before they are committed"):
        judge(early, SETTINGS, lake(), where="x")


def test_a_history_file_names_each_timeline_it_came_from() -> None:
    text = "1\t0/3000060\tno recovery target specified\n\n# by hand\n2\t1A/0\tbefore 2026-01-01\n"
    assert parse_history(text) == {1: Lsn.parse("0/3000060"), 2: Lsn.parse("1A/0")}
    assert parse_history("") == {}
