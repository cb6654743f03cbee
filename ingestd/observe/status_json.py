"""A daemon's status as JSON values: LSNs as Postgres writes them, times in ISO 8601 UTC."""

from __future__ import annotations

from datetime import UTC
from typing import TYPE_CHECKING, Any

from ingestd.observe.status import paused, ready

if TYPE_CHECKING:
    from datetime import datetime

    from ingestd.model.lsn import Lsn
    from ingestd.observe.progress import SnapshotProgress
    from ingestd.observe.recent_events import EpochStatus, ErrorStatus
    from ingestd.observe.status import (
        DaemonStatus,
        LastSnapshot,
        ReferenceStatus,
        SourceStatus,
        TableStatus,
    )
    from ingestd.ports import StorageWait


def to_json(status: DaemonStatus) -> dict[str, Any]:
    """Return the status of the daemon.

    `commands`: the file of the token that they require, its user, or why they are off. `offline`:
    why the status does not come from the daemon itself; see `ingestd.app.offline_status`.
    """
    is_ready, reasons = ready(status)
    return {
        "version": status.version,
        "started_at": _time(status.started_at),
        "lake": status.lake,
        "offline": None,
        "ready": is_ready,
        "not_ready_because": reasons,
        "paused": paused(status),
        "commands": None if status.commands is None else status.commands.to_json(),
        "sources": {name: source_to_json(s) for name, s in status.sources.items()},
    }


def source_to_json(source: SourceStatus) -> dict[str, Any]:
    """Return a source's part of `to_json`."""
    tables = [table_to_json(t) for _, t in sorted(source.tables.items())]
    return {**facts_to_json(source), "tables": tables}


def facts_to_json(source: SourceStatus) -> dict[str, Any]:
    """Return what `source_to_json` returns, without the tables."""
    return {
        "state": str(source.state),
        "reason": source.reason,
        "remedy": source.remedy,
        "since": _time(source.since),
        "claim": source.claim,
        "lake_lost": source.lake_lost,
        "storage_wait": _wait_to_json(source.storage()),
        "lag_bytes": source.lag_bytes,
        "lag_seconds": source.lag_seconds,
        "retained_bytes": source.retained_bytes,
        "safe_bytes": source.safe_bytes,
        "wal_status": source.wal_status,
        "lag_at": _time(source.lag_at),
        "confirmed_lsn": _lsn(source.confirmed_lsn),
        "received_lsn": _lsn(source.received_lsn),
        "epoch": source.epoch,
        "end_lsn": _lsn(source.end_lsn),
        "rows": source.rows,
        "transactions": source.transactions,
        "epochs": source.epochs,
        "freshness_p50_seconds": source.freshness.quantile(0.5),
        "freshness_p99_seconds": source.freshness.quantile(0.99),
        "last_commit": _time(source.last_commit),
        "references": [_reference_to_json(r) for r in source.shown_references()],
        "notices": [{"reason": n.what, "remedy": n.remedy} for n in source.notices],
        "last_epochs": [_epoch_to_json(e) for e in source.last_epochs],
        "last_errors": [_error_to_json(e) for e in source.last_errors],
    }


def _wait_to_json(wait: StorageWait | None) -> dict[str, Any] | None:
    return None if wait is None else {"path": wait.path, "seconds": round(wait.seconds, 1)}


def table_to_json(table: TableStatus) -> dict[str, Any]:
    """Return a table's part of `source_to_json`."""
    return {
        "table": table.table,
        "state": str(table.state),
        "since": _time(table.since),
        "reason": table.reason,
        "remedy": table.remedy,
        "snapshot_lsn": _lsn(table.snapshot_lsn),
        "snapshot_progress": None if table.snapshot is None else round(table.snapshot.ratio, 3),
        "snapshot_requested": table.snapshot_requested,
        "snapshot": _snapshot_to_json(table.snapshot),
        "last_snapshot": _last_to_json(table.last_snapshot),
        "rows": table.rows,
        "last_change": _time(table.last_change),
    }


def _reference_to_json(reference: ReferenceStatus) -> dict[str, Any]:
    return {
        "table": reference.table,
        "reference": reference.kind,
        "state": str(reference.state),
        "since": _time(reference.since),
        "reason": reference.reason,
        "remedy": reference.remedy,
        "version": reference.version,
        "rows": reference.rows,
        "epoch": reference.epoch,
        "looked": _time(reference.looked),
    }


def _epoch_to_json(epoch: EpochStatus) -> dict[str, Any]:
    return {
        "epoch": epoch.epoch,
        "at": _time(epoch.at),
        "end_lsn": _lsn(epoch.end_lsn),
        "tables": epoch.tables,
        "rows": epoch.rows,
        "transactions": epoch.transactions,
        "bytes": epoch.nbytes,
        "commit_seconds": _seconds(epoch.commit_s),
        "oldest_seconds": _seconds(epoch.oldest_s),
    }


def _error_to_json(error: ErrorStatus) -> dict[str, Any]:
    return {
        "at": _time(error.at),
        "what": error.what,
        "remedy": error.remedy,
        "table": error.table,
        "times": error.times,
    }


def _snapshot_to_json(snapshot: SnapshotProgress | None) -> dict[str, Any] | None:
    if snapshot is None:
        return None
    return {
        "ratio": round(snapshot.ratio, 3),
        "bytes": snapshot.nbytes,
        "total_bytes": snapshot.total_bytes,
        "started_at": _time(snapshot.started_at),
        "eta_s": None if snapshot.eta_s is None else round(snapshot.eta_s, 1),
    }


def _last_to_json(last: LastSnapshot | None) -> dict[str, Any] | None:
    if last is None:
        return None
    return {
        "at": _time(last.at),
        "outcome": str(last.outcome),
        "reason": last.reason,
        "remedy": last.remedy,
    }


def _seconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _lsn(position: Lsn | None) -> str | None:
    return None if position is None else str(position)


def _time(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).isoformat(timespec="milliseconds")
