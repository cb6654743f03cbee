"""A Spark session on this machine that reads and writes Delta tables."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ingestd.errors import OperatorError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import SparkSession

DELTA_VERSION = "4.4.0"
DELTA_PACKAGE = f"io.delta:delta-spark_4.2_2.13:{DELTA_VERSION}"
_ARTIFACTS = ("delta-spark_4.2_2.13", "delta-storage")
"""The two jars that Delta needs beside Spark's own."""

JAVA_MAJOR = 17
_JAVA_REMEDY = (
    "apt install openjdk-17-jre-headless (or: sdk install java 17.0.15-tem), then set JAVA_HOME"
)
_PYSPARK_REMEDY = "pip install 'ingestd[spark]'"

LOCAL_SETTINGS: Mapping[str, str] = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # a small machine: few partitions, no UI, a JVM that starts fast rather than runs long
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # loopback only
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
}


def local_session(
    app_name: str, *, settings: Mapping[str, str] | None = None, master: str = "local[2]"
) -> SparkSession:
    """Start (or give) this process's Spark session with Delta; `settings` override the local ones.

    Takes Delta's jars from the Ivy or Maven cache if they are there (no network needed), else lets
    Spark fetch them. Raises OperatorError without Java 17, pyspark, or the jars.
    """
    require_spark()
    from pyspark.errors import PySparkRuntimeError  # noqa: PLC0415 - only where it is installed
    from pyspark.sql import SparkSession  # noqa: PLC0415

    # read when the JVM starts; Python workers must be this Python
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).appName(app_name)
    for name, value in {**LOCAL_SETTINGS, **_jar_settings(), **(settings or {})}.items():
        builder = builder.config(name, value)
    try:
        session: SparkSession = builder.getOrCreate()
    except PySparkRuntimeError as error:
        raise OperatorError(
            f"Spark did not start: {error}",
            remedy=f"its own messages are above; without network, put the jars of {DELTA_PACKAGE}"
            " and of delta-storage into ~/.ivy2.5.2/jars",
        ) from error
    session.sparkContext.setLogLevel("ERROR")
    return session


def require_spark() -> None:
    """Raise OperatorError, with the command that installs it, if Java or pyspark is missing."""
    if importlib.util.find_spec("pyspark") is None:
        raise OperatorError("pyspark is not installed", remedy=_PYSPARK_REMEDY)
    found = java_major()
    if found is None:
        raise OperatorError(f"Spark needs Java {JAVA_MAJOR}; there is none", remedy=_JAVA_REMEDY)
    if found < JAVA_MAJOR:
        raise OperatorError(f"Spark needs Java {JAVA_MAJOR}, not {found}", remedy=_JAVA_REMEDY)


def java_major() -> int | None:
    """Give the major version of the Java that Spark would take (JAVA_HOME, PATH); None if none."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None or not Path(java).exists():
        return None
    done = subprocess.run(  # noqa: S603 - the Java that Spark would start
        [java, "-version"], capture_output=True, text=True, check=False
    )
    match = re.search(r'version "(?:1\.)?(\d+)', done.stderr)
    return None if match is None else int(match[1])


def cached_jars(home: Path | None = None) -> list[Path] | None:
    """Find Delta's jars in the Ivy and Maven caches below `home`; None unless all are there."""
    root = Path.home() if home is None else home
    found = [_first_existing(_places(root, artifact)) for artifact in _ARTIFACTS]
    return [path for path in found if path is not None] if None not in found else None


def _jar_settings() -> dict[str, str]:
    jars = cached_jars()
    if jars is None:
        return {"spark.jars.packages": DELTA_PACKAGE}
    return {"spark.jars": ",".join(map(str, jars))}


def _places(root: Path, artifact: str) -> Iterable[Path]:
    name = f"{artifact}-{DELTA_VERSION}.jar"
    for ivy in (".ivy2.5.2", ".ivy2"):
        yield root / ivy / "jars" / f"io.delta_{name}"
        yield root / ivy / "cache" / "io.delta" / artifact / "jars" / name
    yield root / ".m2" / "repository" / "io" / "delta" / artifact / DELTA_VERSION / name


def _first_existing(places: Iterable[Path]) -> Path | None:
    return next((path for path in places if path.exists()), None)
