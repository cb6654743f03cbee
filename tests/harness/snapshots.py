"""`ingestd snapshot`, run as a user runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.harness.command_line import run_command

if TYPE_CHECKING:
    from ingestd.testing.embedded.daemon import Daemon

LIMIT_S = 60


def ask_for_snapshot(daemon: Daemon, *tables: str, source: str = "shop") -> None:
    """Request that the running daemon re-read these tables; do not wait for it."""
    done = run_command(daemon.config_path, "snapshot", source, *tables, "--no-wait")
    assert done.returncode == 0, f"{done.stderr}\n{daemon.tail()}"
