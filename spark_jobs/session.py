"""Spark sessions that read and write Delta tables: local, by spark-submit, or by Spark Connect."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ingestd.model.errors import OperatorError
from spark_jobs.pairs import Pair, ensure_pair, ensure_variant, installed, pair_of, pairs_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyspark.sql import SparkSession

PARQUET_SETTINGS: Mapping[str, str] = {
    f"spark.sql.parquet.{kind}RebaseModeIn{way}": "CORRECTED"
    for kind in ("datetime", "int96")
    for way in ("Read", "Write")
}
"""Dates in files are those of today's calendar, as other engines write them.

Spark 3.5 refuses dates before 1582 in files that it did not write, and with LEGACY shifts them.
"""
DELTA_SETTINGS: Mapping[str, str] = {
    **PARQUET_SETTINGS,
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
VALUE_SETTINGS: Mapping[str, str] = {
    **PARQUET_SETTINGS,
    "spark.sql.ansi.doubleQuotedIdentifiers": "false",
    "spark.sql.caseSensitive": "false",
    "spark.sql.defaultCatalog": "spark_catalog",
    "spark.sql.legacy.timeParserPolicy": "CORRECTED",
    "spark.sql.parquet.binaryAsString": "false",
    "spark.sql.parser.escapedStringLiterals": "false",
    "spark.sql.parser.quotedRegexColumnNames": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.storeAssignmentPolicy": "ANSI",
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
    "spark.sql.variable.substitute": "false",
}
"""What decides how values are read, compared and written, as the jobs need it."""
LOCAL_SETTINGS: Mapping[str, str] = {
    **DELTA_SETTINGS,
    # a small machine: few partitions, no UI, a JVM that starts fast rather than runs long
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.driver.memory": "2g",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:ReservedCodeCacheSize=256m",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # loopback only
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
}


def job_session(
    app_name: str,
    *,
    remote: str | None = None,
    settings: Mapping[str, str] | None = None,
    needs_driver: bool = False,
) -> SparkSession:
    """Return the session in which a job runs, however the job was started.

    A session that this process already has is used as it is (`running_session`), unless `remote`
    is given: that of a notebook, or of a cluster's task. `remote` (or SPARK_REMOTE in the
    environment) names a Spark Connect server. Under spark-submit it is spark-submit's session, with
    its master and jars. Otherwise it is local (`local_session`). `settings` are applied to a
    session that is created here, except on a Connect server. `needs_driver`: refuse a Connect
    server, because the job runs in the driver. Raises OperatorError, also for a version of Spark or
    Delta that these jobs are not written for.
    """
    running = None if remote else running_session()
    remote = remote or os.environ.get("SPARK_REMOTE")
    if needs_driver:
        ensure_driver(app_name, running, remote)
    if running is not None:
        session = running
    elif remote:
        session = _connect(app_name, remote)
    elif _IS_SUBMITTED in os.environ:
        ensure_pair(starts_java=False)
        session = _submitted(app_name, settings or {})
    else:
        ensure_pair()
        session = local_session(app_name, settings=settings)
    require_versions(session, with_delta=needs_driver)
    _log_no_statistics(session)
    return session


@contextmanager
def session_of_job(given: SparkSession) -> Iterator[SparkSession]:
    """Yield a session for a job's own reads and writes (`derived_session`).

    The given one keeps its settings, and is the thread's active session again at the end.
    """
    from py4j.protocol import Py4JError  # noqa: PLC0415 - only where pyspark is installed
    from pyspark.errors import PySparkException  # noqa: PLC0415

    try:
        yield derived_session(given)
    finally:
        with suppress(Py4JError, PySparkException, AttributeError, ConnectionError, EOFError):
            _make_active(given)


def derived_session(
    given: SparkSession, settings: Mapping[str, str] = MappingProxyType({})
) -> SparkSession:
    """Return a new session with the settings of the given one: catalogs, credentials, partitions.

    Its own are those that decide what values mean, and `settings`. A new session of Spark has only
    the settings with which Spark was started, not those that were made since. It is this thread's
    active session then.
    """
    from pyspark.errors import PySparkException  # noqa: PLC0415 - only where it is installed

    from spark_jobs.delta_log.commits import OF_A_COMMIT  # noqa: PLC0415 - imports py4j

    session: SparkSession = given.newSession()
    own = _settings_of(session)
    for name, value in _settings_of(given).items():
        if own.get(name) != value:
            with suppress(PySparkException):  # of Spark's start: it is the same for both
                session.conf.set(name, value)
    for name in OF_A_COMMIT:  # with those of the given one, Delta would skip a job's commits
        session.conf.unset(name)
    ansi = str(not session.version.startswith("3.")).lower()  # each version's own default
    for name, value in {**VALUE_SETTINGS, "spark.sql.ansi.enabled": ansi, **settings}.items():
        session.conf.set(name, value)
    _make_active(session)
    return session


def _make_active(session: SparkSession) -> None:
    """Make a session the thread's active one: Spark 3.5 builds columns in its ANSI mode."""
    session.createDataFrame([], "id long")  # the public call that does it


def _settings_of(session: SparkSession) -> dict[str, str]:
    found = {row["key"]: row["value"] for row in session.sql("SET").collect()}
    hidden = [name for name, value in found.items() if "(redacted)" in value]  # secrets
    return found | {name: str(session.conf.get(name)) for name in hidden}


def ensure_session_has_variant() -> None:
    """Raise OperatorError if the Spark of the coming session has no VARIANT. Starts no JVM."""
    running = running_session()
    version = installed().spark if running is None else running.version
    if version:  # else `job_session` reports it
        ensure_variant(version)


def running_session() -> SparkSession | None:
    """Return the session that this process has: the thread's own, else the first; None without one.

    Its owner stops it and sets its settings, not the job.
    """
    if "pyspark" not in sys.modules:
        return None
    try:
        from pyspark.errors import PySparkException  # noqa: PLC0415 - only where it is installed
        from pyspark.sql import SparkSession  # noqa: PLC0415
    except ImportError:  # `job_session` says what to install
        return None
    try:
        session: SparkSession = SparkSession.active()
    except PySparkException:
        return None
    context = getattr(session, "_sc", None)
    return session if context is None or context._jsc is not None else None  # noqa: SLF001 - stopped


def _jvm_of(session: SparkSession) -> Any:  # noqa: ANN401 - py4j's view has no types
    """Return the JVM of a session; None for one of Spark Connect."""
    return getattr(session, "_jvm", None)


def ensure_driver(app_name: str, running: SparkSession | None, remote: str | None) -> None:
    """Raise OperatorError unless the job's process is the driver of a Spark with open-source Delta.

    `running`: the session that the process has; `remote`: the address of a Connect server.
    """
    if _ON_DATABRICKS in os.environ:
        raise OperatorError(
            f"{app_name} can't run on Databricks: its Delta is not the open-source one, and the job"
            " was never tried with it",
            remedy="run it on a cluster with open-source Delta that reaches the same lake;"
            " Databricks can read its tables (docs/platforms/databricks.md)",
        )
    if bool(remote) if running is None else _jvm_of(running) is None:
        raise OperatorError(
            f"{app_name} can't run on a Spark Connect server",
            remedy="start it by spark-submit, or without --remote and SPARK_REMOTE; on Databricks,"
            " serverless compute and clusters in standard access mode are such servers",
        )


_ON_DATABRICKS = "DATABRICKS_RUNTIME_VERSION"
"""Databricks sets it for each Python process of a cluster."""

_OF_SNAPSHOTS = ("org.apache.spark.sql.delta.Snapshot", "org.apache.spark.sql.delta.DeltaLog")
"""Delta's loggers that log files with their statistics (row values) at INFO."""


def _log_no_statistics(session: SparkSession) -> None:
    """Keep statistics out of the driver's log, whose level is INFO by default.

    Not possible on a Connect server, or if Spark logs by another library than log4j 2.
    """
    from py4j.protocol import Py4JError  # noqa: PLC0415 - only where pyspark is installed

    from spark_jobs.accelerator.jvm import java_class  # noqa: PLC0415 - imports py4j

    if _jvm_of(session) is None:
        return
    with suppress(Py4JError, TypeError):
        warn = java_class(session, "org.apache.logging.log4j.Level").WARN
        for name in _OF_SNAPSHOTS:
            java_class(session, "org.apache.logging.log4j.core.config.Configurator").setLevel(
                name, warn
            )


_IS_SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""spark-submit sets it for the Python process that it starts."""


def _connect(app_name: str, remote: str) -> SparkSession:
    if importlib.util.find_spec("pyspark") is None:
        raise OperatorError("pyspark is not installed", remedy="pip install 'pyspark[connect]'")
    from pyspark.errors import PySparkException  # noqa: PLC0415 - only where it is installed
    from pyspark.sql import SparkSession  # noqa: PLC0415

    try:
        session: SparkSession = SparkSession.builder.remote(remote).appName(app_name).getOrCreate()
        session.version  # noqa: B018 - asks the server
    except (ImportError, PySparkException) as error:
        message = str(error).strip().splitlines()[0]
        raise OperatorError(
            f"the Spark Connect server {remote.split(';', 1)[0]} can't be used: {message}",
            remedy="check that it runs and can be reached from here; the client needs: pip install"
            " 'pyspark[connect]'",
        ) from error
    return session


def _submitted(app_name: str, settings: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession  # noqa: PLC0415 - only where it is installed

    builder = SparkSession.builder.appName(app_name)
    for name, value in {**DELTA_SETTINGS, **settings}.items():
        builder = builder.config(name, value)
    session: SparkSession = builder.getOrCreate()
    return session


def require_versions(session: SparkSession, *, with_delta: bool = True) -> None:
    """Raise OperatorError unless Spark and (if it can be read) Delta are a known pair.

    `with_delta`: False for a job that reads and writes no table by Spark.
    """
    fit = pairs_of(session.version)
    jvm = _jvm_of(session) if with_delta else None
    if jvm is None:  # Connect: a wrong Delta fails when a table is read
        return
    found = _delta_version(jvm)
    if found is None or pair_of(session.version, found) is None:
        needed = " or ".join(pair.delta for pair in fit)
        raise OperatorError(
            f"Spark {session.version} needs Delta {needed}; this session has {found or 'none'}",
            remedy=f"spark-submit --packages {fit[0].package} ..., and no other Delta in its jars",
        )


def _delta_version(jvm: Any) -> str | None:  # noqa: ANN401 - py4j's view has no types
    from py4j.protocol import Py4JError  # noqa: PLC0415 - only where pyspark is installed

    try:
        return str(getattr(jvm.io.delta, "package").VERSION())  # noqa: B009 - a Scala package object
    except (Py4JError, TypeError):
        return None


def local_session(
    app_name: str, *, settings: Mapping[str, str] | None = None, master: str = "local[2]"
) -> SparkSession:
    """Return this process's Spark session with Delta; `settings` override the local ones.

    Uses Delta's jars in the Ivy or Maven cache, which needs no network; else Spark fetches them.
    Raises OperatorError without Java, a pair of Spark and Delta that work together, or the jars.
    """
    pair = ensure_pair()
    with _alone_while_fetching(pair):
        session = _started(app_name, settings or {}, master, pair)
    session.sparkContext.setLogLevel("ERROR")
    return session


@contextmanager
def _alone_while_fetching(pair: Pair) -> Iterator[None]:
    """Wait while another process fetches Delta's jars: two at a time corrupt Ivy's cache."""
    if cached_jars(pair) is not None:
        yield
        return
    cache = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(cache) if cache else Path.home() / ".cache") / "ingestd"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "jars.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _started(app_name: str, settings: Mapping[str, str], master: str, pair: Pair) -> SparkSession:
    from pyspark.errors import PySparkRuntimeError  # noqa: PLC0415 - only where it is installed
    from pyspark.sql import SparkSession  # noqa: PLC0415

    # The JVM reads these when it starts; Python workers must be this Python.
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.master(master).appName(app_name)
    for name, value in {**LOCAL_SETTINGS, **_jar_settings(pair), **settings}.items():
        builder = builder.config(name, value)
    try:
        session: SparkSession = builder.getOrCreate()
    except PySparkRuntimeError as error:
        raise OperatorError(
            f"Spark did not start: {error}",
            remedy=f"see Spark's messages above; without network, put the jars of {pair.package}"
            " and of delta-storage into ~/.ivy2/jars",
        ) from error
    return session


def cached_jars(pair: Pair, home: Path | None = None) -> list[Path] | None:
    """Return Delta's jars in the Ivy and Maven caches below `home`; None if one is missing."""
    root, version = Path.home() if home is None else home, pair.releases[1]
    found = [_first_existing(_places(root, artifact, version)) for artifact in pair.jars]
    return [path for path in found if path is not None] if None not in found else None


def _jar_settings(pair: Pair) -> dict[str, str]:
    jars = cached_jars(pair)
    if jars is None:
        return {"spark.jars.packages": pair.package}
    # (not in `spark.jars`: each session would copy them)
    return {"spark.driver.extraClassPath": os.pathsep.join(map(str, jars))}


def _places(root: Path, artifact: str, version: str) -> Iterable[Path]:
    name = f"{artifact}-{version}.jar"
    for ivy in (".ivy2.5.2", ".ivy2"):
        yield root / ivy / "jars" / f"io.delta_{name}"
        yield root / ivy / "cache" / "io.delta" / artifact / "jars" / name
    yield root / ".m2" / "repository" / "io" / "delta" / artifact / version / name


def _first_existing(places: Iterable[Path]) -> Path | None:
    return next((path for path in places if path.exists()), None)
