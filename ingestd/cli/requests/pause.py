"""`ingestd pause` and `resume`: by the running daemon; if none answers, by the mark in the lake."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from ingestd.http.client import fetch_status, request_pause, request_resume
from ingestd.model.errors import ConfigError, OperatorError, TransientError
from ingestd.terminal.status import size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ingestd.http.client import Endpoint
    from ingestd.http.daemon_identity import DaemonIdentity
    from ingestd.ports import PauseMark

LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class PauseCommand:
    """A source of the daemon at `address`; None: it serves nothing, if it runs.

    `meant`: which one it must be; None: whichever is there. `open_mark`: gives what is changed
    where no daemon answers; None where that can't be. `daemon`: the option that names it, for
    commands that are proposed.
    """

    address: Endpoint | None
    source: str
    meant: DaemonIdentity | None
    open_mark: Callable[[], PauseMark] | None
    daemon: str

    def pause(self, limit_s: float) -> None:
        """Return when nothing is delivered any more.

        Raises ConfigError for an unknown source, OperatorError, TransientError (the lake; no answer
        within the limit).
        """
        if self._runs():
            self._pause_by_daemon(limit_s)
            return
        since = asyncio.run(self._mark().put(datetime.now(UTC)))
        if self._runs():  # it has been started meanwhile, and may have looked before
            self._pause_by_daemon(limit_s)
            return
        typer.echo(f"source {self.source}: paused since {_time(since)}; {self._nobody}")
        typer.echo(f"  resume it with: {self._resume}")

    def resume(self, limit_s: float) -> None:
        """Return when the source is begun again. Raises as `pause`."""
        if self._runs():
            self._resume_by_daemon(limit_s)
            return
        was_paused = asyncio.run(self._mark().clear())
        if self._runs():
            self._resume_by_daemon(limit_s)
            return
        what = "resumed" if was_paused else "was not paused"
        typer.echo(f"source {self.source}: {what}; {self._nobody}")

    def _mark(self) -> PauseMark:
        if self.open_mark is None:
            raise OperatorError(
                f"no ingestd daemon answers on {self.address}",
                remedy="say with --config where the lake is: it is kept there",
            )
        return self.open_mark()

    @property
    def _nobody(self) -> str:
        if self.address is None:
            return 'http.listen is "off": a daemon that runs takes notice at its next SIGHUP'
        return f"no daemon answers on {self.address}: the next to be started goes by that"

    @property
    def _resume(self) -> str:
        return f"ingestd resume {self.source} {self.daemon}"

    def _runs(self) -> bool:
        """Return whether the daemon answers. Raises OperatorError if it is another."""
        if self.address is None:
            return False
        found = fetch_status(self.address)
        if found is None:
            return False
        if self.meant is not None:
            self.meant.require(self.address, found)
        if self.source not in found["sources"]:
            there = ", ".join(sorted(found["sources"]))
            raise ConfigError(f"sources.{self.source}: no such source; there is {there}")
        return True

    def _pause_by_daemon(self, limit_s: float) -> None:
        assert self.address is not None
        since = request_pause(self.address, self.source)
        found = self._await(lambda told: told["state"] == "paused", limit_s, "still delivers")
        kept = found["retained_bytes"]
        wal = "" if kept is None else f"; {size(kept)} of WAL are kept for it"
        typer.echo(f"source {self.source}: paused since {_time(since)}{wal}")
        typer.echo(f"  resume it with: {self._resume}")

    def _resume_by_daemon(self, limit_s: float) -> None:
        assert self.address is not None
        was_paused = request_resume(self.address, self.source)
        self._await(lambda told: told["state"] != "paused", limit_s, "is still paused")
        what = "resumed; it goes on where it was" if was_paused else "was not paused"
        typer.echo(f"source {self.source}: {what}")

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
                    remedy="the daemon goes on with it: see `ingestd status`",
                )
            time.sleep(LOOK_EVERY_S)


def _time(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
