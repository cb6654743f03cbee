"""How far a snapshot is, and when it will be done."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from ingestd.observe.progress import SnapshotProgress

T0 = datetime(2026, 1, 2, tzinfo=UTC)


def after(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def test_nothing_is_promised_before_anything_is_read() -> None:
    progress = SnapshotProgress(T0)
    assert (progress.ratio, progress.eta_s, progress.total_bytes) == (0.0, None, None)
    progress.observe(0.0, 100, after(5))
    assert (progress.nbytes, progress.eta_s, progress.total_bytes) == (100, None, None)
    progress.observe(0.25, 0, after(5))  # at once: no speed yet
    assert (progress.eta_s, progress.total_bytes) == (None, None)


def test_a_steady_snapshot_ends_when_its_speed_says() -> None:
    progress = SnapshotProgress(T0)
    progress.observe(0.0, 0, after(0))
    for second in range(1, 11):
        progress.observe(second / 40, 1000, after(second))
    assert progress.nbytes == 10_000
    assert progress.total_bytes == 40_000
    assert progress.eta_s == pytest.approx(30.0)


def test_pages_between_two_ratios_are_counted() -> None:
    progress = SnapshotProgress(T0)
    for split in range(1, 5):
        for page in range(10):
            progress.observe((split - 1) / 10, 100, after(split + page / 10))
        progress.observe(split / 10, 0, after(split + 1))
    assert progress.nbytes == 4000
    assert progress.total_bytes == pytest.approx(10_000, rel=0.05)
    assert progress.eta_s == pytest.approx(6.0, rel=0.05)


def test_the_speed_is_that_of_the_last_while() -> None:
    progress = SnapshotProgress(T0)
    progress.observe(0.0, 0, after(0))
    progress.observe(0.5, 1000, after(1000))  # slow once: another 1000 s at this speed
    assert progress.eta_s == pytest.approx(1000.0)
    for second in range(1, 201):
        progress.observe(0.5 + second / 1000, 1, after(1000 + second))
    assert progress.ratio == pytest.approx(0.7)
    assert progress.eta_s == pytest.approx(300.0, rel=0.05)


def test_many_small_pages_are_remembered_in_little_room() -> None:
    progress = SnapshotProgress(T0)
    for page in range(1, 100_001):
        progress.observe(page / 200_000, 1, after(page / 1000))
    assert len(progress.samples) < 70
    assert progress.eta_s == pytest.approx(100.0, rel=0.05)


@pytest.mark.parametrize("first_page_bytes", [0, 10])
def test_what_an_earlier_daemon_had_read_is_not_taken_for_speed(first_page_bytes: int) -> None:
    progress = SnapshotProgress(T0)
    progress.observe(0.8, first_page_bytes, after(1))
    assert (progress.eta_s, progress.total_bytes) == (None, None)
    progress.observe(0.9, 100, after(11))
    assert (progress.nbytes, progress.total_bytes) == (100 + first_page_bytes, 1000)
    assert progress.eta_s == pytest.approx(10.0)


def test_a_snapshot_that_restarts_is_measured_from_its_restart() -> None:
    progress = SnapshotProgress(T0)
    progress.observe(0.0, 0, after(0))
    progress.observe(0.9, 900, after(9))
    progress.observe(0.1, 100, after(20))
    assert (progress.started_at, progress.nbytes) == (after(20), 100)
    assert (progress.total_bytes, progress.eta_s) == (None, None)
    progress.observe(0.2, 100, after(21))
    assert progress.total_bytes == 1000
    assert progress.eta_s == pytest.approx(8.0)


def test_an_estimate_that_wavers_is_no_new_beginning() -> None:
    progress = SnapshotProgress(T0)
    progress.observe(0.5, 500, after(5))
    progress.observe(0.45, 100, after(6))  # the table has grown
    assert (progress.started_at, progress.nbytes) == (T0, 600)
    assert (progress.eta_s, progress.total_bytes) == (None, None)


def test_the_ratio_stays_within_its_bounds() -> None:
    progress = SnapshotProgress(T0)
    progress.observe(0.0, 0, after(0))
    progress.observe(1.7, 10, after(1))
    assert (progress.ratio, progress.eta_s, progress.total_bytes) == (1.0, 0.0, 10)
    progress.observe(-1, 10, after(2))
    assert progress.ratio == 0.0
