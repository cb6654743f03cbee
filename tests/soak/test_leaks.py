"""The leak soak in short: it measures what it claims to, and growth is not overlooked."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.soak.samples import Limits, Sample, Trend
from tests.soak.steady import DDL, Steady, steady_config
from tests.soak.storm import weather

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

FLAT = [
    Sample(60.0 * n, 1000 * n, 200.0 + n % 3, 150.0, 120.0, 20 + n % 4, 18, 19, 400_000, 0.1)
    for n in range(61)
]


def grown(change: Callable[[int, Sample], Sample]) -> list[str]:
    return Trend([change(n, one) for n, one in enumerate(FLAT)]).faults(Limits())


def test_what_goes_up_and_down_is_no_growth() -> None:
    assert grown(lambda _, one: one) == []
    assert grown(lambda n, one: replace(one, threads=57 if n % 10 == 0 else 18)) == []


def test_what_is_filled_at_first_is_no_growth() -> None:
    assert grown(lambda n, one: replace(one, rss_mb=100.0 + min(n, 12) * 10)) == []


def test_growth_is_found() -> None:
    [memory] = grown(lambda n, one: replace(one, rss_mb=one.rss_mb + n * 0.5))
    assert memory == "RSS grows by 30.1 MB/h; 20 are allowed"
    [files] = grown(lambda n, one: replace(one, descriptors=20 + n // 5))
    assert files == "6 descriptors were added; 5 are allowed"
    [tasks] = grown(lambda n, one: replace(one, tasks=19 + n))
    assert tasks.endswith("tasks were added; 5 are allowed")


def test_a_daemon_that_stands_still_is_found() -> None:
    [stalled] = grown(lambda n, one: replace(one, rows=one.rows - 1000 * (n == 30)))
    assert stalled == "no rows came from 29.0 to 30.0 min"


def test_too_few_samples_say_nothing() -> None:
    with pytest.raises(ValueError, match="too few"):
        Trend(FLAT[:4])


@pytest.mark.timeout(300)
def test_a_real_daemon_is_sampled_under_load(
    workload_database: Database, make_daemon: MakeDaemon, lake: Path, seed: int
) -> None:
    said: list[str] = []
    daemon = make_daemon(steady_config(workload_database, lake, max_delay="200ms"))
    steady = Steady(
        workload_database, lake, daemon, seed=seed, tell=said.append, ddl_s=0.1, scrape_s=0.5
    )
    samples = steady.run(4.0, 0.5)
    assert len(samples) == 9
    assert samples[-1].rows > samples[0].rows
    for one in samples:
        assert one.rss_mb > one.private_mb > 0
        assert min(one.descriptors, one.threads, one.tasks, one.blocks) > 0
    assert steady.scraped > 0
    assert steady.changed > 0
    assert steady.changed % len(DDL) == 0
    assert "tables equal" in said[-1]
    leaking = [replace(one, rss_mb=one.rss_mb + n) for n, one in enumerate(samples)]
    assert Trend(leaking).faults(Limits(rss_mb_per_hour=1000))[:1] != []


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_storm_stays_below_the_limit(database: Database, tmp_path: Path) -> None:
    found = weather(database, tmp_path, 20_000, 512)
    assert found.peak_mb < found.limit_mb
    assert found.faults > 0
    assert found.rows > 3 * 20_000
