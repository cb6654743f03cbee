"""Asking a daemon for a snapshot, and following it from one /status to the next."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ingestd.errors import ConfigError, OperatorError, TransientError
from ingestd.observe.client import fetch_status, request_snapshot
from ingestd.schema import TableId

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from ingestd.quantities import Address

    Status = Mapping[str, Any]
    """As `ingestd.observe.status.to_json` gives it."""

LOOK_EVERY_S = 0.5
SILENT_LIMIT_S = 30.0
"""How long a daemon that is being followed may not answer."""


def ask_for_snapshot(
    address: Address, source: str, tables: Sequence[str], *, sources: AbstractSet[str] | None = None
) -> Following:
    """Ask the daemon there to read tables anew; `sources`: those it must have to be the one meant.

    Raises ConfigError for names that can't be, OperatorError for those that are not captured or if
    no daemon takes the request, TransientError while the source does not run.
    """
    try:
        names = list(dict.fromkeys(str(TableId.parse(table)) for table in tables))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    found = fetch_status(address)
    if found is None:
        raise OperatorError(
            f"no ingestd daemon answers on {address}",
            remedy="start it with `ingestd run`, or say with --url where it listens",
        )
    if sources is not None and set(found["sources"]) != sources:
        raise OperatorError(
            f"the daemon on {address} is another: its sources are {', '.join(found['sources'])}",
            remedy="give the config that it was started with, or --url",
        )
    request_snapshot(address, source, names)
    return Following(source, names, found)


def follow(
    address: Address, following: Following, limit_s: float, *, tell: Callable[[str], None]
) -> None:
    """Tell the progress until all tables are live. Raises OperatorError, TransientError."""
    heard = time.monotonic()
    end = heard + limit_s
    while True:
        status, now = fetch_status(address), time.monotonic()
        if status is not None:
            heard = now
            for line in following.look(status):
                tell(line)
        if following.is_over:
            return
        if now - heard > SILENT_LIMIT_S:
            raise TransientError(f"the daemon on {address} answers no more", reason="no_answer")
        if now > end:
            raise TransientError(
                f"not live within the limit: {', '.join(following.left)}",
                reason="timeout",
                remedy="the daemon goes on all the same: see `ingestd status`",
            )
        time.sleep(min(LOOK_EVERY_S, max(0.0, end - now)))


@dataclass(slots=True)
class Following:
    """Tables of a source until all are `live` with rows read after the request.

    `before`: a status from before the request.
    """

    source: str
    tables: Sequence[str]
    before: Status
    _left: list[str] = field(init=False)
    _told: dict[str, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Begin with all of them."""
        self._left = list(self.tables)

    @property
    def is_over(self) -> bool:
        """Whether all tables are live again."""
        return not self._left

    @property
    def left(self) -> Sequence[str]:
        """The tables that are not."""
        return self._left

    def look(self, status: Status) -> list[str]:
        """Take a later status; give a line for each thing of which there is something new to say.

        Raises OperatorError if a table is stopped or dropped instead, TransientError if the request
        went with the daemon or the pipeline that had taken it.
        """
        lines = self._news(f"source {self.source}", _source_line(status, self.source))
        for name in list(self._left):
            then, now = _table(self.before, self.source, name), _table(status, self.source, name)
            if now is None:
                continue  # the daemon has just been started
            line = _line(now)
            if _is_read(then, now):
                self._left.remove(name)
            else:
                self._refuse(then, now, is_same=_since(status) == _since(self.before))
            lines += self._news(name, line)
        return lines

    def _news(self, what: str, line: str) -> list[str]:
        if self._told.get(what, "") == line:
            return []
        self._told[what] = line
        return [f"{what}: {line or 'goes on'}"]

    def _refuse(self, then: Status | None, now: Status, *, is_same: bool) -> None:
        again = f"ingestd snapshot {self.source} {now['table']}"
        state = now["state"]
        news = then is None or (state, now["since"]) != (then["state"], then["since"])
        if state in {"stopped", "dropped"} and news:
            raise OperatorError(f"table {now['table']} is {_line(now)}", remedy=now["remedy"])
        if state == "live" and not now["snapshot_requested"]:
            who = "source" if is_same else "daemon"
            raise TransientError(
                f"table {now['table']}: the {who} began anew before the snapshot did",
                reason="request_lost",
                remedy=again,
            )


def _is_read(then: Status | None, now: Status) -> bool:
    """Whether it is live by a snapshot that was not there before."""
    if now["state"] != "live" or now["snapshot_requested"]:
        return False
    was_live = then is not None and then["state"] == "live"
    return not was_live or (then is not None and then["snapshot_lsn"] != now["snapshot_lsn"])


def _line(table: Status) -> str:
    if table["snapshot_requested"]:
        return "waits for its snapshot"
    why = f": {table['reason']}" if table["reason"] else ""
    progress = table["snapshot_progress"]
    read = "" if progress is None else f", {progress:.0%} read"
    return f"{table['state']}{read}{why}"


def _source_line(status: Status, name: str) -> str:
    """Say what keeps the whole source from going on; empty while it does."""
    source = status["sources"].get(name)
    if source is None or (source["state"] in {"streaming", "snapshotting"}):
        return ""
    return f"{source['state']}: {source['reason']}" if source["reason"] else str(source["state"])


def _table(status: Status, source: str, name: str) -> Status | None:
    found = status["sources"].get(source, {"tables": []})["tables"]
    return next((t for t in found if t["table"] == name), None)


def _since(status: Status) -> object:
    return status["started_at"]
