"""The daemon's status."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from ingestd.model.errors import OperatorError, TableError
from ingestd.model.lake_state import TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from ingestd.observe.status import (
    DaemonStatus,
    SnapshotOutcome,
    SourceState,
    SourceStatus,
    ready,
)
from ingestd.observe.status_json import to_json
from ingestd.ports import CaptureLag

T0 = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LATER = T0 + timedelta(minutes=1)


@pytest.fixture
def status() -> DaemonStatus:
    shop = SourceStatus("shop", T0)
    return DaemonStatus("0.1.0", T0, {"shop": shop})


def stream(source: SourceStatus) -> None:
    source.enter(SourceState.STREAMING, LATER)
    source.committed(
        4,
        Lsn(0x20),
        LATER,
        transactions=2,
        rows={"public.orders": 3, "public.items": 4},
        ages_s=np.array([1.5, 0.5]),
        nbytes=900,
        commit_s=0.0214,
    )


FINE = {SourceState.STREAMING, SourceState.PAUSED}


@pytest.mark.parametrize("state", [s for s in SourceState if s not in FINE])
def test_only_a_streaming_source_is_ready(status: DaemonStatus, state: SourceState) -> None:
    status.sources["shop"].enter(state, LATER, OperatorError("slot is gone", remedy="make it"))
    assert ready(status) == (False, [f"source shop is {state}: slot is gone"])
    status.sources["shop"].enter(SourceState.STREAMING, LATER)
    assert ready(status) == (True, [])


def test_isolated_a_stopped_table_is_not_ready_but_others_stream(
    status: DaemonStatus,
) -> None:
    shop = status.sources["shop"]
    stream(shop)
    error = TableError(TableId("public", "items"), "no key", remedy="alter table ...")
    shop.table("public.items", TableState.STOPPED, LATER, error)
    is_ready, reasons = ready(status)
    assert not is_ready
    assert reasons == ["source shop, table public.items is stopped: no key"]
    assert shop.state is SourceState.STREAMING
    shop.table("public.items", TableState.LIVE, LATER)
    assert ready(status) == (True, [])


def test_one_bad_source_is_named_among_good_ones(status: DaemonStatus) -> None:
    stream(status.sources["shop"])
    status.sources["crm"] = SourceStatus("crm", T0)
    assert ready(status) == (False, ["source crm is starting"])


def test_without_sources_nothing_is_ready() -> None:
    assert ready(DaemonStatus("0.1.0", T0)) == (False, ["no sources"])


def test_json_has_every_figure(status: DaemonStatus) -> None:
    shop = status.sources["shop"]
    shop.resumed(epoch=3, end_lsn=Lsn(0x10))
    stream(shop)
    shop.received(Lsn(0x30))
    shop.confirmed(Lsn(0x20))
    lag = CaptureLag(Lsn(0x40), Lsn(0x20), 32, 64, None, wal_status="reserved")
    shop.measured(lag, 0.1, LATER)
    found = json.loads(json.dumps(to_json(status)))
    assert found["ready"] is True
    source = found["sources"]["shop"]
    tables = source.pop("tables")
    assert source == {
        "state": "streaming",
        "reason": None,
        "storage_wait": None,
        "remedy": None,
        "since": "2026-01-02T03:05:05.000+00:00",
        "lake_lost": False,
        "notices": [],
        "claim": "",
        "lag_bytes": 32,
        "lag_seconds": 0.1,
        "retained_bytes": 64,
        "safe_bytes": None,
        "wal_status": "reserved",
        "lag_at": "2026-01-02T03:05:05.000+00:00",
        "confirmed_lsn": "0/20",
        "received_lsn": "0/30",
        "epoch": 4,
        "end_lsn": "0/20",
        "rows": 7,
        "transactions": 2,
        "epochs": 1,
        "freshness_p50_seconds": 1.0,
        "freshness_p99_seconds": pytest.approx(1.49),
        "last_commit": "2026-01-02T03:05:05.000+00:00",
        "references": [],
        "last_epochs": [
            {
                "epoch": 4,
                "at": "2026-01-02T03:05:05.000+00:00",
                "end_lsn": "0/20",
                "tables": 2,
                "rows": 7,
                "transactions": 2,
                "bytes": 900,
                "commit_seconds": 0.021,
                "oldest_seconds": 1.5,
            }
        ],
        "last_errors": [],
    }
    assert [(t["table"], t["rows"], t["state"]) for t in tables] == [
        ("public.items", 4, "live"),
        ("public.orders", 3, "live"),
    ]


def test_errors_are_kept_once_per_change_and_not_for_ever(status: DaemonStatus) -> None:
    shop = status.sources["shop"]
    assert shop.enter(SourceState.STOPPED, T0, OperatorError("a", remedy="b"))
    assert not shop.enter(SourceState.STOPPED, LATER, OperatorError("a", remedy="b"))
    assert shop.since == T0
    assert [(e.what, e.remedy) for e in shop.last_errors] == [("a", "b")]
    for n in range(50):
        shop.enter(SourceState.STOPPED, LATER, OperatorError(str(n)))
    assert len(shop.last_errors) == 10
    assert shop.last_errors[-1].what == "49"


def test_an_error_that_comes_again_and_again_takes_one_place(status: DaemonStatus) -> None:
    shop = status.sources["shop"]
    for _ in range(30):
        shop.enter(SourceState.BACKING_OFF, T0, OperatorError("gone"))
        shop.enter(SourceState.STREAMING, T0)
    shop.table("public.items", TableState.STOPPED, T0, OperatorError("gone", remedy="look"))
    shop.enter(SourceState.BACKING_OFF, LATER, OperatorError("gone"))
    found = to_json(status)["sources"]["shop"]["last_errors"]
    assert [(e["what"], e["table"], e["times"], e["at"][14:19]) for e in found] == [
        ("gone", "public.items", 1, "04:05"),
        ("gone", None, 31, "05:05"),
    ]


def test_only_the_last_epochs_are_kept(status: DaemonStatus) -> None:
    shop = status.sources["shop"]
    for n in range(1, 30):
        shop.committed(n, Lsn(n), T0, transactions=0, rows={}, ages_s=np.empty(0))
    assert [e.epoch for e in shop.last_epochs] == list(range(20, 30))
    assert shop.last_epochs[-1].oldest_s is None


def test_isolated_a_dropped_table_does_not_affect_readiness(status: DaemonStatus) -> None:
    shop = status.sources["shop"]
    stream(shop)
    shop.table("public.items", TableState.STOPPED, LATER, OperatorError("no key"))
    assert not ready(status)[0]
    shop.table("public.items", TableState.DROPPED, LATER, OperatorError("not in the source"))
    assert ready(status) == (True, [])
    assert [e.what for e in shop.last_errors] == ["no key"]


def test_a_table_stopped_twice_for_a_reason_is_one_error(status: DaemonStatus) -> None:
    shop = status.sources["shop"]
    for _ in range(3):
        shop.table("public.items", TableState.STOPPED, LATER, OperatorError("no key"))
    assert len(shop.last_errors) == 1


def test_a_table_that_stops_before_its_snapshot_counts_as_new(
    status: DaemonStatus,
) -> None:
    """`ingestd snapshot` waits for that, or until it is live."""
    shop, error = status.sources["shop"], TableError(TableId("public", "items"), "no")
    later = T0 + timedelta(minutes=1)
    shop.table("public.items", TableState.STOPPED, T0, error)
    shop.table("public.items", TableState.STOPPED, later, error)
    assert shop.tables["public.items"].since == T0
    shop.tables["public.items"].snapshot_requested = True
    shop.table("public.items", TableState.STOPPED, later, error)
    assert shop.tables["public.items"].since == later
    assert not shop.tables["public.items"].snapshot_requested


def test_json_has_a_tables_snapshot(status: DaemonStatus) -> None:
    shop = status.sources["shop"]
    shop.table("public.items", TableState.LIVE, T0, snapshot_lsn=Lsn(0x10))
    shop.tables["public.items"].snapshot_requested = True

    def shown() -> tuple[object, ...]:
        [table] = to_json(status)["sources"]["shop"]["tables"]
        names = ("state", "since", "snapshot_lsn", "snapshot_progress", "snapshot_requested")
        return tuple(table[name] for name in names)

    t0, later = "2026-01-02T03:04:05.000+00:00", "2026-01-02T03:05:05.000+00:00"
    shop.table("public.items", TableState.LIVE, LATER)  # a new column, say
    assert shown() == ("live", t0, "0/10", None, True)
    shop.table("public.items", TableState.SNAPSHOTTING, LATER)
    shop.tables["public.items"].read(0.5, 100, LATER)
    assert shown() == ("snapshotting", later, "0/10", 0.5, False)
    shop.table("public.items", TableState.LIVE, LATER, snapshot_lsn=Lsn(0x20))
    assert shown() == ("live", later, "0/20", None, False)


def test_json_has_the_snapshot_progress_and_the_last_outcome(status: DaemonStatus) -> None:
    shop = status.sources["shop"]
    shop.table("public.items", TableState.LIVE, T0, snapshot_lsn=Lsn(0x10))

    def shown() -> tuple[object, object]:
        [table] = to_json(status)["sources"]["shop"]["tables"]
        return table["snapshot"], table["last_snapshot"]

    assert shown() == (None, None)
    table = shop.tables["public.items"]
    shop.table("public.items", TableState.SNAPSHOTTING, T0)
    table.read(0.0, 0, T0)
    table.read(0.25, 1000, T0 + timedelta(seconds=5))
    shop.table("public.items", TableState.SNAPSHOTTING, T0, snapshot_lsn=Lsn(0x20))  # so far read
    under_way = {
        "ratio": 0.25,
        "bytes": 1000,
        "total_bytes": 4000,
        "started_at": "2026-01-02T03:04:05.000+00:00",
        "eta_s": 15.0,
    }
    assert shown() == (under_way, None)
    shop.table("public.items", TableState.LIVE, LATER, snapshot_lsn=Lsn(0x20))
    last = {"at": "2026-01-02T03:05:05.000+00:00", "outcome": "done", "reason": None}
    assert shown() == (None, {**last, "remedy": None})
    table.end_snapshot(SnapshotOutcome.FAILED, LATER, OperatorError("no x", remedy="look"))
    failed = {**last, "outcome": "failed", "reason": "no x", "remedy": "look"}
    assert shown() == (None, failed)


def test_a_table_that_goes_back_to_its_old_rows_was_not_read(status: DaemonStatus) -> None:
    shop = status.sources["shop"]
    shop.table("public.items", TableState.LIVE, T0, snapshot_lsn=Lsn(0x10))
    shop.table("public.items", TableState.SNAPSHOTTING, T0)
    shop.table("public.items", TableState.SNAPSHOTTING, T0, snapshot_lsn=Lsn(0x20))
    shop.table("public.items", TableState.LIVE, LATER, snapshot_lsn=Lsn(0x10))
    assert shop.tables["public.items"].last_snapshot is None


def test_a_stopped_table_that_is_live_again_was_not_read(status: DaemonStatus) -> None:
    shop = status.sources["shop"]
    shop.table("public.items", TableState.STOPPED, T0, OperatorError("no right to read it"))
    shop.table("public.items", TableState.LIVE, LATER, snapshot_lsn=Lsn(0x10))
    assert shop.tables["public.items"].last_snapshot is None
