"""Which tables are kept out for rows that can't be sent, and how often the slot passes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from ingestd.postgres.catalog.tables import TableRow
from ingestd.postgres.wal.slots.decode_gap import (
    AT_ONCE,
    DAY_S,
    FORGIVEN_A_DAY,
    HOUR_S,
    PAUSE_S,
    ROWS_OF_AN_OWNER,
    RowSuspects,
    SlotDecodeGap,
)

A, B = 101, 102
"""Two owners."""
MOST_AN_HOUR = 8
HOURS = 30


def row_of(oid: int, owner: int, name: str = "") -> TableRow:
    """Return a table's row in the catalog."""
    return TableRow(
        oid=oid,
        schema="public",
        name=name or f"t{oid}",
        persistence="p",
        replica_identity="d",
        reachable=True,
        readable=True,
        unreadable=(),
        owned=True,
        owner=owner,
        owner_name=f"role_{owner}",
        numbered=1,
        primary_key=(1,),
        identity_key=(1,),
    )


def named(*oids: int) -> dict[int, TableId]:
    return {oid: TableId("public", f"t{oid}") for oid in oids}


def certain(oid: int) -> RowSuspects:
    return RowSuspects(named(oid), is_certain=True)


@dataclass
class Source:
    """A decode gap, its clock, and the rows of the catalog; tables 1 to 9 are A's, others B's."""

    now_s: float = 0.0
    rows: list[TableRow] = field(
        default_factory=lambda: [row_of(oid, A if oid < 10 else B) for oid in range(1, 19)]
    )

    def __post_init__(self) -> None:
        self.gap = SlotDecodeGap(monotonic=lambda: self.now_s)
        self.gap.note_owners(self.rows)

    def pass_row(self, suspects: RowSuspects) -> bool:
        """Pass a row, if that is allowed; return whether it is."""
        if self.gap.wait_s(suspects) > 0:
            return False
        self.gap.undecodable = "a row"
        self.gap.keep_out(suspects, "why")
        self.gap.renewed(is_moved=True)
        return True

    def kept_out(self) -> list[int]:
        return [row.oid for row in self.rows if self.gap.table_error(row) is not None]


def test_failures_are_counted_at_one_row() -> None:
    gap = SlotDecodeGap()
    places = ("0/1", "0/1", "0/2", "0/1", "0/1", "0/1")
    assert [gap.fail(at, Lsn(7)) for at in places] == [1, 2, 1, 1, 2, 3]
    assert gap.failed_after == Lsn(7)
    gap.renewed()
    assert gap.failed_after is None
    assert gap.fail("0/1", Lsn(7)) == 1


def test_a_certain_row_keeps_its_table_out() -> None:
    source = Source()
    assert source.pass_row(certain(1))
    assert source.kept_out() == [1]
    error = source.gap.table_error(source.rows[0])
    assert error is not None
    assert "correct or delete the row" in (error.remedy or "")


def test_the_first_uncertain_row_in_an_hour_is_forgiven() -> None:
    source = Source()
    assert source.pass_row(RowSuspects(named(1, 2)))
    assert source.kept_out() == []
    assert source.pass_row(RowSuspects(named(2, 11)))
    assert source.kept_out() == [2, 11]
    error = source.gap.table_error(source.rows[1])
    assert error is not None
    assert "in one transaction with public.t11" in error.reason
    assert "ON public.t2 FROM <role>" in (error.remedy or "").replace('"', "")


def test_no_more_rows_are_forgiven_in_a_day() -> None:
    source = Source()
    for _ in range(FORGIVEN_A_DAY):
        assert source.pass_row(RowSuspects(named(1, 2)))
        assert source.kept_out() == []
        source.now_s += HOUR_S
    assert source.pass_row(RowSuspects(named(1, 2)))
    assert source.kept_out() == [1, 2]


def test_a_row_of_a_table_not_sent_stops_the_source_for_an_hour() -> None:
    source = Source()
    unknown = RowSuspects(named(1), is_complete=False)
    assert source.pass_row(unknown)
    assert not source.gap.can_keep_out(unknown)
    assert source.gap.wait_s(unknown) == HOUR_S
    assert source.kept_out() == []
    source.now_s = HOUR_S
    assert source.pass_row(unknown)


def test_an_owner_of_many_rows_is_kept_out_with_later_tables() -> None:
    source = Source()
    for oid in range(1, ROWS_OF_AN_OWNER + 1):
        assert source.kept_out() == list(range(1, oid))
        assert source.pass_row(certain(oid))
    assert source.kept_out() == list(range(1, 10))
    source.rows.append(row_of(99, A))
    source.gap.note_owners(source.rows)
    assert 99 in source.kept_out()
    error = source.gap.table_error(source.rows[-1])
    assert error is not None
    assert f"role_{A}" in error.reason


def test_an_owner_of_everything_is_not_kept_out() -> None:
    source = Source(rows=[row_of(oid, A) for oid in range(1, 20)])
    for oid in range(1, AT_ONCE + 1):
        assert source.pass_row(certain(oid))
    assert source.kept_out() == list(range(1, AT_ONCE + 1))
    assert source.gap.wait_s(certain(10)) == PAUSE_S
    assert source.gap.can_keep_out(certain(10))


def test_rows_of_two_owners_count_for_none() -> None:
    """Who may write a table of another owner can't have all tables of that owner stopped."""
    source = Source()
    for oid in range(1, AT_ONCE):
        assert source.pass_row(RowSuspects(named(oid, oid + 9)))
    assert source.kept_out() == [*range(2, AT_ONCE), *range(11, 9 + AT_ONCE)]


def test_old_rows_do_not_count_for_their_owner() -> None:
    source = Source()
    for oid in range(1, ROWS_OF_AN_OWNER + 2):
        assert source.pass_row(certain(oid))
        source.now_s += DAY_S / (ROWS_OF_AN_OWNER - 1)
    assert source.kept_out() == list(range(1, ROWS_OF_AN_OWNER + 2))


def test_a_dropped_table_counts_for_its_owner() -> None:
    source = Source()
    for oid in range(1, ROWS_OF_AN_OWNER + 1):
        source.rows.pop(0)
        source.gap.note_owners(source.rows)
        assert source.pass_row(certain(oid))
    assert source.kept_out() == list(range(ROWS_OF_AN_OWNER + 1, 10))


@pytest.mark.parametrize("owner", [A, B])
def test_only_its_owner_can_not_create_a_table_again(owner: int) -> None:
    source = Source()
    assert source.pass_row(certain(1))
    source.rows[0] = row_of(50, owner, "t1")
    source.gap.note_owners(source.rows)
    assert source.kept_out() == ([50] if owner == A else [])


def test_a_row_of_an_open_transaction_keeps_out_no_table() -> None:
    source = Source()
    assert source.pass_row(certain(1))
    for number in range(AT_ONCE - 1):
        assert source.pass_row(certain(1) if number % 2 else RowSuspects(named(1, 11)))
    assert source.gap.wait_s(certain(1)) == PAUSE_S
    assert source.gap.can_keep_out(certain(1))
    assert source.kept_out() == [1]


def test_a_table_that_is_still_sent_stops_the_source() -> None:
    """Where the slot was replaced, or the publication can't be altered."""
    source = Source()
    assert source.pass_row(certain(1))
    source.gap.renewed()
    assert not source.gap.can_keep_out(certain(1))
    assert source.gap.wait_s(certain(1)) == HOUR_S


def test_a_slot_made_for_other_reasons_does_not_count() -> None:
    gap = SlotDecodeGap(lacks_publication=True)
    gap.renewed()
    assert gap.why("p") is None
    assert gap.wait_s(RowSuspects({}, is_complete=False)) == 0


ROWS = st.tuples(
    st.lists(st.integers(1, 18), min_size=1, max_size=3, unique=True),
    st.booleans(),
    st.booleans(),
    st.floats(0, HOUR_S),
)
"""The tables of a transaction; whether it was open when its tables were kept out; whether the slot
is moved past its row; seconds after the last one."""


@given(st.lists(ROWS, max_size=60))
def test_who_commits_rows_stops_only_tables_they_may_write(
    committed: Sequence[tuple[list[int], bool, bool, float]],
) -> None:
    """They may write all tables of one owner, and those of the other owner that they did write."""
    source = Source()
    passed_s: list[float] = []
    may_write = set(range(1, 10))
    for oids, was_open, is_moved, later_s in committed:
        source.now_s += later_s
        kept_out = source.kept_out()
        sent = [oid for oid in oids if was_open or oid not in kept_out]
        if not set(sent) & set(range(1, 10)):
            continue
        may_write |= set(sent)
        suspects = RowSuspects(named(*sent), is_certain=len(sent) == 1)
        if source.pass_row(suspects):
            passed_s.append(source.now_s)
            if not is_moved:
                source.gap.renewed()
        assert source.gap.wait_s(suspects) <= HOUR_S
        assert set(source.kept_out()) <= may_write
    for at_s in passed_s:
        assert sum(at_s - HOUR_S < other <= at_s for other in passed_s) <= MOST_AN_HOUR


@given(st.lists(ROWS, max_size=200))
def test_an_owner_who_creates_tables_is_kept_out(
    committed: Sequence[tuple[list[int], bool, bool, float]],
) -> None:
    """Each row in new tables: all tables are re-read a few times, and the source never stops."""
    source = Source()
    passed = 0
    for number, (oids, _, _, later_s) in enumerate(committed):
        source.now_s += later_s
        created = [row_of(1000 + 3 * number + n, A) for n in range(len(oids))]
        source.rows += created
        source.gap.note_owners(source.rows)
        if any(source.gap.table_error(row) for row in created):
            continue
        names = named(*(row.oid for row in created))
        assert source.pass_row(RowSuspects(names, is_certain=len(names) == 1))
        passed += 1
    assert passed <= (FORGIVEN_A_DAY + ROWS_OF_AN_OWNER) * (1 + source.now_s // DAY_S)
    assert not set(source.kept_out()) & set(range(10, 19))
