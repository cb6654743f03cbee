"""The command line, run by tests as a user runs it, in a separate process."""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

from ingestd.testing.embedded.daemon import module_environment
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon

LIMIT_S = 120


def run_command(
    config: Path, *arguments: str, columns: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `ingestd ARGUMENTS -c CONFIG` in the config's folder. `columns`: the terminal's width."""
    width = {} if columns is None else {"COLUMNS": str(columns)}
    return subprocess.run(
        [sys.executable, "-m", "ingestd", *arguments, "-c", config.name],
        cwd=config.parent,
        env={**module_environment(), **width},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def snapshot_of(remedy: str) -> list[str]:
    """Return the arguments of the `ingestd snapshot` at the end of a remedy, with that word."""
    _, *arguments = shlex.split(remedy[remedy.rindex("ingestd snapshot ") :])
    return arguments


def await_verified(daemon: Daemon, limit_s: float) -> None:
    """Wait until `ingestd verify` finds the lake equal to the source."""
    told = ""

    def is_equal() -> bool:
        nonlocal told
        done = run_command(daemon.config_path, "verify", "shop")
        told = done.stdout + done.stderr
        return done.returncode == 0

    await_until(is_equal, limit_s, lambda: told + daemon.tail())
