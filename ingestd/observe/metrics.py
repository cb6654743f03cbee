"""The metrics of design section 7, one method per event. One registry per daemon, no globals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from ingestd.model.lake_state import TableState
from ingestd.observe.freshness import FreshnessHistogram
from ingestd.observe.status import SourceState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import numpy as np
    from numpy.typing import NDArray
    from prometheus_client.metrics import MetricWrapperBase

    from ingestd.model.lsn import Lsn
    from ingestd.ports import CaptureLag

CONTENT_TYPE = CONTENT_TYPE_LATEST

_COMMIT_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """All metrics of one daemon. Bytes and seconds; LSNs as numbers; NaN where not known."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # resident memory, CPU, open files
        PlatformCollector(registry=self.registry)
        self._freshness = FreshnessHistogram()
        self.registry.register(self._freshness)
        self._by_source: list[tuple[MetricWrapperBase, tuple[str, ...]]] = []
        self._build_positions()
        self._build_counts()
        self._build_states()

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        made = Gauge(f"ingestd_{name}", what, ("source", *labels), registry=self.registry)
        self._by_source.append((made, ("source", *labels)))
        return made

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        made = Counter(f"ingestd_{name}", what, ("source", *labels), registry=self.registry)
        self._by_source.append((made, ("source", *labels)))
        return made

    def _build_positions(self) -> None:
        self._lag_bytes = self._gauge("lag_bytes", "WAL from the confirmed position to the end.")
        self._lag_seconds = self._gauge("lag_seconds", "Age of the oldest change not durable yet.")
        self._retained = self._gauge("slot_retained_bytes", "WAL that the slot retains.")
        self._safe = self._gauge("slot_safe_bytes", "WAL until the slot is in danger.")
        self._received = self._gauge("received_lsn", "Position up to which the source has sent.")
        self._confirmed = self._gauge("confirmed_lsn", "The source may discard WAL below this.")

    def _build_counts(self) -> None:
        self._rows = self._counter("rows", "Durable rows in raw tables.", "table", "op")
        self._transactions = self._counter("transactions", "Durable transactions.")
        self._replicated = self._counter(
            "replicated_transactions", "Durable transactions with a replication origin."
        )
        self._epochs = self._counter("epochs", "Durable epochs.")
        self._decode = self._counter("decode_seconds", "Time spent on decoding.")
        self._restarts = self._counter("restarts", "Restarts of a source after a fault.", "reason")
        self._raw = self._counter("raw_values", "Values kept as text in _cdc_raw.", "table")
        self._ignored = self._counter("ignored_messages", "Logical messages written by others.")
        self._joined = self._counter("joined_files", "Small files that maintenance joined.")
        self._removed = self._counter("removed_files", "Files that maintenance removed.")
        self._not_maintained = self._counter("maintenance_failures", "Failed maintenance runs.")
        self._commit = Histogram(
            "ingestd_epoch_commit_seconds",
            "Time from closing an epoch until it is durable.",
            ("source",),
            buckets=_COMMIT_BOUNDS,
            registry=self.registry,
        )
        self._by_source.append((self._commit, ("source",)))

    def _build_states(self) -> None:
        self._buffer = self._gauge("buffer_bytes", "Bytes received and not durable yet.")
        self._table_state = self._gauge("table_state", "1 for the current state.", "table", "state")
        self._source_state = self._gauge("source_state", "1 for the current state.", "state")
        self._lake_lost = self._gauge("lake_lost", "1 while the source waits for its lake.")
        self._progress = self._gauge("snapshot_progress_ratio", "Part of a table read.", "table")
        self._eta = self._gauge("snapshot_eta_seconds", "Time until a table is read.", "table")
        self._small = self._gauge("small_files", "Small files of a table.", "table")
        self._catalog_faults = self._gauge("catalog_faults", "Faults of the last registration.")

    # --- positions ---

    def lag(self, source: str, lag: CaptureLag, lag_seconds: float | None) -> None:
        """Set a measured lag; unknown values become NaN."""
        self._lag_bytes.labels(source).set(_known(lag.lag_bytes))
        self._lag_seconds.labels(source).set(_known(lag_seconds))
        self._retained.labels(source).set(_known(lag.retained_bytes))
        self._safe.labels(source).set(_known(lag.safe_bytes))

    def set_retained(self, source: str, lag: CaptureLag) -> None:
        """Set the lag of a source that reads nothing: the age of its changes is unknown.

        The age gets no series, so that no alert about delivery depends on it.
        """
        self.lag(source, lag, None)
        _remove(self._lag_seconds, source)

    def no_lag(self, source: str) -> None:
        """Remove the unknown lag. A NaN in its place would hide all of a query's window."""
        for gauge in (self._lag_bytes, self._lag_seconds, self._retained, self._safe):
            _remove(gauge, source)

    def received(self, source: str, position: Lsn) -> None:
        """Set the position up to which the source has sent."""
        self._received.labels(source).set(position)

    def confirmed(self, source: str, position: Lsn) -> None:
        """Set the position below which the source may discard."""
        self._confirmed.labels(source).set(position)

    # --- work done ---

    def rows(self, source: str, table: str, ops: Mapping[str, int]) -> None:
        """Count rows that became durable, per `_cdc_op`."""
        for op, count in ops.items():
            self._rows.labels(source, table, op).inc(count)

    def raw_values(self, source: str, table: str, count: int) -> None:
        """Count values that their column could not hold."""
        self._raw.labels(source, table).inc(count)

    def decoded(self, source: str, seconds: float) -> None:
        """Add time spent on decoding."""
        self._decode.labels(source).inc(seconds)

    def ignored(self, source: str, count: int) -> None:
        """Count logical messages that were not written by the event triggers."""
        if count:
            self._ignored.labels(source).inc(count)

    def buffered(self, source: str, nbytes: int) -> None:
        """Set the bytes received and not durable yet."""
        self._buffer.labels(source).set(nbytes)

    def committed(
        self,
        source: str,
        *,
        transactions: int,
        replicated: int = 0,
        commit_seconds: float,
        ages_s: NDArray[np.float64],
    ) -> None:
        """Count a durable epoch; `ages_s`: seconds since each transaction's commit.

        `replicated`: how many have a replication origin, and so no age: another server set their
        time.
        """
        self._epochs.labels(source).inc()
        self._transactions.labels(source).inc(transactions)
        self._replicated.labels(source).inc(replicated)
        self._commit.labels(source).observe(commit_seconds)
        self._freshness.observe(source, ages_s)

    def small_file_added(self, source: str, table: str) -> None:
        """Count a file that an epoch added as small, until maintenance has checked it."""
        self._small.labels(source, table).inc()

    def small_files(self, source: str, table: str, count: int) -> None:
        """Set how many files of a table are below a quarter of the target size."""
        self._small.labels(source, table).set(count)

    def maintained(
        self, source: str, *, joined_files: int, removed_files: int, has_failed: bool
    ) -> None:
        """Count the results of one maintenance run."""
        self._joined.labels(source).inc(joined_files)
        self._removed.labels(source).inc(removed_files)
        self._not_maintained.labels(source).inc(int(has_failed))

    # --- states ---

    def catalog_faults(self, source: str, count: int) -> None:
        """Set how many faults the last registration of a source in the catalog had."""
        self._catalog_faults.labels(source).set(count)

    def source_state(self, source: str, state: SourceState) -> None:
        """Set a source's state: 1 for it, 0 for all others."""
        for each in SourceState:
            self._source_state.labels(source, each.value).set(each is state)

    def lake_lost(self, source: str, *, is_lost: bool) -> None:
        """Set whether a source's lake is lost."""
        self._lake_lost.labels(source).set(is_lost)

    def forget_source(self, source: str) -> None:
        """Remove all series of a source that is no longer in the config."""
        for metric, names in self._by_source:
            self._forget(metric, names, lambda labels: labels.get("source") == source)
        self._freshness.drop_source(source)

    def _forget(
        self,
        metric: MetricWrapperBase,
        names: tuple[str, ...],
        is_chosen: Callable[[Mapping[str, str]], bool],
    ) -> None:
        samples = [sample for family in metric.collect() for sample in family.samples]
        own = [sample.labels for sample in samples if is_chosen(sample.labels)]
        for values in {tuple(labels[name] for name in names) for labels in own}:
            metric.remove(*values)

    def table_state(self, source: str, table: str, state: TableState) -> None:
        """Set a table's state: 1 for it, 0 for all others."""
        for each in TableState:
            self._table_state.labels(source, table, each.value).set(each is state)

    def forget_tables(self, source: str, tables: Collection[str]) -> None:
        """Remove the series of tables that are no longer captured."""
        for metric, names in self._by_source:
            if tables and "table" in names:
                self._forget(
                    metric,
                    names,
                    lambda labels: labels["source"] == source and labels["table"] in tables,
                )

    def snapshot_progress(
        self, source: str, table: str, ratio: float, eta_s: float | None = None
    ) -> None:
        """Set how much of a table's snapshot is read, 0 to 1 (by the server's estimate)."""
        self._progress.labels(source, table).set(min(max(ratio, 0.0), 1.0))
        self._eta.labels(source, table).set(_known(eta_s))

    def no_snapshot(self, source: str, table: str) -> None:
        """Remove the progress: no snapshot of the table is running."""
        _remove(self._progress, source, table)
        _remove(self._eta, source, table)

    def restarted(self, source: str, reason: str) -> None:
        """Count a restart after a fault; `reason` is a constant word."""
        self._restarts.labels(source, reason).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def _remove(gauge: Gauge, *labels: str) -> None:
    gauge.labels(*labels)  # older releases of the client refuse to remove a missing series
    gauge.remove(*labels)


def _known(value: float | None) -> float:
    return math.nan if value is None else float(value)
