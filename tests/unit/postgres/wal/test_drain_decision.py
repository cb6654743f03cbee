"""When a backlog is drained instead of streamed."""

from __future__ import annotations

from ingestd.model.lsn import Lsn
from ingestd.postgres.wal.drain.decision import LATE_CHECKS, DrainDecision
from ingestd.postgres.wal.drain.drain import DrainPolicy

ABOVE = 1000


def decision(flushed: int = 0, reread_bytes: int = 0) -> DrainDecision:
    policy = DrainPolicy(above_bytes=ABOVE, monotonic=lambda: 0.0)
    found = DrainDecision(policy)
    found.server_is_at(Lsn(flushed), reread_bytes, None)
    return found


def test_a_backlog_is_drained_above_the_limit() -> None:
    found = decision(flushed=5000)
    assert not found.pays_at(Lsn(5000 - ABOVE))
    assert found.pays_at(Lsn(5000 - ABOVE - 1))
    found.policy.pause(1.0)
    assert not found.pays_at(Lsn(0))


def test_the_server_is_never_taken_to_go_back() -> None:
    found = decision(flushed=5000)
    found.server_is_at(Lsn(10), 0, None)
    assert found.flushed == Lsn(5000)


def test_a_stream_ends_when_it_is_late_at_consecutive_checks() -> None:
    found = decision()
    found.begin_stream(Lsn(0))
    for checks in range(LATE_CHECKS):
        assert not found.ends_stream_at(Lsn(0)), checks
        found.server_is_at(Lsn(5000), 0, Lsn(0))
    assert found.ends_stream_at(Lsn(0))
    assert not found.ends_stream_at(Lsn(4500))  # it caught up meanwhile
    found.server_is_at(Lsn(5000), 0, Lsn(4500))
    assert not found.ends_stream_at(Lsn(0))


def test_a_reread_larger_than_the_backlog_streams_with_a_report() -> None:
    found = decision(flushed=5000, reread_bytes=1 << 50)
    assert not found.pays_at(Lsn(0))
    assert found.rereads_too_much_at(Lsn(0))
    assert not found.rereads_too_much_at(Lsn(5000 - ABOVE))


def test_what_a_stream_was_behind_is_passed_once() -> None:
    found = decision(flushed=5000)
    found.begin_stream(Lsn(4000))
    assert not found.has_passed_backlog(Lsn(4999))
    assert found.has_passed_backlog(Lsn(5000))
    assert not found.has_passed_backlog(Lsn(5001))
    found.begin_stream(Lsn(5000))
    assert not found.has_passed_backlog(Lsn(6000))
