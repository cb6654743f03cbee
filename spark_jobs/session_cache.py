"""An archive of Spark's and Delta's classes, parsed and verified, so that a JVM starts faster.

Loading about ten thousand classes takes a third of a short job. `python -m spark_jobs.warm_up`
creates the archive (about 200 MB) once for each version of Java, Spark and Delta. Local sessions
use it if it exists; without it they work as well. It is moved into place when it is complete,
because a truncated one would keep the JVM from starting.
Source: Java's "Class Data Sharing" (`-XX:ArchiveClassesAtExit`, JEP 350).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_SILENT = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
"""Don't log a mismatched archive, which is no fault, or classes that can't be archived."""
_KEPT = 3


def archive_path(java: str, classes: Sequence[Path]) -> Path:
    """Return the path of the archive for a Java (`java -version`) and jars or folders of jars.

    Java accepts an archive only for exactly the files, by path and time, that it was made from.
    """
    parts = [java, *(f"{path} {path.stat().st_mtime_ns}" for path in classes)]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / f"spark-{digest}.jsa"


def options_to_use(archive: Path) -> str:
    """Return the JVM's options to use an archive; empty if it does not exist."""
    return f" -XX:SharedArchiveFile={archive} {_SILENT}" if _is_usable(archive) else ""


def options_to_make(archive: Path) -> str:
    """Return the options with which a JVM writes its classes to an archive when it exits."""
    return f" -XX:ArchiveClassesAtExit={archive} {_SILENT}"


def _is_usable(archive: Path) -> bool:
    with suppress(OSError):  # a folder that can't be searched
        return archive.exists() and has_plain_path(archive)
    return False


def has_plain_path(archive: Path) -> bool:
    """Return whether a JVM's options can contain its path: Spark splits them at blanks."""
    return " " not in str(archive)


def remove_older(archive: Path) -> None:
    """Remove all but the newest few of the other archives: their environments may be obsolete."""
    others = sorted(archive.parent.glob("spark-*.jsa"), key=lambda path: path.stat().st_mtime)
    for path in others[:-_KEPT]:
        path.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Return the folder for files that are kept between runs."""
    found = os.environ.get("XDG_CACHE_HOME")
    return (Path(found) if found else Path.home() / ".cache") / "ingestd"
