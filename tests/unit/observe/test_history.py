"""The last hour of a source."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from ingestd.model.errors import TransientError
from ingestd.model.lsn import Lsn
from ingestd.observe.history import INTERVAL_S, POINTS_KEPT, SourceHistories, columns
from ingestd.observe.status import SourceState, SourceStatus
from ingestd.ports import CaptureLag

T0 = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def shop() -> SourceStatus:
    made = SourceStatus("shop", T0)
    made.enter(SourceState.STREAMING, T0)
    made.measured(CaptureLag(Lsn(90), Lsn(50), 40, 60, None), 0.25, T0)
    return made


def at(n: float) -> datetime:
    return T0 + timedelta(seconds=INTERVAL_S * n)


def commit(source: SourceStatus, rows: int, *ages_s: float) -> None:
    ages = np.array(ages_s)
    source.committed(
        1, Lsn(1), T0, transactions=len(ages), rows={"public.orders": rows}, ages_s=ages
    )


def test_a_point_has_what_happened_since_the_one_before(shop: SourceStatus) -> None:
    history = SourceHistories()
    commit(shop, 1000, 99.0)
    for n in range(3):
        if n:
            commit(shop, 50 * n, 1.0 * n, 3.0 * n)
        history.observe({"shop": shop}, at(n))
    history.observe({"shop": shop}, at(3))
    found = columns(history.of_source("shop").points)
    assert found["rows_per_s"] == [None, 5.0, 10.0, 0.0]
    assert found["freshness_p50"] == [None, 2.0, 4.0, None]
    assert (found["lag_bytes"][0], found["lag_seconds"][0]) == (40, 0.25)
    assert found["at"][1] == T0.timestamp() * 1000 + 10_000


def test_there_is_no_lag_while_it_is_not_measured(shop: SourceStatus) -> None:
    history = SourceHistories()
    history.observe({"shop": shop}, at(0))
    shop.enter(SourceState.BACKING_OFF, T0, TransientError("gone", reason="x"))
    history.observe({"shop": shop}, at(1))
    assert columns(history.of_source("shop").points)["lag_seconds"] == [0.25, None]


def test_a_clock_that_is_set_back_makes_no_rate(shop: SourceStatus) -> None:
    history = SourceHistories()
    history.observe({"shop": shop}, at(5))
    commit(shop, 10)
    history.observe({"shop": shop}, at(1))
    assert columns(history.of_source("shop").points)["rows_per_s"] == [None, None]


def test_bounded_an_hour_is_kept_and_no_more(shop: SourceStatus) -> None:
    history = SourceHistories()
    for n in range(POINTS_KEPT + 40):
        history.observe({"shop": shop}, at(n))
    past = history.of_source("shop")
    assert len(past.points) == POINTS_KEPT
    assert past.points[-1].at - past.points[0].at == timedelta(seconds=3600 - INTERVAL_S)
    assert [p.at for p in past.since(past.added - 2)] == [
        at(POINTS_KEPT + 38),
        at(POINTS_KEPT + 39),
    ]
    assert past.since(past.added) == []
    assert len(past.since(0)) == POINTS_KEPT
