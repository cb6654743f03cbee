"""The metrics' names and numbers are what dashboards and alerts rely on."""

from __future__ import annotations

import numpy as np
import pytest

from ingestd.model.lake_state import TableState
from ingestd.model.lsn import Lsn
from ingestd.observe.freshness import RecentFreshness
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import SourceState
from ingestd.ports import CaptureLag


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics()
    metrics.lag("shop", CaptureLag(Lsn(900), Lsn(500), 400, 700, None), 1.5)
    metrics.received("shop", Lsn(800))
    metrics.confirmed("shop", Lsn(500))
    metrics.rows("shop", "public.orders", {"c": 3, "u": 2})
    metrics.rows("shop", "public.orders", {"c": 1})
    metrics.raw_values("shop", "public.orders", 7)
    metrics.decoded("shop", 0.25)
    metrics.buffered("shop", 1024)
    ages = np.array([0.01, 0.05, 0.06, 1.2, 400.0, -3.0])
    metrics.committed("shop", transactions=6, commit_seconds=0.2, ages_s=ages)
    metrics.source_state("shop", SourceState.STARTING)
    metrics.source_state("shop", SourceState.STREAMING)
    metrics.table_state("shop", "public.orders", TableState.LIVE)
    metrics.snapshot_progress("shop", "public.orders", 1.7, 12.5)
    metrics.restarted("shop", "connection")
    metrics.small_files("shop", "public.orders", 3)
    metrics.small_file_added("shop", "public.orders")
    metrics.maintained("shop", joined_files=20, removed_files=5, has_failed=True)
    return metrics


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("ingestd_lag_bytes", {}, 400),
        ("ingestd_lag_seconds", {}, 1.5),
        ("ingestd_slot_retained_bytes", {}, 700),
        ("ingestd_received_lsn", {}, 800),
        ("ingestd_confirmed_lsn", {}, 500),
        ("ingestd_rows_total", {"table": "public.orders", "op": "c"}, 4),
        ("ingestd_rows_total", {"table": "public.orders", "op": "u"}, 2),
        ("ingestd_transactions_total", {}, 6),
        ("ingestd_epochs_total", {}, 1),
        ("ingestd_epoch_commit_seconds_count", {}, 1),
        ("ingestd_epoch_commit_seconds_bucket", {"le": "0.25"}, 1),
        ("ingestd_freshness_seconds_bucket", {"le": "0.05"}, 3),
        ("ingestd_freshness_seconds_bucket", {"le": "0.1"}, 4),
        ("ingestd_freshness_seconds_bucket", {"le": "1.3"}, 5),
        ("ingestd_freshness_seconds_bucket", {"le": "300"}, 5),
        ("ingestd_freshness_seconds_bucket", {"le": "+Inf"}, 6),
        ("ingestd_freshness_seconds_count", {}, 6),
        ("ingestd_freshness_seconds_sum", {}, 401.32),
        ("ingestd_decode_seconds_total", {}, 0.25),
        ("ingestd_buffer_bytes", {}, 1024),
        ("ingestd_table_state", {"table": "public.orders", "state": "live"}, 1),
        ("ingestd_table_state", {"table": "public.orders", "state": "stopped"}, 0),
        ("ingestd_source_state", {"state": "streaming"}, 1),
        ("ingestd_source_state", {"state": "starting"}, 0),
        ("ingestd_snapshot_progress_ratio", {"table": "public.orders"}, 1),
        ("ingestd_snapshot_eta_seconds", {"table": "public.orders"}, 12.5),
        ("ingestd_restarts_total", {"reason": "connection"}, 1),
        ("ingestd_raw_values_total", {"table": "public.orders"}, 7),
        ("ingestd_small_files", {"table": "public.orders"}, 4),
        ("ingestd_joined_files_total", {}, 20),
        ("ingestd_removed_files_total", {}, 5),
        ("ingestd_maintenance_failures_total", {}, 1),
    ],
)
def test_names_and_numbers(
    metrics: Metrics, name: str, labels: dict[str, str], value: float
) -> None:
    found = metrics.registry.get_sample_value(name, {"source": "shop", **labels})
    assert found == pytest.approx(value)


def test_what_is_not_known_is_not_zero(metrics: Metrics) -> None:
    found = metrics.registry.get_sample_value("ingestd_slot_safe_bytes", {"source": "shop"})
    assert found is not None
    assert np.isnan(found)


def test_text_has_memory_and_the_histogram(metrics: Metrics) -> None:
    text = metrics.text().decode()
    assert "process_resident_memory_bytes" in text
    assert 'ingestd_freshness_seconds_bucket{le="+Inf",source="shop"} 6.0' in text


def test_two_daemons_in_a_process_do_not_meet() -> None:
    first, second = Metrics(), Metrics()
    first.decoded("shop", 1)
    name, labels = "ingestd_decode_seconds_total", {"source": "shop"}
    assert first.registry.get_sample_value(name, labels) == 1
    assert second.registry.get_sample_value(name, labels) is None


def test_recent_freshness_forgets_the_old() -> None:
    recent = RecentFreshness()
    assert recent.quantile(0.5) is None
    recent.observe(np.array([1.0, 2.0, 3.0]))
    assert recent.quantile(0.5) == 2.0
    recent.observe(np.full(5000, 9.0))
    recent.observe(np.full(5000, 7.0))
    assert (recent.quantile(0.0), recent.quantile(1.0)) == (7.0, 9.0)
    recent.observe(np.full(20_000, 4.0))
    assert (recent.quantile(0.0), recent.quantile(1.0)) == (4.0, 4.0)


def test_a_table_has_exactly_one_state_and_none_once_forgotten(metrics: Metrics) -> None:
    def states() -> list[str]:
        samples = [s for m in metrics.registry.collect() for s in m.samples]
        return [
            s.labels["state"] for s in samples if s.name == "ingestd_table_state" and s.value == 1
        ]

    for state in TableState:
        metrics.table_state("shop", "public.orders", state)
        assert states() == [state]
    metrics.forget_tables("shop", {"public.orders", "public.never_seen"})
    assert states() == []
    metrics.forget_tables("shop", ())


def test_nothing_is_left_of_tables_that_are_forgotten(metrics: Metrics) -> None:
    def series() -> set[tuple[str, str, str]]:
        samples = [s for m in metrics.registry.collect() for s in m.samples]
        return {
            (s.name, s.labels["source"], s.labels["table"]) for s in samples if "table" in s.labels
        }

    def show(source: str, table: str) -> None:
        metrics.table_state(source, table, TableState.LIVE)
        metrics.rows(source, table, {"c": 1, "d": 2})
        metrics.raw_values(source, table, 3)
        metrics.small_files(source, table, 4)
        metrics.snapshot_progress(source, table, 0.5, 1.0)

    show("shop", "public.kept")
    show("other", "public.dropped")
    before = series()
    for name in ("public.dropped", "public.dropped2"):
        show("shop", name)
    metrics.forget_tables("shop", {"public.dropped", "public.dropped2"})
    assert series() == before
    assert {name for name, *_ in before} >= {"ingestd_rows_total", "ingestd_small_files"}


def test_progress_is_removed_when_no_snapshot_is_running(metrics: Metrics) -> None:
    labels = {"source": "shop", "table": "public.orders"}
    names = ["ingestd_snapshot_progress_ratio", "ingestd_snapshot_eta_seconds"]
    metrics.no_snapshot("shop", "public.orders")
    assert [metrics.registry.get_sample_value(n, labels) for n in names] == [None, None]


def test_the_time_left_is_not_zero_while_it_is_not_known(metrics: Metrics) -> None:
    metrics.snapshot_progress("shop", "public.orders", 0.0)
    labels = {"source": "shop", "table": "public.orders"}
    found = metrics.registry.get_sample_value("ingestd_snapshot_eta_seconds", labels)
    assert found is not None
    assert np.isnan(found)
