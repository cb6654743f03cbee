"""Requests to a daemon for snapshots, and their progress by polling /status."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ingestd.http.client import cancel_snapshot, fetch_status, request_snapshot
from ingestd.model.errors import ConfigError, OperatorError, TransientError, resnapshot_command
from ingestd.model.schema import TableId

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ingestd.config.units import Address
    from ingestd.http.daemon_identity import DaemonIdentity

    Status = Mapping[str, Any]
    """As returned by `ingestd.observe.status_json.to_json`."""


@dataclass(frozen=True, slots=True)
class TableProgress:
    """The progress of a table's snapshot.

    `state`: the table's, or ``waiting`` until the snapshot begins. `ratio`: the part that is read,
    0 to 1. `total_bytes` is an estimate, `eta_s` the estimated seconds left; None while unknown.
    `is_over`: all rows are in the lake.
    """

    table: str
    state: str
    ratio: float
    nbytes: int
    total_bytes: int | None
    eta_s: float | None
    is_over: bool


class SnapshotDisplay(Protocol):
    """Displays the progress of snapshots. Called after each poll of /status."""

    def source(self, line: str) -> None:
        """Show why the source does not progress; empty while it does."""
        ...

    def table(self, progress: TableProgress) -> None:
        """Show a table's progress; not called again once the snapshot is over."""
        ...


def ask_for_snapshot(
    address: Address,
    source: str,
    tables: Sequence[str],
    *,
    where: str | None = None,
    expected: DaemonIdentity | None = None,
) -> Following:
    """Ask the daemon for a snapshot of tables, or of the rows that match `where` (SQL).

    `expected`: the daemon that must answer; None: any. Raises ConfigError for invalid names,
    OperatorError for tables that are not captured or if no daemon accepts the request,
    TransientError while the source is not running.
    """
    names = table_names(tables)
    before = _status_of(address, expected)
    request_snapshot(address, source, names, where)
    return Following(source, names, before, is_partial=where is not None)


def ask_to_cancel(
    address: Address,
    source: str,
    tables: Sequence[str],
    *,
    expected: DaemonIdentity | None = None,
) -> Sequence[str]:
    """Ask the daemon to cancel snapshots of tables; return the tables' names.

    Raises as `ask_for_snapshot`, and OperatorError for a table without a snapshot.
    """
    names = table_names(tables)
    _status_of(address, expected)
    cancel_snapshot(address, source, names)
    return names


def table_names(tables: Sequence[str]) -> list[str]:
    """Return each table's name once, as in /status. Raises ConfigError."""
    try:
        return list(dict.fromkeys(str(TableId.parse(table)) for table in tables))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _status_of(address: Address, expected: DaemonIdentity | None) -> Status:
    found = fetch_status(address)
    if found is None:
        raise OperatorError(
            f"no ingestd daemon answers on {address}",
            remedy="start it with `ingestd run`, or give its address with --url",
        )
    if expected is not None:
        expected.require(address, found)
    return found


def follow(
    address: Address,
    following: Following,
    limit_s: float,
    display: SnapshotDisplay,
    *,
    poll_s: float = 0.5,
    silent_limit_s: float = 30.0,
) -> None:
    """Show the progress until all rows are in the lake. Raises OperatorError, TransientError.

    `silent_limit_s`: how long the daemon may fail to respond.
    """
    heard = time.monotonic()
    end = heard + limit_s
    while True:
        status, now = fetch_status(address), time.monotonic()
        if status is not None:
            heard = now
            display.source(following.source_line(status))
            for progress in following.update(status):
                display.table(progress)
        if following.is_over:
            return
        if now - heard > silent_limit_s:
            raise TransientError(f"the daemon on {address} no longer responds", reason="no_answer")
        if now > end:
            raise TransientError(
                f"not live within the time limit: {', '.join(following.remaining)}",
                reason="timeout",
                remedy="the daemon continues; follow it with `ingestd status`",
            )
        time.sleep(min(poll_s, max(0.0, end - now)))


@dataclass(slots=True)
class Following:
    """The tables of a snapshot request until their rows are in the lake.

    `before`: a status from before the request. `is_partial`: only some rows were requested; the
    table stays live meanwhile.
    """

    source: str
    tables: Sequence[str]
    before: Status
    is_partial: bool = False
    _left: list[str] = field(init=False)

    def __post_init__(self) -> None:
        """Start with all tables."""
        self._left = list(self.tables)

    @property
    def is_over(self) -> bool:
        """True once all requested rows are in the lake."""
        return not self._left

    @property
    def remaining(self) -> Sequence[str]:
        """The tables whose rows are not all in the lake yet."""
        return self._left

    def source_line(self, status: Status) -> str:
        """Return why the source does not progress; empty while it does."""
        source = status["sources"].get(self.source)
        if source is None or source["state"] in {"streaming", "snapshotting"}:
            return ""
        return f"{source['state']}: {source['reason']}" if source["reason"] else source["state"]

    def update(self, status: Status) -> list[TableProgress]:
        """Evaluate a later status; return the progress of the tables that were not over before.

        Raises OperatorError if a table is stopped or dropped, its snapshot cancelled, or the
        source removed from the config; TransientError if the request was lost because the daemon
        or the source restarted.
        """
        if self.source not in status["sources"]:
            raise OperatorError(
                f"source {self.source} was removed from the daemon's config",
                remedy="add it again, send SIGHUP, and repeat the request",
            )
        found = []
        for name in list(self._left):
            then, now = _table(self.before, self.source, name), _table(status, self.source, name)
            if now is None:
                continue  # the daemon has just been started
            is_over = self._is_read(then, now)
            if is_over:
                self._left.remove(name)
            else:
                self._refuse(then, now, is_same=_since(status) == _since(self.before))
            found.append(_progress(now, is_over=is_over))
        return found

    def _is_read(self, then: Status | None, now: Status) -> bool:
        """Return whether the table is live with a snapshot newer than the request."""
        if now["state"] != "live" or now["snapshot_requested"] or now["snapshot"] is not None:
            return False
        if _ended(then, now) == "done":
            return True
        if self.is_partial:
            return False
        was_live = then is not None and then["state"] == "live"
        return not was_live or (then is not None and then["snapshot_lsn"] != now["snapshot_lsn"])

    def _refuse(self, then: Status | None, now: Status, *, is_same: bool) -> None:
        name, state, ended = now["table"], now["state"], _ended(then, now)
        is_news = then is None or (state, now["since"]) != (then["state"], then["since"])
        if state in {"stopped", "dropped"} and is_news:
            why = f": {now['reason']}" if now["reason"] else ""
            raise OperatorError(f"table {name} is {state}{why}", remedy=now["remedy"])
        if now["snapshot_requested"] or now["snapshot"] is not None:
            return
        if ended == "failed":
            last = now["last_snapshot"]
            raise OperatorError(f"table {name}: {last['reason']}", remedy=last["remedy"])
        if ended == "cancelled":
            raise OperatorError(f"table {name}: its snapshot was cancelled")
        if state == "live":
            who = "source" if is_same else "daemon"
            raise TransientError(
                f"table {name}: the {who} restarted before the snapshot was read",
                reason="request_lost",
                remedy=resnapshot_command(self.source, name),
            )


def _ended(then: Status | None, now: Status) -> str | None:
    """Return the outcome of a snapshot that ended since `then`; None if none has."""
    last = now["last_snapshot"]
    if last is None or (then is not None and then["last_snapshot"] == last):
        return None
    return str(last["outcome"])


def _progress(table: Status, *, is_over: bool) -> TableProgress:
    found = table["snapshot"] or {"ratio": 0.0, "bytes": 0, "total_bytes": None, "eta_s": None}
    return TableProgress(
        table["table"],
        "waiting" if table["snapshot_requested"] else table["state"],
        1.0 if is_over else found["ratio"],
        found["bytes"],
        found["total_bytes"],
        found["eta_s"],
        is_over,
    )


def _table(status: Status, source: str, name: str) -> Status | None:
    found = status["sources"].get(source, {"tables": []})["tables"]
    return next((t for t in found if t["table"] == name), None)


def _since(status: Status) -> object:
    return status["started_at"]
