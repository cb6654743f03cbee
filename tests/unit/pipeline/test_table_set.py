"""What a pipeline decides about its tables, while one of them is read."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from ingestd.model.lake_state import LakeState, TableState, registered
from ingestd.model.lsn import Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.schema import Column
from ingestd.pipeline.table_set import TableSet
from ingestd.ports import Discovery
from tests.unit.pipeline.fixtures import A

if TYPE_CHECKING:
    from ingestd.model.schema import TableId

AT = datetime(2024, 5, 6, tzinfo=UTC)
FOUND = Discovery((A,), (), "server", lsn=Lsn(50))


def live_book() -> TableSet:
    """A book of one table that is live, with its snapshot at 10."""
    first = TableSet(LakeState(position=Lsn(40)))
    first.update(FOUND)
    loads = first.begin_snapshot([A])
    first.record_point([A], Lsn(10))
    first.end_snapshots(loads.values())
    return after_restart(first, TableState.LIVE)


def after_restart(book: TableSet, state: TableState) -> TableSet:
    """A book that has only what `_tables` and the lake have."""
    [event] = book.events([A], state, AT, Lsn(20))
    known = {A.id: registered(event, book.known.get(A.id))}
    again = TableSet(LakeState(position=Lsn(40), tables=known, watermarks={A.id: Lsn(40)}))
    again.update(FOUND)
    return again


def asked(book: TableSet) -> dict[TableId, int]:
    book.request([A.id])
    loads = book.begin_snapshot(book.to_read())
    book.record_point([A], Lsn(60))
    return loads


def test_the_reason_of_a_resnapshot_is_recorded_until_its_end() -> None:
    book = live_book()
    book.update(replace(FOUND, interrupted={A.id: "gap"}))
    [event] = book.events([A], TableState.SNAPSHOTTING, AT, Lsn(50))
    assert event.reason == "gap"
    loads = asked(book)
    book.update(replace(FOUND, rewritten={A.id: "another gap"}))
    book.end_snapshots(loads.values())
    assert book.cause(A.id) == "another gap"
    book.end_snapshots(book.begin_snapshot([A]).values())
    [event] = book.events([A], TableState.LIVE, AT, Lsn(60))
    assert event.reason is book.cause(A.id) is None


def test_the_reason_of_a_resnapshot_survives_a_restart() -> None:
    book = live_book()
    book.update(replace(FOUND, interrupted={A.id: "gap"}))
    again = after_restart(book, TableState.SNAPSHOTTING)
    assert again.cause(A.id) == "gap"
    asked(again)
    [event] = again.events([A], TableState.SNAPSHOTTING, AT, Lsn(50))
    assert event.reason == "gap"


def test_a_table_that_was_never_read_has_no_resnapshot_reason() -> None:
    book = TableSet(LakeState())
    book.update(replace(FOUND, interrupted={A.id: "gap"}))
    assert book.to_read() == [A]
    assert book.cause(A.id) is None


def test_i6_what_a_reading_leaves_is_void_after_a_gap() -> None:
    book = live_book()
    loads = asked(book)
    assert book.record_progress(A.id, loads[A.id], "left 1") is not None
    book.update(replace(FOUND, interrupted={A.id: "gap"}))
    assert book.record_progress(A.id, loads[A.id], "left 2") is None
    assert book.to_read() == [A]
    assert not book.remainder(A.id)
    assert book.is_new(A.id)


def test_i6_left_out_rows_are_recorded_where_progress_was_kept() -> None:
    book = live_book()
    loads = asked(book)
    book.record_progress(A.id, loads[A.id], "left 1")
    assert book.interrupt(A.id) == A
    [event] = book.events([A], TableState.SNAPSHOTTING, AT, Lsn(70))
    assert not event.progress
    book.end_snapshots(loads.values())
    assert book.is_new(A.id)
    assert book.cancel([A.id]) == ([], [A.id])


def test_i6_stream_evidence_is_recorded_until_a_discovery() -> None:
    book, doubts = live_book(), {A.id: "doubted"}
    [event] = book.doubt_events(doubts, AT, Lsn(45))
    assert (event.state, event.table.fingerprint) == (TableState.LIVE, "doubted")
    book.record_events([event])
    assert not book.doubt_events(doubts, AT, Lsn(46))
    book.update(replace(FOUND, doubts=doubts))  # it did not see that transaction
    assert not book.discovery_events(AT, Lsn(50))
    book.update(FOUND)
    [event] = book.discovery_events(AT, Lsn(50))
    assert event.table.fingerprint == A.fingerprint


def test_i7_stream_evidence_adds_no_columns_it_has_not_reached() -> None:
    """Else the older rows would seem to lack a column, and the next ones to have it again."""
    book = live_book()
    wider = replace(A, columns=(*A.columns, Column("x", 23, -1, pa.int32(), "integer")))
    book.update(replace(FOUND, tables=(wider,)))
    [event] = book.doubt_events({A.id: "doubted"}, AT, Lsn(45))
    book.record_events([event])
    assert not book.is_new_version(A)
    book.record_change(A.id, Lsn(46))
    assert book.is_new_version(wider)
    assert not book.is_ambiguous(wider, Lsn(47), 7)


def test_a_complete_table_stays_so_if_its_snapshot_is_cancelled() -> None:
    book = live_book()
    asked(book)
    assert book.cancel([A.id]) == ([A], [])
    [event] = book.events([A], TableState.LIVE, AT, Lsn(70))
    assert event.snapshot_lsn == Lsn(10)


def test_a_second_request_cancelled_leaves_the_first_snapshot() -> None:
    book = live_book()
    loads = asked(book)
    book.request([A.id])
    book.end_snapshots(loads.values())
    assert book.cancel([A.id]) == ([A], [])
    [event] = book.events([A], TableState.LIVE, AT, Lsn(70))
    assert event.snapshot_lsn == Lsn(60)


def test_what_was_asked_for_may_be_cancelled_after_a_restart() -> None:
    book = live_book()
    loads = asked(book)
    book.record_progress(A.id, loads[A.id], "left 1")
    again = after_restart(book, TableState.SNAPSHOTTING)
    assert again.remainder(A.id) == "left 1"
    assert again.has_marker_last(A.id)
    assert again.cancel([A.id]) == ([A], [])


def test_an_incomplete_table_stops_if_its_snapshot_is_cancelled() -> None:
    book = TableSet(LakeState())
    book.update(FOUND)
    book.begin_snapshot([A])
    assert book.cancel([A.id]) == ([], [A.id])


def test_a_resumed_first_snapshot_has_its_marker_already() -> None:
    book = TableSet(LakeState())
    book.update(FOUND)
    loads = book.begin_snapshot([A])
    assert book.has_marker_first(A.id)
    book.record_progress(A.id, loads[A.id], "left 1")
    again = after_restart(book, TableState.SNAPSHOTTING)
    again.begin_snapshot([A])
    assert not again.has_marker_first(A.id)
    assert not again.has_marker_last(A.id)


NEWER = replace(A, columns=(*A.columns, Column("x", 23, -1, pa.int32(), "integer")))


def told_by(xid: int) -> TableSet:
    """A live book to which the stream has reported `NEWER`, by a commit at 45."""
    book = live_book()
    assert book.is_new_version(NEWER)
    assert not book.is_ambiguous(NEWER, Lsn(45), xid)
    book.record_events(book.events([NEWER], TableState.LIVE, AT, Lsn(45)))
    return book


def test_i6_a_discovery_that_does_not_see_the_xid_is_older() -> None:
    book = told_by(700)
    book.update(replace(FOUND, seen=PgSnapshot(700, 701, frozenset({700}))))
    assert book.latest([A]) == [NEWER]
    assert book.discovery_events(AT, Lsn(50)) == []
    # Without the column, by a later transaction.
    book.update(replace(FOUND, lsn=Lsn(60), seen=PgSnapshot(702, 702)))
    assert book.latest([A]) == [A]
    assert [event.table for event in book.discovery_events(AT, Lsn(60))] == [A]


def test_a_long_past_xid_is_not_taken_for_a_future_one() -> None:
    book = told_by(700)
    book.update(replace(FOUND, seen=PgSnapshot(702, 702)))
    book.update(replace(FOUND, seen=PgSnapshot((1 << 31) + 800, (1 << 31) + 800)))
    assert book.latest([A]) == [A]


def test_i6_names_that_stand_in_another_order_have_other_values() -> None:
    """Two columns had their names swapped, and perhaps back again, before a catalog poll."""
    first, second = NEWER.columns[-1], replace(NEWER.columns[-1], name="y")
    book = live_book()
    both = replace(A, columns=(*A.columns, first, second))
    assert book.is_new_version(both)
    assert not book.is_ambiguous(both, Lsn(45), 700)
    book.record_events(book.events([both], TableState.LIVE, AT, Lsn(45)))
    swapped = replace(A, columns=(*A.columns, second, first))
    assert book.is_new_version(swapped)
    assert book.is_ambiguous(swapped, Lsn(46), 701)
    assert [table.id for table in book.to_read()] == [A.id]


def test_i6_rows_that_are_ambiguous_are_read_from_the_start() -> None:
    book = live_book()
    loads = asked(book)
    assert book.record_progress(A.id, loads[A.id], "left 1") is not None
    book.record_change(A.id, Lsn(45))
    defaulted = replace(NEWER, columns=(*A.columns, replace(NEWER.columns[-1], missing="5")))
    assert book.is_new_version(defaulted)
    assert book.is_ambiguous(defaulted, Lsn(45), 700)
    assert book.record_progress(A.id, loads[A.id], "left 2") is None
    assert not book.remainder(A.id)
    book.end_snapshots(loads.values())
    assert book.to_read() == [A]
    # Nor is it complete when the request is cancelled.
    assert book.cancel([A.id]) == ([], [A.id])


def test_i2_a_table_is_dropped_when_the_stream_has_reached_that() -> None:
    """Until then its last changes are accepted, whatever has its name now."""
    book = live_book()
    dropped = frozenset({(A.oid, A.id)})
    book.update(replace(FOUND, tables=(), lsn=Lsn(90), dropped=dropped))
    assert book.removal_events(AT, Lsn(60)) == book.discovery_events(AT, Lsn(89)) == []
    assert book.accepts_changes(A)
    assert book.is_later_version(NEWER)
    assert not book.is_later_version(A)
    [event] = book.discovery_events(AT, Lsn(90))
    assert (event.state, event.at_lsn) == (TableState.DROPPED, Lsn(90))
    book.record_events([event])
    assert book.removal_events(AT, Lsn(100)) == book.discovery_events(AT, Lsn(100)) == []
    assert book.accepts_changes(A), "this may be the next run, and what came is not durable"

    successor = replace(A, oid=A.oid + 1)
    book.update(replace(FOUND, tables=(successor,), lsn=Lsn(110), dropped=dropped))
    assert book.has_successor(A)
    assert not book.has_successor(successor)
    assert not book.is_later_version(NEWER)
    book.record_events(book.events([successor], TableState.SNAPSHOTTING, AT, Lsn(110)))
    [earlier] = book.known[A.id].earlier
    assert (earlier.oid, earlier.state) == (A.oid, TableState.DROPPED)
