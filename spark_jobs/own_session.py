"""The sessions in which a job reads and writes, made from the one that it is given.

Settings, and with them the signature of a commit, belong to a session. So each thread that moves
tables has its own.
"""

from __future__ import annotations

import atexit
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException

from ingestd.model.errors import OperatorError
from spark_jobs.delta_log.commits import OF_A_COMMIT
from spark_jobs.delta_log.faults import SPARK_ERRORS
from spark_jobs.delta_log.tables import is_connect
from spark_jobs.session import PARQUET_SETTINGS, close_at_exit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

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


@contextmanager
def session_of_job(given: SparkSession) -> Iterator[SparkSession]:
    """Yield a session for a job's own reads and writes.

    It is a derived one (`derived_session`): the given one keeps its settings, and is the thread's
    active session again at the end. Where Spark makes no further session, it is the given one, and
    its settings are put back at the end: so the job must not use another one beside it.
    """
    own = _copy_of(given)
    before = _settings_of(given) if own is None else {}
    try:
        yield _prepared(given if own is None else own, {})
    finally:
        with suppress(*SPARK_ERRORS, AttributeError, ConnectionError, EOFError):
            if own is None:
                _put_back(given, before)
            _make_active(given)
        if own is not None:
            with suppress(*SPARK_ERRORS):
                release(own)


def derived_session(
    given: SparkSession, settings: Mapping[str, str] = MappingProxyType({})
) -> SparkSession:
    """Return a new session with the settings of the given one: catalogs, credentials, partitions.

    Its own are those that decide what values mean, and `settings`. It is this thread's active
    session then. Where Spark makes no further session, the given one gets the settings and is
    returned. Raises OperatorError if Spark refuses a setting.
    """
    return _prepared(_copy_of(given) or given, settings)


def release(session: SparkSession) -> None:
    """Release a derived session of a Connect server, which would keep it for an hour."""
    if is_connect(session):
        session.client.release_session()
        session.client.close()
        atexit.unregister(session.client.close)


def _copy_of(given: SparkSession) -> SparkSession | None:
    """Return a new session with all settings of a session; None where Spark makes none.

    A Connect server copies a session from Spark 4.1 on.
    """
    if is_connect(given):
        return _clone_of(given)
    session: SparkSession = given.newSession()
    # (it has only the settings with which Spark was started, not those that were made since)
    own = _settings_of(session)
    _set_all(session, {k: v for k, v in _settings_of(given).items() if own.get(k) != v})
    return session


def _clone_of(given: SparkSession) -> SparkSession | None:
    clone = getattr(given, "cloneSession", None)
    if clone is None:
        return None
    import grpc  # noqa: PLC0415 - where there is a Connect session, there is grpc

    try:
        made: SparkSession = clone()
    except (PySparkException, grpc.RpcError):  # a managed server that refuses it
        return None
    close_at_exit(made)
    return made


def _prepared(session: SparkSession, settings: Mapping[str, str]) -> SparkSession:
    """Return a session with the settings of a job, as this thread's active one."""
    ansi = str(not session.version.startswith("3.")).lower()  # each version's own default
    # (with those of a commit that the given one has, Delta would skip a job's commits)
    tried = dict.fromkeys(OF_A_COMMIT, "0")
    for name, value in {
        **tried,
        **VALUE_SETTINGS,
        "spark.sql.ansi.enabled": ansi,
        **settings,
    }.items():
        try:
            session.conf.set(name, value)
        except PySparkException as error:
            raise OperatorError(
                f"this Spark lets no job set {name}, which decides what is read or written",
                remedy="run the job on a cluster of your own; Databricks' serverless compute lets"
                " jobs set few",
            ) from error
    for name in OF_A_COMMIT:
        session.conf.unset(name)
    _make_active(session)
    return session


def _set_all(session: SparkSession, values: Mapping[str, str]) -> None:
    for name, value in values.items():
        with suppress(PySparkException):  # of Spark's start: it is the same for all sessions
            session.conf.set(name, value)


def _put_back(session: SparkSession, before: Mapping[str, str]) -> None:
    """Make the settings of a session what they were."""
    now = _settings_of(session)
    _set_all(session, {k: v for k, v in before.items() if now.get(k) != v})
    for name in now.keys() - before.keys():
        with suppress(PySparkException):
            session.conf.unset(name)


def _make_active(session: SparkSession) -> None:
    """Make a session the thread's active one: Spark 3.5 builds columns in its ANSI mode."""
    if not is_connect(session):
        session.createDataFrame([], "id long")  # the public call that does it


def _settings_of(session: SparkSession) -> dict[str, str]:
    found = {row["key"]: row["value"] for row in session.sql("SET").collect()}
    hidden = [name for name, value in found.items() if "(redacted)" in value]  # secrets
    return found | {name: str(session.conf.get(name)) for name in hidden}
