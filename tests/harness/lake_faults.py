"""Faults of a lake's file system, as far as the present user can cause them."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator

IMPATIENT = (sys.executable, "-m", "tests.harness.impatient")
_LIMIT_S = 60
_PASSES = "-dac_override,-dac_read_search,-fowner,-linux_immutable"


def bound_by_permissions(program: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command that makes permissions apply to a program that root starts, too."""
    if os.getuid():
        return program
    return ("setpriv", f"--bounding-set={_PASSES}", f"--inh-caps={_PASSES}", *program)


def close_folder(folder: Path, *, yes: bool = True) -> None:
    """Make a folder and those below it read-only, or writable again."""
    for at, _, _ in os.walk(folder):
        Path(at).chmod(0o555 if yes else 0o755)


def limit_files(pid: int, nbytes: int | None) -> None:
    """Limit the size of a process's files; None removes the limit."""
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most if nbytes is None else nbytes, most))


def can_mount() -> bool:
    """Return whether this process can mount file systems."""
    if os.getuid() or shutil.which("mount") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        if _run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder):
            return False
        return not _run("umount", folder)


@contextmanager
def mounted(folder: Path, *, megabytes: int) -> Iterator[None]:
    """Mount a small file system at `folder` inside the block."""
    folder.mkdir(parents=True, exist_ok=True)
    size = f"size={megabytes}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    """Change a mounted file system: `size=64m`, `ro`, `rw`. Waits while files are written."""
    command = ("mount", "-o", f"remount,{options}", str(folder))
    await_until(lambda: _run(*command) == 0, _LIMIT_S, " ".join(command))


def _run(*command: str) -> int:
    return subprocess.run(command, capture_output=True, check=False).returncode
