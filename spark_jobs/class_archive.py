"""An archive of Spark's and Delta's classes, parsed and verified: a JVM that maps it starts sooner.

Loading some ten thousand classes takes a third of a short job. `python -m spark_jobs.warm_up` makes
the archive (some 200 MB) once for a Java, a Spark and a Delta; local sessions take it if it is
there. Without it, or with one that does not fit, everything works as well.
Source: Java's "Class Data Sharing" (`-XX:ArchiveClassesAtExit`, JEP 350).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

_SILENT = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
"""An archive that does not fit is no fault, and classes that can't be in one are known."""


def archive_path(java: str, spark: str, jars: Sequence[Path]) -> Path:
    """Name the archive for a Java (what `java -version` says), a Spark's version and jars."""
    parts = [java, spark, *(str(jar) for jar in jars)]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return _cache_home() / "ingestd" / f"spark-{digest}.jsa"


def options_to_use(archive: Path) -> str:
    """Give the JVM's options for an archive; none if it is not there."""
    return f" -XX:SharedArchiveFile={archive} {_SILENT}" if _is_usable(archive) else ""


def options_to_make(archive: Path) -> str:
    """Give the options with which a JVM writes its classes to an archive when it ends."""
    return f" -XX:ArchiveClassesAtExit={archive} {_SILENT}"


def _is_usable(archive: Path) -> bool:
    # Spark splits its options at blanks.
    return archive.exists() and " " not in str(archive)


def _cache_home() -> Path:
    found = os.environ.get("XDG_CACHE_HOME")
    return Path(found) if found else Path.home() / ".cache"
