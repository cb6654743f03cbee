"""`ingestd snapshot` as a person would run it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from ingestd.demo.daemon import module_environment

if TYPE_CHECKING:
    from ingestd.demo.daemon import Daemon

LIMIT_S = 60


def ask_for_snapshot(daemon: Daemon, *tables: str, source: str = "shop") -> None:
    """Ask the running daemon to read these tables anew; do not wait for it."""
    arguments = [source, *tables, "--no-wait", "-c", daemon.config_path.name]
    done = subprocess.run(
        [sys.executable, "-m", "ingestd", "snapshot", *arguments],
        cwd=daemon.folder,
        env=module_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stderr}\n{daemon.tail()}"
