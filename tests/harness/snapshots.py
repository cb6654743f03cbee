"""`ingestd snapshot` as a person would run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.harness.command_line import run_command

if TYPE_CHECKING:
    from ingestd.testing.embedded.daemon import Daemon

LIMIT_S = 60


def ask_for_snapshot(daemon: Daemon, *tables: str, source: str = "shop") -> None:
    """Ask the running daemon to read these tables anew; do not wait for it."""
    done = run_command(daemon.config_path, "snapshot", source, *tables, "--no-wait")
    assert done.returncode == 0, f"{done.stderr}\n{daemon.tail()}"
