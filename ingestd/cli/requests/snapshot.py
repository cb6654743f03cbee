"""`ingestd snapshot`: requests snapshots from the running daemon and shows their progress."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from ingestd.http.snapshot_client import ask_for_snapshot, ask_to_cancel, follow
from ingestd.model.printable_text import printable
from ingestd.terminal.echo import echo
from ingestd.terminal.snapshot import SnapshotBars, SnapshotLines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ingestd.http.client import Endpoint
    from ingestd.http.daemon_identity import DaemonIdentity

EXIT_INTERRUPTED = 130
"""The shells' code for an end by Ctrl-C."""


@dataclass(frozen=True, slots=True)
class SnapshotCommand:
    """Requests or cancels snapshots of tables of a source of the daemon at `address`.

    `expected`: the daemon that must answer; None: any. `daemon`: the option that names the daemon,
    for the commands in the output.
    """

    address: Endpoint
    source: str
    tables: Sequence[str]
    expected: DaemonIdentity | None
    daemon: str

    def cancel(self) -> None:
        """Cancel the snapshots. Raises as `ask_to_cancel`."""
        names = ask_to_cancel(self.address, self.source, self.tables, expected=self.expected)
        echo(f"source {self.source}: cancelled the snapshot of {', '.join(names)}")

    def ask(self, where: str | None, wait_s: float | None) -> int:
        """Request a snapshot and follow it; return the exit code.

        `wait_s`: how long to follow it at most; None: not at all. Raises as `ask_for_snapshot` and
        `follow`.
        """
        following = ask_for_snapshot(
            self.address, self.source, self.tables, where=where, expected=self.expected
        )
        names = ", ".join(following.tables)
        what = "a new snapshot of" if where is None else f"the rows where {where} of"
        echo(f"source {self.source}: requested {what} {names}")
        if wait_s is None:
            echo(f"  follow it with: {self._status}")
            return 0
        console = Console(highlight=False, emoji=False)
        display: SnapshotBars | SnapshotLines
        if console.is_terminal:
            display = SnapshotBars(self.source, len(following.tables), console)
        else:
            display = SnapshotLines(self.source, lambda line: echo(printable(f"  {line}")))
        try:
            with display:
                follow(self.address, following, wait_s, display)
        except KeyboardInterrupt:
            # Not on the console: interrupted while writing, it would repeat that output.
            echo(f"the daemon continues the snapshot; follow it with: {self._status}")
            echo(f"  or cancel it with: {self._cancel(following.remaining)}")
            return EXIT_INTERRUPTED
        return 0

    @property
    def _status(self) -> str:
        return f"ingestd status {self.daemon}" if self.expected is not None else self._curl

    @property
    def _curl(self) -> str:
        token = ' -H "Authorization: Bearer $INGESTD_HTTP_TOKEN"' if self.address.token else ""
        return f"curl{token} {self.address.url}/status"

    def _cancel(self, tables: Sequence[str]) -> str:
        words = shlex.join([self.source, *tables])
        return f"ingestd snapshot --cancel {words} {self.daemon}"
