"""The running processes: from /proc, or from ps on systems without it."""

from __future__ import annotations

import subprocess
from pathlib import Path

_PROC = Path("/proc")


def children_of(pid: int) -> list[int]:
    """Return the pids of the direct children of `pid`."""
    return [child for child, (parent, _) in _table().items() if parent == pid]


def is_running(pid: int) -> bool:
    """Return whether `pid` runs; a zombie, which has ended but was not reaped, does not."""
    found = _table().get(pid)
    return found is not None and found[1] != "Z"


def _table() -> dict[int, tuple[int, str]]:
    """Return the parent's pid and the state's letter of each pid."""
    if (_PROC / "self" / "stat").exists():
        folders = [path for path in _PROC.iterdir() if path.name.isdigit()]
        read = {int(path.name): _read_stat(path / "stat") for path in folders}
        return {pid: found for pid, found in read.items() if found is not None}
    done = subprocess.run(
        ["ps", "-axo", "pid=,ppid=,state="],  # noqa: S607 - its path differs between systems
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    return {int(row[0]): (int(row[1]), row[2][0]) for row in rows}


def _read_stat(path: Path) -> tuple[int, str] | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None  # it ended meanwhile
    state, parent = text.rpartition(")")[2].split()[:2]  # the name before may contain anything
    return int(parent), state
