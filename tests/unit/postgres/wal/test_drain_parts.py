from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ingestd.model.lsn import Lsn
from ingestd.postgres.wal.drain.backlog_parts import (
    LEAST_BYTES,
    MESSAGE_BYTES,
    MOST_JOINED,
    BacklogPart,
    PartQueue,
    cut,
)
from ingestd.postgres.wal.drain.drain import DrainPolicy

POSITIONS = st.integers(1, 1 << 60)
BYTES = st.integers(1, 1 << 40)


@given(POSITIONS, BYTES, st.integers(1, 16), st.integers(1, 1 << 40))
def test_exactly_once_the_parts_meet_and_cover_the_backlog(
    start: int, nbytes: int, slots: int, part_bytes: int
) -> None:
    part_bytes = max(part_bytes, nbytes // 100)
    parts = cut(Lsn(start), Lsn(start + nbytes), slots=slots, part_bytes=part_bytes)
    assert (parts[0].begin, parts[-1].end) == (start, start + nbytes)
    assert all(part.begin < part.end for part in parts)
    assert all(part.end == following.begin for part, following in pairwise(parts))
    assert all(part.end - part.begin <= part_bytes + 8192 for part in parts)


@given(POSITIONS, BYTES, st.sampled_from([1024, 2048, 8192, 16384, 65536]))
def test_no_part_ends_in_the_header_of_a_page(start: int, nbytes: int, page_bytes: int) -> None:
    parts = cut(Lsn(start), Lsn(start + nbytes), slots=3, part_bytes=max(1, nbytes // 50))
    assert all(40 < part.end % page_bytes < page_bytes for part in parts[:-1])


def test_a_small_backlog_is_one_part_a_larger_one_a_part_a_slot() -> None:
    def count(nbytes: int) -> int:
        return len(cut(Lsn(0), Lsn(nbytes), slots=2, part_bytes=1 << 30))

    assert [count(n) for n in (LEAST_BYTES, 2 * LEAST_BYTES, 1 << 30)] == [1, 2, 2]


@given(st.integers(2, 50))
def test_the_first_part_is_smaller_and_the_others_are_alike(count: int) -> None:
    def sizes(slots: int) -> list[int]:
        parts = cut(Lsn(0), Lsn(count << 30), slots=slots, part_bytes=1 << 30)
        return [part.end - part.begin for part in parts]

    first, *others = sizes(2)
    assert first * 100 // others[0] in {64, 65}
    assert max(others) - min(others) <= 8192
    assert max(sizes(1)) - min(sizes(1)) <= 8192


def test_what_is_not_behind_has_no_parts() -> None:
    assert cut(Lsn(8), Lsn(8), slots=2, part_bytes=1) == []
    assert cut(Lsn(9), Lsn(8), slots=2, part_bytes=1) == []


def test_after_a_pause_it_pays_again() -> None:
    now_s = 100.0
    policy = DrainPolicy(above_bytes=10, monotonic=lambda: now_s)
    assert policy.pays(11, 0)
    policy.pause(policy.pause_s)
    assert not policy.pays(11, 0)
    now_s += policy.pause_s
    assert policy.pays(11, 0)
    assert not policy.pays(10, 0)


def test_a_drain_must_not_reread_more_than_the_parts_have() -> None:
    reread, parts = 1 << 20, 8
    part_bytes = 3 * reread
    policy = DrainPolicy(10, part_bytes=part_bytes, reread_bytes=reread, reread_parts=parts)
    for behind_bytes, most_again_bytes in (
        (11, reread),
        (2 * reread, parts * 2 * reread),
        (100 * part_bytes, parts * part_bytes),
    ):
        assert policy.pays(behind_bytes, most_again_bytes)
        assert not policy.pays(behind_bytes, most_again_bytes + 1)


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 1000)), min_size=1, max_size=60),
)
def test_exactly_once_merged_parts_meet_and_cover_the_backlog(
    held: list[tuple[int, int]],
) -> None:
    """Also where one ends early, after its limit of messages."""
    parts = [BacklogPart(Lsn(1000 * n), Lsn(1000 * n + 1000)) for n in range(40)]
    waiting = PartQueue(parts, part_bytes=1000)
    taken: list[BacklogPart] = []
    rest: BacklogPart | None = None
    for nbytes, share in [*held, *[(0, 1000)] * 40]:
        part = rest or waiting.next_part()
        if part is None:
            break
        end = part.end
        if part.is_joined:
            end = Lsn(part.begin + max(1, (part.end - part.begin) * share // 1000))
        rest = part.after(end) if end < part.end else None
        taken.append(part.up_to(end))
        waiting.note_size(taken[-1], nbytes)
    assert (taken[0].begin, taken[-1].end) == (parts[0].begin, parts[-1].end)
    assert all(part.end == following.begin for part, following in pairwise(taken))
    assert max(part.end - part.begin for part in taken) <= MOST_JOINED * 1000
    assert waiting.next_part() is None


def test_parts_are_joined_while_they_hold_next_to_nothing() -> None:
    waiting = PartQueue(
        [BacklogPart(Lsn(100 * n), Lsn(100 * n + 100)) for n in range(30)], part_bytes=100
    )
    sizes = []
    for nbytes in (50, 0, 1, 2, 0, 400, 50):
        part = waiting.next_part()
        assert part is not None
        sizes.append((part.end - part.begin) // 100)
        waiting.note_size(part, nbytes)
    assert sizes == [1, 1, 2, 4, 4, 4, 1]


def test_joined_parts_end_with_as_many_messages_as_fill_one() -> None:
    """What the server keeps of them is bounded, whatever they hold."""
    parts = [BacklogPart(Lsn(100_000 * n), Lsn(100_000 * n + 100_000)) for n in range(8)]
    waiting = PartQueue(parts, part_bytes=100_000)
    first = waiting.next_part()
    assert first is not None
    assert first.most_messages == 0
    waiting.note_size(first, 0)
    joined = waiting.next_part()
    assert joined is not None
    assert joined.most_messages == 100_000 // MESSAGE_BYTES
    waiting.note_messages(10, 500)
    waiting.note_messages(30, 1500)
    waiting.note_size(joined, 0)
    larger = waiting.next_part()
    assert larger is not None
    assert larger.most_messages == 100_000 // 50


def test_merged_parts_are_limited_by_a_number_the_server_accepts() -> None:
    parts = [BacklogPart(Lsn(n << 50), Lsn((n + 1) << 50)) for n in range(8)]
    waiting = PartQueue(parts, part_bytes=1 << 50)
    waiting.note_size(parts[0], 0)
    joined = waiting.next_part()
    assert joined is not None
    assert joined.most_messages == (1 << 31) - 1
