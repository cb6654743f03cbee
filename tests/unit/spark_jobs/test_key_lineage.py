from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_jobs.reconciling.key_lineage import START, KeyHashes, KeyMove, Position, lineages

KEYS = st.integers(0, 4)


def key(number: int) -> KeyHashes:
    return KeyHashes(number, -number)


def row_at(
    found: list[KeyMove], asked: KeyHashes, position: Position
) -> tuple[KeyHashes, Position]:
    """The lineages' result for a key at a position."""
    named = [
        (one.first, one.since)
        for one in lineages(found)
        if one.key == asked and one.start <= position and (one.end is None or position < one.end)
    ]
    assert len(named) <= 1
    return named[0] if named else (asked, START)


@pytest.mark.slow
@given(st.lists(st.tuples(KEYS, KEYS).filter(lambda pair: pair[0] != pair[1]), max_size=12))
def test_each_key_is_of_the_row_that_came_to_it_last(pairs: list[tuple[int, int]]) -> None:
    moves: list[KeyMove] = []
    holder: dict[int, tuple[KeyHashes, Position]] = {}
    for seq, (old, new) in enumerate(pairs, 1):
        position = (100 + seq // 3, seq)
        moves.append(KeyMove(key(old), key(new), position))
        holder[new] = holder.get(old, (key(old), START))
        holder[old] = (key(old), position)
        for number in range(5):
            assert row_at(moves, key(number), position) == holder.get(number, (key(number), START))
    if moves:
        end = (1000, 1)
        for number in range(5):
            assert row_at(moves, key(number), end) == holder.get(number, (key(number), START))
            assert row_at(moves, key(number), (99, 1)) == (key(number), START)


def test_a_key_that_was_left_has_another_row() -> None:
    moves = [KeyMove(key(1), key(2), (10, 1)), KeyMove(key(2), key(1), (20, 1))]
    assert row_at(moves, key(2), (15, 0)) == (key(1), START)
    assert row_at(moves, key(1), (15, 0)) == (key(1), (10, 1))
    assert row_at(moves, key(1), (20, 1)) == (key(1), START)
    assert row_at(moves, key(2), (20, 1)) == (key(2), (20, 1))
