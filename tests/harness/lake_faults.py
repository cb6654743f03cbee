"""What befalls a lake's file system, by whatever way the present user has."""

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
    """Give the command by which permissions hold for a program that root starts, too."""
    if os.getuid():
        return program
    return ("setpriv", f"--bounding-set={_PASSES}", f"--inh-caps={_PASSES}", *program)


def close_folder(folder: Path, *, yes: bool = True) -> None:
    """Let nobody write in a folder and in those below it; or let them again."""
    for at, _, _ in os.walk(folder):
        Path(at).chmod(0o555 if yes else 0o755)


def limit_files(pid: int, nbytes: int | None) -> None:
    """Let no file of a process become larger than that; None: let them again."""
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most if nbytes is None else nbytes, most))


def can_mount() -> bool:
    """Whether file systems can be mounted here."""
    if os.getuid() or shutil.which("mount") is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        if _run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder):
            return False
        return not _run("umount", folder)


@contextmanager
def mounted(folder: Path, *, megabytes: int) -> Iterator[None]:
    """Have a small file system there, for as long as it is used."""
    folder.mkdir(parents=True, exist_ok=True)
    size = f"size={megabytes}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    """Change a mounted file system: `size=64m`, `ro`, `rw`; not while files are being written."""
    command = ("mount", "-o", f"remount,{options}", str(folder))
    await_until(lambda: _run(*command) == 0, _LIMIT_S, " ".join(command))


def _run(*command: str) -> int:
    return subprocess.run(command, capture_output=True, check=False).returncode
