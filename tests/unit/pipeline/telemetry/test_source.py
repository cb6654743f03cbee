"""Status and log of a source's tables."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
import structlog
from structlog.testing import capture_logs

from ingestd.model.changes import CommittedEpoch, EpochSummary, TableInEpoch, change_schema
from ingestd.model.errors import OperatorError, TableError, TransientError
from ingestd.model.lake_state import LakeState, TableEvent, TableState, registered
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TIMESTAMP, TIMESTAMP_NTZ, Table, TableId
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import (
    DaemonStatus,
    ReferenceStatus,
    SnapshotOutcome,
    SourceState,
    SourceStatus,
    ready,
)
from ingestd.observe.status_json import to_json
from ingestd.pipeline.filling_epoch import FillingEpoch, RowTally
from ingestd.pipeline.telemetry.raw_values import hint
from ingestd.pipeline.telemetry.source import SourceTelemetry
from ingestd.ports import CaptureLag, Discovery, Refused
from ingestd.testing.fakes.sink import MemoryDisk, MemoryLake
from tests.unit.pipeline.fixtures import A, B

if TYPE_CHECKING:
    from collections.abc import Mapping

T0 = datetime(2026, 1, 2, tzinfo=UTC)


class Watched:
    """A watch with what it keeps."""

    def __init__(self) -> None:
        self.status = SourceStatus("shop", T0)
        self.metrics = Metrics()
        self.now = T0
        self.watch = SourceTelemetry(
            self.status, self.metrics, structlog.get_logger(), now=lambda: self.now
        )
        self.watch.enter(SourceState.STREAMING)

    def readiness(self) -> tuple[bool, list[str]]:
        return ready(DaemonStatus("0", T0, {"shop": self.status}))

    def states(self) -> dict[str, list[str]]:
        """The states with value 1, per table."""
        found: dict[str, list[str]] = {}
        for family in self.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == "ingestd_table_state":
                    states = found.setdefault(sample.labels["table"], [])
                    states += [sample.labels["state"]] * int(sample.value)
        return found

    def ratio(self, table: Table) -> float | None:
        snapshot = self.status.tables[str(table.id)].snapshot
        return None if snapshot is None else snapshot.ratio

    def progress(self, table: Table) -> float | None:
        labels = {"source": "shop", "table": str(table.id)}
        return self.metrics.registry.get_sample_value("ingestd_snapshot_progress_ratio", labels)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def event(table: Table, state: TableState, **more: Any) -> TableEvent:
    return TableEvent(table, state, T0, Lsn(0x10), **more)


def live(*tables: Table) -> LakeState:
    events = [event(t, TableState.LIVE, snapshot_lsn=Lsn(0x8)) for t in tables]
    return LakeState(tables={e.table.id: registered(e, None) for e in events})


def offer(*tables: Table, refused: tuple[Refused, ...] = ()) -> Discovery:
    return Discovery(tables, refused, "server")


# --- tables ----------------------------------------------------------------------------------


def test_isolated_a_stopped_table_is_not_ready_until_live_again(watched: Watched) -> None:
    watched.watch.discovered(live(A, B), offer(A, B))
    assert watched.readiness() == (True, [])
    why = {"reason": "disk of table full", "remedy": "make room"}
    with capture_logs() as logged:
        watched.watch.tables_changed([event(A, TableState.STOPPED, **why)])
    assert watched.readiness() == (
        False,
        ["source shop, table public.a is stopped: disk of table full"],
    )
    assert watched.status.tables["public.a"].remedy == (
        "make room\n  then: ingestd snapshot shop public.a"
    )
    assert [(e["event"], e["log_level"]) for e in logged] == [("table.stopped", "error")]
    assert watched.states() == {"public.a": ["stopped"], "public.b": ["live"]}
    for state in (TableState.SNAPSHOTTING, TableState.LIVE):
        watched.watch.tables_changed([event(A, state, snapshot_lsn=Lsn(0x20))])
        assert watched.readiness() == (True, [])
        assert watched.states() == {"public.a": [state], "public.b": ["live"]}
    assert watched.status.tables["public.a"].snapshot_lsn == Lsn(0x20)


NO_LAG = CaptureLag(Lsn(0x20), None, None, None, None)
LATER = {
    "measured": lambda watch: watch.measured(NO_LAG, None),
    "not measured": lambda watch: watch.not_measured(OperatorError("no")),
    "paused": lambda watch: watch.report_retained(NO_LAG),
    "failed": lambda watch: watch.failed(TransientError("no", reason="lost"), 1.0),
    "started": lambda watch: watch.discovered(dropped_at(T0), named(A)),
    "started, paused": lambda watch: watch.lake_read_while_paused(dropped_at(T0)),
}


def dropped_at(at: datetime) -> LakeState:
    gone = replace(event(A, TableState.DROPPED, reason="dropped"), at=at)
    return LakeState(tables={A.id: registered(gone, None)})


def named(table: Table) -> Discovery:
    """A table that the config names and that does not exist."""
    refused = Refused(Table(table.id, 0, ()), TableError(table.id, "not there"))
    return offer(B, refused=(refused,))


@pytest.mark.parametrize("later", LATER)
def test_a_dropped_table_is_shown_for_a_day(watched: Watched, later: str) -> None:
    name = str(A.id)
    watched.watch.discovered(live(A, B), offer(A, B))
    watched.metrics.rows("shop", name, {"c": 1})
    watched.status.references[name] = ReferenceStatus(
        name, "snapshot_plus_cdc", TableState.LIVE, T0
    )
    watched.watch.tables_changed([event(A, TableState.DROPPED, reason="dropped")])
    watched.now = T0 + timedelta(days=1, microseconds=-1)
    LATER[later](watched.watch)
    assert watched.states()[name] == ["dropped"]
    watched.now = T0 + timedelta(days=1)
    LATER[later](watched.watch)
    assert name not in watched.status.tables
    assert name not in watched.states()
    assert f'table="{name}"' not in watched.metrics.text().decode()
    assert watched.status.shown_references() == []
    assert name not in str(to_json(DaemonStatus("0", T0, {"shop": watched.status})))
    # and is shown again when there is a table of that name
    watched.watch.tables_changed([event(A, TableState.LIVE)])
    assert watched.states()[name] == ["live"]
    assert [each.table for each in watched.status.shown_references()] == [name]


def test_a_day_is_counted_from_when_the_table_was_found_dropped(watched: Watched) -> None:
    watched.now = T0 + timedelta(hours=20)
    watched.watch.discovered(dropped_at(T0), named(A))
    assert watched.status.tables[str(A.id)].since == T0
    watched.now = T0 + timedelta(hours=25)
    watched.watch.measured(NO_LAG, None)
    assert str(A.id) not in watched.status.tables


def test_a_table_that_is_stopped_is_shown_for_as_long_as_it_is(watched: Watched) -> None:
    watched.watch.tables_changed([event(A, TableState.STOPPED, reason="no")])
    watched.now = T0 + timedelta(days=400)
    watched.watch.measured(NO_LAG, None)
    assert watched.states() == {str(A.id): ["stopped"]}


def test_a_state_is_logged_when_it_is_another_or_has_a_reason(watched: Watched) -> None:
    """A table has another row in `_tables` with each change of its columns or its entry, too."""
    why = "a file was replaced"
    with capture_logs() as logged:
        for state, reason in (("live", ""), ("live", ""), ("live", why), ("snapshotting", "")):
            entry = event(A, TableState(state), reason=reason or None)
            watched.watch.tables_changed([entry])
    told = [(e["state"], e.get("reason")) for e in logged]
    assert told == [("live", None), ("live", why), ("snapshotting", None)]


def test_a_name_is_quoted_for_the_shell(watched: Watched) -> None:
    odd = replace(A, id=TableId("public", "it's; rm"))
    watched.watch.tables_changed([event(odd, TableState.STOPPED, reason="x")])
    [status] = watched.status.tables.values()
    assert status.remedy == """ingestd snapshot shop 'public.it'"'"'s; rm'"""


def test_a_refused_table_has_its_own_remedy_only(watched: Watched) -> None:
    error = TableError(A.id, "no key", remedy="ALTER TABLE a ADD PRIMARY KEY (id)")
    watched.watch.discovered(LakeState(), offer(B, refused=(Refused(A, error),)))
    watched.watch.tables_changed(
        [event(A, TableState.STOPPED, reason=error.reason, remedy=error.remedy)]
    )
    assert watched.status.tables["public.a"].remedy == error.remedy
    assert watched.readiness()[1] == ["source shop, table public.a is stopped: no key"]


def test_a_table_that_was_dropped_leaves_readiness_alone(watched: Watched) -> None:
    watched.watch.discovered(live(A, B), offer(A, B))
    watched.watch.tables_changed([event(A, TableState.STOPPED, reason="no key")])
    watched.watch.tables_changed([event(A, TableState.DROPPED, reason="not there any more")])
    assert watched.readiness() == (True, [])
    assert watched.status.tables["public.a"].reason == "not there any more"
    assert watched.states() == {"public.a": ["dropped"], "public.b": ["live"]}


def test_a_dropped_table_listed_by_name_does_not_block_readiness(
    watched: Watched,
) -> None:
    gone = Refused(Table(A.id, 0, ()), TableError(A.id, "is not in the source"))
    watched.watch.discovered(live(A, B), offer(B, refused=(gone,)))
    assert watched.readiness() == (True, [])
    assert watched.states() == {"public.a": ["dropped"], "public.b": ["live"]}
    watched.watch.discovered(live(B), offer(B, refused=(gone,)))
    assert not watched.readiness()[0], "it was never there: a name is wrong"


def test_nothing_is_shown_of_tables_that_are_not_asked_for(watched: Watched) -> None:
    error = TableError(A.id, "no key")
    watched.watch.discovered(live(B), offer(B, refused=(Refused(A, error),)))
    assert not watched.readiness()[0]
    watched.watch.discovered(live(B), offer(B))
    assert watched.readiness() == (True, [])
    assert watched.states() == {"public.b": ["live"]}


# --- snapshots -------------------------------------------------------------------------------


def test_progress_is_shown_while_a_snapshot_is_read(watched: Watched) -> None:
    watched.watch.tables_changed([event(A, TableState.SNAPSHOTTING)])
    assert watched.progress(A) is None
    watched.watch.snapshot_progress(A.id, 0.25)
    assert (watched.progress(A), watched.ratio(A)) == (
        0.25,
        0.25,
    )
    watched.watch.snapshot_progress(A.id, 1.3)
    assert watched.progress(A) == 1
    watched.watch.tables_changed([event(A, TableState.LIVE)])
    assert (watched.progress(A), watched.ratio(A)) == (
        None,
        None,
    )
    watched.watch.snapshot_progress(A.id, 0.5)  # too late
    assert watched.progress(A) is None


def test_a_request_is_shown_until_it_is_taken_up(watched: Watched) -> None:
    watched.watch.discovered(live(A), offer(A))
    with capture_logs() as logged:
        watched.watch.snapshot_requested([A.id, B.id])
    assert [(e["event"], e["tables"]) for e in logged] == [
        ("snapshot.requested", ["public.a", "public.b"])
    ]
    assert watched.status.tables["public.a"].snapshot_requested
    watched.watch.tables_changed([event(A, TableState.SNAPSHOTTING)])
    assert not watched.status.tables["public.a"].snapshot_requested


def test_a_partial_snapshot_is_shown_while_its_table_is_live(watched: Watched) -> None:
    watched.watch.discovered(live(A, B), offer(A, B))
    watched.watch.snapshot_requested([A.id], partial=True)
    table = watched.status.tables["public.a"]
    watched.watch.snapshot_progress(A.id, 0.5, nbytes=100)
    assert (table.snapshot_requested, watched.ratio(A), watched.progress(A)) == (False, 0.5, 0.5)
    watched.watch.tables_changed([event(A, TableState.LIVE)])  # a new column, say
    assert watched.progress(A) == 0.5
    watched.watch.snapshot_ended(A.id)
    assert (watched.ratio(A), watched.progress(A)) == (None, None)
    assert table.last_snapshot is not None
    assert table.last_snapshot.outcome is SnapshotOutcome.DONE
    watched.watch.snapshot_progress(A.id, 0.5)  # too late
    assert watched.progress(A) is None


def test_a_partial_snapshot_goes_with_its_pipeline(watched: Watched) -> None:
    watched.watch.discovered(live(A, B), offer(A, B))
    watched.watch.snapshot_requested([A.id], partial=True)
    watched.watch.snapshot_progress(A.id, 0.5, nbytes=100)
    with capture_logs() as logged:
        watched.watch.discovered(live(A, B), offer(A, B))
    [lost] = [e for e in logged if e["event"] == "snapshot.request_lost"]
    assert lost["tables"] == ["public.a"]
    table = watched.status.tables["public.a"]
    assert table.last_snapshot is not None
    assert table.last_snapshot.outcome is SnapshotOutcome.LOST
    assert watched.progress(A) is None


def test_a_cancelled_snapshot_is_over(watched: Watched) -> None:
    watched.watch.discovered(live(A, B), offer(A, B))
    watched.watch.snapshot_requested([A.id])
    watched.watch.tables_changed([event(A, TableState.SNAPSHOTTING)])
    watched.watch.snapshot_progress(A.id, 0.5, nbytes=100)
    with capture_logs() as logged:
        watched.watch.snapshot_cancelled([A.id])
    assert [(e["event"], e["tables"]) for e in logged] == [("snapshot.cancelled", ["public.a"])]
    watched.watch.tables_changed([event(A, TableState.LIVE)])
    table = watched.status.tables["public.a"]
    assert table.last_snapshot is not None
    assert table.last_snapshot.outcome is SnapshotOutcome.CANCELLED
    assert (watched.ratio(A), watched.progress(A), table.snapshot_requested) == (None, None, False)


def test_isolated_a_failed_partial_snapshot_keeps_its_table_live(watched: Watched) -> None:
    watched.watch.discovered(live(A, B), offer(A, B))
    watched.watch.snapshot_requested([A.id], partial=True)
    with capture_logs() as logged:
        watched.watch.snapshot_failed(A.id, OperatorError("no column x", remedy="look"))
    [failed] = logged
    assert (failed["event"], failed["table"]) == ("snapshot.failed", "public.a")
    assert (failed["reason"], failed["remedy"]) == ("no column x", "look")
    assert watched.readiness() == (True, [])
    watched.watch.snapshot_ended(A.id)  # too late
    last = watched.status.tables["public.a"].last_snapshot
    assert last is not None
    assert (last.outcome, last.reason) == (SnapshotOutcome.FAILED, "no column x")


def test_a_request_lost_with_its_pipeline_is_reported(watched: Watched) -> None:
    watched.watch.discovered(live(A, B), offer(A, B))
    watched.watch.snapshot_requested([A.id])
    with capture_logs() as logged:
        watched.watch.discovered(live(A, B), offer(A, B))
        watched.watch.discovered(live(A, B), offer(A, B))
    [lost] = [e for e in logged if e["event"] == "snapshot.request_lost"]
    assert lost["tables"] == ["public.a"]
    assert lost["remedy"] == "ingestd snapshot shop public.a"
    assert not watched.status.tables["public.a"].snapshot_requested


# --- values kept as text ---------------------------------------------------------------------


async def commit(
    watch: SourceTelemetry, table: Table, raw: Mapping[str, str], rows: int = 2
) -> None:
    schema = change_schema(table)
    values = {"_cdc_op": ["c"] * rows, "_cdc_raw": [list(raw.items())] * rows}
    arrays = [pa.array(values.get(f.name, [None] * rows), f.type) for f in schema]
    tally = RowTally()
    tally.count(pa.RecordBatch.from_arrays(arrays, schema=schema))
    lake = MemoryLake(MemoryDisk())
    await lake.open()
    epoch = FillingEpoch(lake.begin_epoch(), tallies={table.id: tally})
    epoch.commit_times = [np.array([0])]
    summary = EpochSummary(Lsn(1), Lsn(2), T0, 1, 100)
    watch.committed(CommittedEpoch(1, summary, T0, (TableInEpoch(table.id, 1, rows),)), epoch, 0.1)


async def test_lossless_raw_values_are_logged_once_and_always_counted(
    watched: Watched,
) -> None:
    with capture_logs() as logged:
        await commit(watched.watch, A, {"id": "secret value"})
        await commit(watched.watch, A, {"id": "secret value"})
        await commit(watched.watch, A, {"id": "x", "_cdc_before.id": "secret value"})
        await commit(watched.watch, B, {"id": "secret value"}, rows=3)
    found = [e for e in logged if e["event"] == "table.raw_values"]
    assert [(e["table"], e["column"], e["count"], e["log_level"]) for e in found] == [
        ("public.a", "id", 2, "warning"),
        ("public.a", "_cdc_before.id", 2, "warning"),
        ("public.b", "id", 3, "warning"),
    ]
    assert all(e["hint"] for e in found)
    assert "secret value" not in str(logged)
    counted = watched.metrics.registry.get_sample_value(
        "ingestd_raw_values_total", {"source": "shop", "table": "public.a"}
    )
    assert counted == 8


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.date32(), "BC"),
        (TIMESTAMP, "infinity"),
        (TIMESTAMP_NTZ, "9999"),
        (pa.string(), "hex"),
        (pa.decimal128(10, 2), "`types`"),
        (pa.list_(pa.int32()), "dimensions"),
        (pa.struct([("a", pa.int32())]), "field"),
        (pa.int32(), "int32"),
    ],
)
def test_a_hint_says_why_a_column_of_this_type_refuses(column: pa.DataType, said: str) -> None:
    assert said in hint(column)


def test_what_a_person_should_hear_of_is_among_the_last_errors(watched: Watched) -> None:
    watched.watch.lost("the slot is gone")
    watched.watch.reading_failed(OperatorError("table is locked", remedy="wait"), 1.0)
    watched.watch.snapshot_failed(A.id, TableError(A.id, "no such column", remedy="look"))
    found = [(e.what, e.table) for e in watched.status.last_errors]
    assert found == [
        ("the slot is gone", None),
        ("table is locked", None),
        ("its snapshot failed: no such column", str(A.id)),
    ]
    assert all(e.remedy for e in watched.status.last_errors)


async def test_a_durable_epoch_is_shown_with_what_it_took(watched: Watched) -> None:
    await commit(watched.watch, A, {}, rows=3)
    [epoch] = watched.status.last_epochs
    assert (epoch.epoch, epoch.rows, epoch.nbytes, epoch.commit_s) == (1, 3, 100, 0.1)


LAGS = {"lag_bytes", "lag_seconds", "slot_retained_bytes", "slot_safe_bytes"}


def lags(watched: Watched) -> set[str]:
    samples = [s for f in watched.metrics.registry.collect() for s in f.samples]
    return {name for name in LAGS if any(s.name == f"ingestd_{name}" for s in samples)}


@pytest.mark.parametrize("how", ["failed again", "cannot be asked", "closed"])
def test_no_lag_is_shown_while_it_is_not_known(watched: Watched, how: str) -> None:
    error = TransientError("away", reason="unreachable")
    watched.metrics.buffered("shop", 9)
    if how == "failed again":
        watched.watch.failed(error, 1.0)
    watched.watch.measured(CaptureLag(Lsn(9), Lsn(5), 4, 7, 11), None)
    assert lags(watched) == LAGS
    if how == "failed again":
        watched.watch.failed(error, 1.0)
    elif how == "closed":
        watched.watch.enter(SourceState.CLOSED)
    else:
        watched.watch.not_measured(error)
    assert lags(watched) == set()
    if how != "cannot be asked":
        value = watched.metrics.registry.get_sample_value
        assert value("ingestd_buffer_bytes", {"source": "shop"}) == 0
    watched.watch.measured(CaptureLag(Lsn(9), Lsn(5), 4, 7, 11), None)
    assert lags(watched) == LAGS
