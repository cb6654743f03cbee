"""Spark sessions that read and write Delta tables: local, by spark-submit, or by Spark Connect."""

from __future__ import annotations

import atexit
import fcntl
import importlib.util
import os
import sys
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from ingestd.model.errors import OperatorError
from spark_jobs.delta_log.tables import ON_DATABRICKS, has_known_classes, is_connect
from spark_jobs.pairs import (
    Pair,
    ensure_pair,
    ensure_variant,
    installed,
    minor,
    pair_of,
    pairs_of,
)

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
_DELTA: Mapping[str, str] = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
DELTA_SETTINGS: Mapping[str, str] = {**PARQUET_SETTINGS, **_DELTA}
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
    needs_delta: bool = False,
    reach_s: float = 20.0,
) -> SparkSession:
    """Return the session in which a job runs, however the job was started.

    A session that this process already has is used as it is (`running_session`), unless `remote`
    is given: that of a notebook, or of a cluster's task. `remote` (or SPARK_REMOTE in the
    environment) names a Spark Connect server. Under spark-submit it is spark-submit's session, with
    its master and jars. Otherwise it is local (`local_session`). `settings` are applied to a
    session that is created here, except on a Connect server. `needs_delta`: the job reads or writes
    tables by Spark. `reach_s`: how long a Connect server may take to answer. (Its client alone
    tries for ten minutes.) Raises OperatorError, also for a version of Spark or Delta that these
    jobs are not written for.
    """
    running = None if remote else running_session()
    remote = remote or os.environ.get("SPARK_REMOTE")
    if running is not None:
        session = running
    elif remote:
        session = _connect(app_name, remote, reach_s)
    elif _IS_SUBMITTED in os.environ:
        ensure_pair(starts_java=False)
        session = _submitted(app_name, settings or {})
    else:
        ensure_pair()
        session = local_session(app_name, settings=settings)
    require_versions(session, with_delta=needs_delta)
    if needs_delta and ON_DATABRICKS in os.environ:
        structlog.get_logger("ingestd").warning("databricks.not_tried", spark=session.version)
    _log_no_statistics(session)
    return session


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
    if is_connect(session) or session.sparkContext._jsc is not None:  # noqa: SLF001
        return session
    return None  # it was stopped


_OF_SNAPSHOTS = ("org.apache.spark.sql.delta.Snapshot", "org.apache.spark.sql.delta.DeltaLog")
"""Delta's loggers that log files with their statistics (row values) at INFO."""


def _log_no_statistics(session: SparkSession) -> None:
    """Keep statistics out of the driver's log, whose level is INFO by default.

    Not possible on a Connect server, or if Spark logs by another library than log4j 2.
    """
    if is_connect(session):
        return
    from py4j.protocol import Py4JError  # noqa: PLC0415 - a client of Spark Connect has none

    from spark_jobs.accelerator.jvm import java_class  # noqa: PLC0415 - imports py4j

    with suppress(Py4JError, TypeError):
        warn = java_class(session, "org.apache.logging.log4j.Level").WARN
        for name in _OF_SNAPSHOTS:
            java_class(session, "org.apache.logging.log4j.core.config.Configurator").setLevel(
                name, warn
            )


_IS_SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""spark-submit sets it for the Python process that it starts."""


def _connect(app_name: str, remote: str, reach_s: float) -> SparkSession:
    shown = remote.split(";", 1)[0]  # without a token
    if not remote.startswith("sc://"):
        raise OperatorError(
            f"{shown} is not the address of a Spark Connect server",
            remedy="--remote sc://HOST:15002 (or SPARK_REMOTE)",
        )
    if importlib.util.find_spec("pyspark") is None:
        raise OperatorError("pyspark is not installed", remedy="pip install 'pyspark[connect]'")
    from pyspark.errors import PySparkException  # noqa: PLC0415 - only where it is installed
    from pyspark.sql import SparkSession  # noqa: PLC0415

    try:
        _ensure_reached(remote, reach_s)
        session: SparkSession = SparkSession.builder.remote(remote).appName(app_name).getOrCreate()
        session.version  # noqa: B018 - asks the server
    except (ImportError, PySparkException, TimeoutError, ValueError) as error:
        message = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise OperatorError(
            f"the Spark Connect server {shown} can't be used: {message}",
            remedy="check that it runs and can be reached from here; the client needs: pip install"
            " 'pyspark[connect]'",
        ) from error
    close_at_exit(session)
    return session


def close_at_exit(session: SparkSession) -> None:
    """Close a Connect session's channel before the process ends: later, that may never end.

    (By then, the threads of the channel have ended, and a call may still be open.)
    """
    atexit.register(session.client.close)


def _ensure_reached(remote: str, reach_s: float) -> None:
    """Raise TimeoutError unless a Connect server answers, by the channel that its client uses."""
    from pyspark.sql.connect import client  # noqa: PLC0415 - raises ImportError for what it lacks

    builder: Any = getattr(client, "DefaultChannelBuilder", None) or client.ChannelBuilder  # (3.5)
    import grpc  # noqa: PLC0415 - the client has found it installed

    with builder(remote).toChannel() as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=reach_s)
        except grpc.FutureTimeoutError:
            message = f"it did not answer within {reach_s:.0f} s"
            raise TimeoutError(message) from None


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
    if is_connect(session):
        _ensure_client(session.version)
        # (a client warns of them whenever they are set, to whatever value)
        warnings.filterwarnings("ignore", "The SQL config '.*' has been deprecated", UserWarning)
    if not with_delta:
        return
    if not has_known_classes(session):
        _ensure_delta(session, fit[0])
        return
    found = _delta_version(session._jvm)  # noqa: SLF001 - there is no public way
    if found is None or pair_of(session.version, found) is None:
        needed = " or ".join(pair.delta for pair in fit)
        raise OperatorError(
            f"Spark {session.version} needs Delta {needed}; this session has {found or 'none'}",
            remedy=f"spark-submit --packages {fit[0].package} ..., and no other Delta in its jars",
        )


def _ensure_client(server: str) -> None:
    """Raise OperatorError if the Connect client is newer than its server.

    (Servers know the calls of earlier clients, but not of later ones.)
    """
    from pyspark import __version__  # noqa: PLC0415 - only where it is installed

    own, theirs = (tuple(map(int, minor(v).split("."))) for v in (__version__, server))
    if own > theirs:
        raise OperatorError(
            f"PySpark {__version__} is newer than the Spark Connect server, {server}",
            remedy=f"pip install 'pyspark[connect]=={server}'",
        )


_LACKS_DELTA = "DELTA_CONFIGURE_SPARK_SESSION_WITH_EXTENSION_AND_CATALOG"


def _ensure_delta(session: SparkSession, pair: Pair) -> None:
    """Raise OperatorError if a session, of whose Delta no version can be read, has none.

    A wrong version fails when a table is read.
    """
    from pyspark.errors import ParseException, PySparkException  # noqa: PLC0415

    from spark_jobs.delta_log.statements import history_of  # noqa: PLC0415 - not needed earlier
    from spark_jobs.spark_errors import condition_of  # noqa: PLC0415

    try:
        history_of(session, "/", 1)
    except PySparkException as error:  # (that there is no such table is what Delta answers)
        if isinstance(error, ParseException) or condition_of(error) == _LACKS_DELTA:
            settings = " ".join(f"--conf {name}={value}" for name, value in _DELTA.items())
            raise OperatorError(
                f"this Spark {session.version} has no Delta, or not its SQL",
                remedy=f"start its server with --packages {pair.package} {settings}",
            ) from error


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
