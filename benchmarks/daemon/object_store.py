"""Draining to an S3 store on loopback, with and without latency added to each request."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any

import pyarrow.compute as pc

from benchmarks.daemon import drain
from benchmarks.harness.rig import Rig
from ingestd.lake.delta.read import read_raw
from ingestd.model.schema import TableId
from tests.harness.object_store import ObjectStoreServer

LATENCY_S, ROUNDS = 0.03, 5


@dataclass(frozen=True, slots=True)
class Remote:
    """`per_s`: changes a second from the first durable epoch to the last; `commit_s`: of an epoch.

    Each is a median of ROUNDS, run alternately, by latency. `requests`: of an epoch.
    """

    per_s: dict[float, float]
    commit_s: dict[float, float]
    requests: float


def measure(rig: Rig, rows: int = 3 * drain.ROWS) -> Remote:
    """Drain the same backlog several times."""
    with ObjectStoreServer() as store:
        runs = {}
        for number in range(ROUNDS):
            for latency_s in (0.0, LATENCY_S):
                store.begin_anew()
                tag = f"_s3_{number}_{latency_s * 1e3:.0f}"
                runs[drain.Run(tag=tag, lake=store.uri, options=store.config)] = latency_s
        daemons, target = drain.prepare(rig, list(runs), rows=rows)
        per_s: dict[float, list[float]] = {0.0: [], LATENCY_S: []}
        commit_s: dict[float, list[float]] = {0.0: [], LATENCY_S: []}
        requests = 0.0
        for run, latency_s in runs.items():
            store.delay(latency_s)
            store.requests()
            drain.drain(rig, run, daemons[run], target)
            requests_made = store.requests().total()
            epochs = _epochs(rig, run)
            _check(run, store, epochs)
            requests = requests_made / len(epochs)
            per_s[latency_s].append(_changes_per_s(epochs))
            commit_s[latency_s].append(median(epoch["seconds"] for epoch in epochs))
    return Remote(_medians(per_s), _medians(commit_s), requests)


def _check(run: drain.Run, store: ObjectStoreServer, epochs: list[dict[str, Any]]) -> None:
    """Raise if the lake does not have all rows that were written."""
    table = TableId("public", "load")
    ops = read_raw(run.lake, run.name, table, storage_options=store.options)["_cdc_op"]
    rows = len(ops) - pc.sum(pc.equal(ops, "t")).as_py()  # without those of the start
    written = sum(epoch["rows"] for epoch in epochs)
    assert rows == written, f"{run.name}: {rows} rows in the lake, {written} were written"


def _epochs(rig: Rig, run: drain.Run) -> list[dict[str, Any]]:
    """Return the drain's epochs, without those of the previous run, which created the slot."""
    began = rig.meters[run.name].began
    found = rig.daemon_events(run.name, "epoch.committed")
    return [epoch for epoch in found if _at(epoch) > began]


def _at(epoch: dict[str, Any]) -> float:
    return datetime.fromisoformat(epoch["timestamp"]).timestamp()


def _changes_per_s(epochs: list[dict[str, Any]]) -> float:
    return float(sum(epoch["rows"] for epoch in epochs[1:]) / (_at(epochs[-1]) - _at(epochs[0])))


def _medians(found: dict[float, list[float]]) -> dict[float, float]:
    return {latency_s: median(values) for latency_s, values in found.items()}
