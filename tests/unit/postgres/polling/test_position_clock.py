from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ingestd.model.lsn import Lsn
from ingestd.postgres.polling.position_clock import Positions


def test_on_an_idle_server_positions_grow_all_the_same() -> None:
    positions = Positions()
    assert [positions.next_position(Lsn(100)) for _ in range(3)] == [100, 101, 102]
    assert positions.end == 103
    assert positions.next_position(Lsn(500)) == 500


def test_an_empty_poll_releases_its_position_if_it_is_the_last() -> None:
    positions = Positions()
    first = positions.next_position(Lsn(100))
    positions.release_position(first)
    assert positions.next_position(Lsn(100)) == 100
    second = positions.next_position(Lsn(100))
    positions.release_position(Lsn(100))  # not the last one any more
    assert positions.next_position(Lsn(100)) == second + 1


def test_no_position_is_below_a_reported_one() -> None:
    positions = Positions()
    positions.begin_at(Lsn(700))
    assert positions.next_position(Lsn(100)) == 700
    positions.pass_by(Lsn(900))
    positions.pass_by(Lsn(800))
    assert positions.next_position(Lsn(100)) == 900
    positions.advance()
    assert positions.next_position(Lsn(100)) == 902


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "give_back", "pass_by", "begin_at", "move_on"]),
        st.integers(0, 50),
    )
)


@given(STEPS)
def test_positions_grow_strictly_and_stay_below_the_end(
    steps: list[tuple[str, int]],
) -> None:
    positions, kept = Positions(), list[Lsn]()
    for step, lsn in steps:
        end = positions.end
        if step == "take":
            taken = positions.next_position(Lsn(lsn))
            assert taken >= max(lsn, end)
            kept.append(taken)
        elif step == "give_back" and kept:
            positions.release_position(kept[-1])
            if positions.end == kept[-1]:
                kept.pop()
        elif step == "move_on":
            positions.advance()
        elif step in {"pass_by", "begin_at"}:
            getattr(positions, step)(Lsn(lsn))
        assert positions.end >= end or step == "give_back"
        assert all(a < b for a, b in pairwise(kept))
        assert not kept or kept[-1] < positions.end
