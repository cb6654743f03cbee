"""The versions of Spark and Delta that work together, and those that are installed here.

Looked at before a JVM starts: a wrong pair fails only there, after 20 seconds, by an error of
Java's class loader. The Python packages' own requirements let some wrong pairs through.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ingestd.model.errors import OperatorError


@dataclass(frozen=True, slots=True)
class Pair:
    """A minor version of Spark and one of Delta for it.

    `releases`: those that the tests run with, of Spark and of Delta. `scala`, `artifact`: of
    Delta's jar. `java`: the lowest major version. `python`: the highest minor version of Python 3,
    None if not known. `others`: what pip must install besides.
    """

    releases: tuple[str, str]
    scala: str
    artifact: str
    java: int = 17
    python: int | None = None
    others: tuple[str, ...] = ()

    @property
    def spark(self) -> str:
        """Spark's minor version."""
        return minor(self.releases[0])

    @property
    def delta(self) -> str:
        """Delta's minor version."""
        return minor(self.releases[1])

    @property
    def name(self) -> str:
        """The pair, for people."""
        return f"Spark {self.spark} with Delta {self.delta}"

    @property
    def package(self) -> str:
        """Delta's package for spark-submit."""
        return f"io.delta:{self.artifact}:{self.releases[1]}"

    @property
    def jars(self) -> tuple[str, str]:
        """The artifacts that Delta needs in addition to Spark's own."""
        return self.artifact, "delta-storage"

    @property
    def requirements(self) -> tuple[str, ...]:
        """What pip installs for the pair."""
        lowest = {"3.5": "3.5.3"}.get(self.spark, self.spark)  # delta-spark's own requirement
        return (
            f"pyspark>={lowest},<{_after(self.spark)}",
            f"delta-spark>={self.delta},<{_after(self.delta)}",
            *self.others,
        )

    @property
    def installation(self) -> str:
        """The command that installs the pair."""
        return "pip install " + " ".join(f"'{name}'" for name in self.requirements)


_WITH_PANDAS = ("pandas>=2,<3",)
"""PySpark 3.5 passes Arrow's batches to Python only if pandas is installed."""

PAIRS = (
    Pair(("3.5.7", "3.2.1"), "2.12", "delta-spark_2.12", 8, 11, _WITH_PANDAS),
    Pair(("3.5.7", "3.3.2"), "2.12", "delta-spark_2.12", 8, 11, _WITH_PANDAS),
    Pair(("4.0.1", "4.0.1"), "2.13", "delta-spark_2.13"),
    Pair(("4.1.1", "4.1.0"), "2.13", "delta-spark_4.1_2.13"),
    Pair(("4.1.1", "4.2.0"), "2.13", "delta-spark_4.1_2.13"),
    Pair(("4.1.1", "4.3.0"), "2.13", "delta-spark_4.1_2.13"),
    Pair(("4.2.0", "4.4.0"), "2.13", "delta-spark_4.2_2.13"),
)
"""From the oldest to the newest: what `docs/spark-versions.md` says."""
NEWEST = PAIRS[-1]


def minor(version: str) -> str:
    """Return the first two numbers of a version."""
    return ".".join(version.split(".")[:2])


def _after(version: str) -> str:
    major, number = version.split(".")
    return f"{major}.{int(number) + 1}"


@dataclass(frozen=True, slots=True)
class Installed:
    """The versions that a session would use; None for what is not installed.

    `delta`: empty if the package `delta` does not say its version. `jars`: Spark's version and
    Scala's by the names of Spark's jars; None for a client that has none. `spark_home`: the folder
    of these jars, if the environment names it. `python`: the minor version of Python 3.
    """

    spark: str | None
    delta: str | None
    jars: tuple[str, str] | None
    spark_home: str | None
    java: int | None
    python: int
    has_pandas: bool


def installed() -> Installed:
    """Return what is installed here. Starts `java -version`, but no Spark."""
    pyspark = _pyspark()
    home = os.environ.get("SPARK_HOME")
    return Installed(
        spark=None if pyspark is None else pyspark[0],
        delta=_delta(),
        jars=None if pyspark is None else _jars_in(Path(home) if home else pyspark[1]),
        spark_home=home,
        java=java_major(),
        python=sys.version_info.minor,
        has_pandas=importlib.util.find_spec("pandas") is not None,
    )


def ensure_pair(found: Installed | None = None, *, starts_java: bool = True) -> Pair:
    """Return the pair that is installed. Raise OperatorError, with what to install, if none is.

    `starts_java`: False if a JVM runs already.
    """
    there = installed() if found is None else found
    if there.spark is None:
        raise OperatorError("pyspark is not installed", remedy="pip install 'ingestd[spark]'")
    # (Delta's Python package only says which jars to start with)
    pair = _for(there.spark, there.delta if starts_java else there.delta or "")
    if there.jars is not None and minor(there.jars[0]) != pair.spark:
        raise OperatorError(
            f"PySpark is {there.spark}, but the jars in SPARK_HOME ({there.spark_home}) are those"
            f" of Spark {there.jars[0]}",
            remedy="unset SPARK_HOME",
        )
    if there.jars is not None and there.jars[1] != pair.scala:
        raise OperatorError(
            f"this Spark is built with Scala {there.jars[1]}; {pair.name} needs {pair.scala}",
            remedy=pair.installation,
        )
    if pair.python is not None and there.python > pair.python:
        raise OperatorError(
            f"Spark {pair.spark} runs on Python 3.{pair.python} and earlier, not 3.{there.python}",
            remedy=f"{NEWEST.installation}  # or use Python 3.{pair.python}",
        )
    if pair.others and not there.has_pandas:
        raise OperatorError(
            f"pandas is not installed, which PySpark {pair.spark} needs",
            remedy=f"pip install '{pair.others[0]}'",
        )
    if starts_java:
        _ensure_java(pair, there.java)
    return pair


def ensure_variant(spark: str) -> None:
    """Raise OperatorError if this version of Spark has no VARIANT."""
    if int(minor(spark).split(".")[0]) < _FIRST_WITH_VARIANT:
        raise OperatorError(
            f"--variant needs Spark {_FIRST_WITH_VARIANT} or later, with its Delta; this one is"
            f" {spark}",
            remedy=f"{NEWEST.installation}  # or leave out --variant: jsonb stays text",
        )


_FIRST_WITH_VARIANT = 4


def pair_of(spark: str, delta: str) -> Pair | None:
    """Return the pair of two versions; None if they don't work together."""
    minors = minor(spark), minor(delta)
    return next((pair for pair in PAIRS if (pair.spark, pair.delta) == minors), None)


def pairs_of(spark: str) -> list[Pair]:
    """Return the pairs of a version of Spark, the best first. Raise OperatorError without one."""
    fit = [pair for pair in PAIRS if pair.spark == minor(spark)]
    if not fit:
        known = ", ".join(dict.fromkeys(pair.spark for pair in PAIRS))
        raise OperatorError(
            f"these jobs need Spark {known}; this one is {spark}",
            remedy=f"{NEWEST.installation}  # or a cluster of one of these versions",
        )
    return fit[::-1]


def _for(spark: str, delta: str | None) -> Pair:
    fit = pairs_of(spark)
    if delta == "":  # nothing is known: the session's own version is looked at once it runs
        return fit[0]
    if delta is None:
        raise OperatorError("delta-spark is not installed", remedy=fit[0].installation)
    found = pair_of(spark, delta)
    if found is None:
        needed = " or ".join(pair.delta for pair in fit)
        raise OperatorError(
            f"PySpark {spark} does not work with delta-spark {delta}: it needs Delta {needed}",
            remedy=fit[0].installation,
        )
    return found


def _ensure_java(pair: Pair, found: int | None) -> None:
    if found is None or found < pair.java:
        wanted = max(pair.java, 17)  # which every pair runs on
        raise OperatorError(
            f"Spark {pair.spark} needs Java {pair.java} or later; found {found or 'none'}",
            remedy=f"apt install openjdk-{wanted}-jre-headless (or: sdk install java"
            f" {wanted}.0.15-tem), then set JAVA_HOME",
        )


def _pyspark() -> tuple[str, Path] | None:
    """Return the version and folder of the PySpark that would be imported; None without one.

    It may be there without pip, also in a zip file, as spark-submit has it.
    """
    try:
        found = importlib.util.find_spec("pyspark")
    except ValueError:  # a module without a spec
        return None
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent
    text = found.loader.get_data(str(folder / "version.py")).decode()  # type: ignore[union-attr]
    match = re.search(r"__version__[^=\n]*=\s*['\"]([^'\"]+)", text)
    return (match[1] if match else ""), folder


def _delta() -> str | None:
    try:
        return importlib.metadata.version("delta-spark")
    except importlib.metadata.PackageNotFoundError:
        return None if importlib.util.find_spec("delta") is None else ""


def _jars_in(home: Path) -> tuple[str, str] | None:
    for jar in (home / "jars").glob("spark-core_*.jar"):
        match = re.fullmatch(r"spark-core_([\d.]+)-(.+)\.jar", jar.name)
        if match:
            return match[2], match[1]
    return None


def java_major() -> int | None:
    """Return the major version of Java that Spark would use (JAVA_HOME, PATH); None without one."""
    match = re.search(r'version "(?:1\.)?(\d+)', _java_version() or "")
    return None if match is None else int(match[1])


def _java_version() -> str | None:
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    return None if java is None or not Path(java).exists() else _version_line(java)


@cache
def _version_line(java: str) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603 - the Java that Spark would start
            [java, "-version"], capture_output=True, text=True, check=False
        )
    except OSError:  # a file with that name can't be started
        return None
    return done.stderr
