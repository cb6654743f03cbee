"""An archive of Spark's and Delta's classes, parsed and verified: a JVM that maps it starts sooner.

Loading some ten thousand classes takes a third of a short job. `python -m spark_jobs.warm_up` makes
the archive (some 200 MB) once for a Java, a Spark and a Delta; local sessions take it if it is
there. Without it everything works as well. It is put in place whole: one that is cut off would keep
the JVM from starting.
Source: Java's "Class Data Sharing" (`-XX:ArchiveClassesAtExit`, JEP 350).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_SILENT = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
"""An archive that does not fit is no fault, and classes that can't be in one are known."""
_KEPT = 3


def archive_path(java: str, classes: Sequence[Path]) -> Path:
    """Name the archive for a Java (what `java -version` says) and these jars or folders of jars.

    Java takes an archive only for the very files, by their paths and times, that it was made of.
    """
    parts = [java, *(f"{path} {path.stat().st_mtime_ns}" for path in classes)]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / f"spark-{digest}.jsa"


def options_to_use(archive: Path) -> str:
    """Return the JVM's options for an archive; none if it is not there."""
    return f" -XX:SharedArchiveFile={archive} {_SILENT}" if _is_usable(archive) else ""


def options_to_make(archive: Path) -> str:
    """Return the options with which a JVM writes its classes to an archive when it ends."""
    return f" -XX:ArchiveClassesAtExit={archive} {_SILENT}"


def _is_usable(archive: Path) -> bool:
    with suppress(OSError):  # a folder that can't be searched
        return archive.exists() and has_plain_path(archive)
    return False


def has_plain_path(archive: Path) -> bool:
    """Return whether a JVM's options can name it: Spark splits them at blanks."""
    return " " not in str(archive)


def remove_older(archive: Path) -> None:
    """Remove the archives beside this one but for the newest few: of environments that are gone."""
    others = sorted(archive.parent.glob("spark-*.jsa"), key=lambda path: path.stat().st_mtime)
    for path in others[:-_KEPT]:
        path.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Name the folder for what is kept between runs."""
    found = os.environ.get("XDG_CACHE_HOME")
    return (Path(found) if found else Path.home() / ".cache") / "ingestd"
