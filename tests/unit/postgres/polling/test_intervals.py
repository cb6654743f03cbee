from __future__ import annotations

from itertools import pairwise

import pytest

from ingestd.postgres.polling.intervals import (
    JITTER,
    QUIETEST,
    WHOLE_LIMIT_S,
    WHOLE_SHARE,
    PollSchedule,
)

INTERVAL_S = 10.0


def turn(jitter: float = 0.0) -> PollSchedule:
    return PollSchedule(INTERVAL_S, 0.0, jitter=lambda: jitter)


def test_a_table_that_changes_is_polled_every_interval() -> None:
    one = turn()
    for now in (0.0, 50.0, 100.0):
        one.record_poll(now, found_rows=True, whole_s=None)
        assert one.due_at == now + INTERVAL_S


def test_a_quiet_table_is_polled_ever_less_up_to_the_limit() -> None:
    one, now, waits = turn(), 0.0, []
    for _ in range(20):
        one.record_poll(now, found_rows=False, whole_s=None)
        waits.append(one.due_at - now)
        now = one.due_at
    assert all(a <= b or b == INTERVAL_S * QUIETEST for a, b in pairwise(waits))
    assert waits[0] > INTERVAL_S
    assert waits[-1] == INTERVAL_S * QUIETEST
    one.record_poll(now, found_rows=True, whole_s=None)
    assert one.due_at == now + INTERVAL_S


@pytest.mark.parametrize("found", [True, False])
def test_jitter_only_makes_it_earlier(found: bool) -> None:  # noqa: FBT001
    late, early = turn(0.0), turn(1.0)
    for one in (late, early):
        one.record_poll(0.0, found_rows=found, whole_s=None)
    assert early.due_at == pytest.approx(late.due_at * (1 - JITTER))


def test_a_whole_look_is_made_as_often_as_it_is_cheap() -> None:
    one = turn()
    assert one.is_whole_due(0.0)
    one.record_poll(100.0, found_rows=False, whole_s=0.1)
    assert not one.is_whole_due(100.0 + 0.1 * WHOLE_SHARE - 0.01)
    assert one.is_whole_due(100.0 + 0.1 * WHOLE_SHARE)
    one.record_poll(130.0, found_rows=False, whole_s=None)
    assert one.is_whole_due(130.0)  # a near look puts it off by nothing
    one.record_poll(200.0, found_rows=False, whole_s=3600.0)
    assert not one.is_whole_due(200.0 + WHOLE_LIMIT_S - 1)
    assert one.is_whole_due(200.0 + WHOLE_LIMIT_S)


def test_a_request_during_a_poll_causes_another_poll() -> None:
    one = turn()
    one.record_poll(100.0, found_rows=True, whole_s=None)
    one.ask()
    assert one.due_at <= 100.0
    one.record_start()
    one.record_poll(101.0, found_rows=True, whole_s=None)
    assert one.due_at == 101.0 + INTERVAL_S
    one.record_start()
    one.ask()  # its snapshot may be older than what this is about
    one.record_poll(120.0, found_rows=True, whole_s=None)
    assert one.due_at == 120.0
    one.record_start()
    one.record_poll(121.0, found_rows=True, whole_s=None)
    assert one.due_at == 121.0 + INTERVAL_S


def test_a_failing_table_backs_off_until_a_poll_succeeds() -> None:
    one = turn()
    waits = []
    for number in range(1, 12):
        assert one.failed(100.0) == number
        waits.append(one.due_at - 100.0)
    assert waits[:4] == [1.0, 2.0, 4.0, 8.0]
    assert waits[-1] == INTERVAL_S * QUIETEST
    one.record_poll(200.0, found_rows=False, whole_s=None)
    assert one.failed(300.0) == 1
