"""`ingestd pause` and `resume`: through the daemon or, if none responds, the mark in the lake."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ingestd.http.client import fetch_status, request_pause, request_resume
from ingestd.model.errors import ConfigError, OperatorError, TransientError
from ingestd.process.clock import utc_now
from ingestd.terminal.echo import echo
from ingestd.terminal.status import size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ingestd.http.client import Endpoint
    from ingestd.http.daemon_identity import DaemonIdentity
    from ingestd.ports import PauseMark

LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class PauseCommand:
    """Pauses or resumes a source of the daemon at `address`; None: HTTP is off.

    `expected`: the daemon that must answer; None: any. `open_mark`: returns the mark in the lake,
    for when no daemon responds; None without a config. `daemon`: the option that names the daemon,
    for the commands in the output.
    """

    address: Endpoint | None
    source: str
    expected: DaemonIdentity | None
    open_mark: Callable[[], PauseMark] | None
    daemon: str

    def pause(self, limit_s: float) -> None:
        """Pause the source, and wait until deliveries have ended.

        Raises ConfigError for an unknown source, OperatorError, TransientError (the lake, or the
        time limit).
        """
        if self._runs():
            self._pause_by_daemon(limit_s)
            return
        since = asyncio.run(self._mark().put(utc_now()))
        if self._runs():  # a daemon started meanwhile, possibly before the mark was written
            self._pause_by_daemon(limit_s)
            return
        echo(f"source {self.source}: paused since {_time(since)}; {self._why_unsent}")
        echo(f"  resume with: {self._resume}")

    def resume(self, limit_s: float) -> None:
        """Resume the source, and wait until it has restarted. Raises as `pause`."""
        if self._runs():
            self._resume_by_daemon(limit_s)
            return
        was_paused = asyncio.run(self._mark().clear())
        if self._runs():
            self._resume_by_daemon(limit_s)
            return
        what = "resumed" if was_paused else "was not paused"
        echo(f"source {self.source}: {what}; {self._why_unsent}")

    def _mark(self) -> PauseMark:
        if self.open_mark is None:
            raise OperatorError(
                f"no ingestd daemon answers on {self.address}",
                remedy="give --config: without a daemon the pause is recorded in the lake",
            )
        return self.open_mark()

    @property
    def _why_unsent(self) -> str:
        if self.address is None:
            return 'http.listen is "off": a running daemon applies this at its next SIGHUP'
        return f"no daemon answers on {self.address}: it applies when one is started"

    @property
    def _resume(self) -> str:
        return f"ingestd resume {self.source} {self.daemon}"

    def _runs(self) -> bool:
        """Return whether the daemon responds. Raises OperatorError if another daemon does."""
        if self.address is None:
            return False
        found = fetch_status(self.address)
        if found is None:
            return False
        if self.expected is not None:
            self.expected.require(self.address, found)
        if self.source not in found["sources"]:
            there = ", ".join(sorted(found["sources"]))
            raise ConfigError(f"sources.{self.source}: no such source; there is {there}")
        return True

    def _pause_by_daemon(self, limit_s: float) -> None:
        assert self.address is not None
        since = request_pause(self.address, self.source)
        found = self._await(lambda status: status["state"] == "paused", limit_s, "still delivers")
        kept = found["retained_bytes"]
        wal = "" if kept is None else f"; its slot retains {size(kept)} of WAL"
        echo(f"source {self.source}: paused since {_time(since)}{wal}")
        echo(f"  resume with: {self._resume}")

    def _resume_by_daemon(self, limit_s: float) -> None:
        assert self.address is not None
        was_paused = request_resume(self.address, self.source)
        self._await(lambda status: status["state"] != "paused", limit_s, "is still paused")
        what = "resumed where it stopped" if was_paused else "was not paused"
        echo(f"source {self.source}: {what}")

    def _await(
        self, is_over: Callable[[Mapping[str, Any]], bool], limit_s: float, otherwise: str
    ) -> Mapping[str, Any]:
        assert self.address is not None
        end = time.monotonic() + limit_s
        while True:
            status = fetch_status(self.address)
            found = None if status is None else status["sources"].get(self.source)
            if found is not None and is_over(found):
                assert isinstance(found, dict)
                return found
            if time.monotonic() > end:
                raise TransientError(
                    f"source {self.source} {otherwise} after {limit_s:g} s",
                    reason="timeout",
                    remedy="the daemon continues; follow it with `ingestd status`",
                )
            time.sleep(LOOK_EVERY_S)


def _time(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
