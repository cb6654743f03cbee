"""The commits in a Delta table's log, and the signatures of those that jobs made.

A job signs each commit in `userMetadata`, atomically with the rows. From the signatures a job knows
which epoch a table has reached, and whether another writer has changed the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError

from ingestd.lake.delta.commit import actions_in
from ingestd.lake.delta.log_files import MOST_COMMIT_BYTES
from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.plain_files import ensure_size
from ingestd.model.recorded import RecordError, read_json
from spark_jobs.delta_log.jvm import DELTA, HADOOP_PATH, java_class

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

_METADATA = "spark.databricks.delta.commitInfo.userMetadata"
_APP_ID = "spark.databricks.delta.write.txnAppId"
_APP_VERSION = "spark.databricks.delta.write.txnVersion"

_HARMLESS = frozenset(
    {
        "ADD CONSTRAINT",
        "CHANGE COLUMN",
        "CLUSTER BY",
        "COMPUTE STATS",
        "FSCK",
        "OPTIMIZE",
        "REORG",
        "SET TBLPROPERTIES",
        "UNSET TBLPROPERTIES",
        "UPGRADE PROTOCOL",
        "VACUUM END",
        "VACUUM START",
    }
)
"""Operations that leave the rows as they are."""

HISTORY_LIMIT = 200
_MISSING = "java.io.FileNotFoundException"

CHECKPOINTS: Mapping[str, str] = MappingProxyType({"delta.checkpointInterval": "50"})
"""Property of all tables that jobs create. A commit waits for its checkpoint's Spark job."""
TABLE_PROPERTIES: Mapping[str, str] = MappingProxyType(
    {**CHECKPOINTS, "delta.enableDeletionVectors": "true"}
)
"""Of mirrors and histories."""
MERGE_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "spark.sql.adaptive.enabled": "false",
        "spark.databricks.delta.snapshotPartitions": "1",
    }
)
"""Settings of the sessions that merge: small jobs must be planned and started quickly."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The author of a commit: a job of this name on this source, up to this epoch.

    `lake`: the id of the `_epochs` table that the epoch belongs to. `schema_version`: of the
    definition that the table was brought to.
    """

    job: str
    source: str
    lake: str
    epoch: int
    schema_version: int = 0

    def to_text(self) -> str:
        """Return the signature as `userMetadata`."""
        facts = {
            "ingestd": self.job,
            "source": self.source,
            "lake": self.lake,
            "epoch": self.epoch,
            "schema_version": self.schema_version,
        }
        return json.dumps(facts)

    @classmethod
    def parse(cls, text: object) -> Signature | None:
        """Return the signature in `userMetadata`; None if another writer made the commit."""
        try:
            found = read_json(text if isinstance(text, str) else "")
            job, source, lake = (found.field(n).text() for n in ("ingestd", "source", "lake"))
            version, epoch = (found.field(n).integer() for n in ("schema_version", "epoch"))
        except RecordError:
            return None
        return cls(job, source, lake, epoch, version)


@dataclass(frozen=True, slots=True)
class JobCommit:
    """A version of a table. `signature`: None if no ingestd job made it."""

    version: int
    operation: str
    signature: Signature | None

    @property
    def is_foreign(self) -> bool:
        """Return whether another writer may have changed rows in it."""
        return self.signature is None and self.operation not in _HARMLESS


@contextmanager
def signed(session: SparkSession, signature: Signature, app_id: str | None) -> Iterator[None]:
    """Sign the commits that this session makes inside the block.

    With an `app_id`, the commit is also a Delta transaction with version = epoch, so a write that
    the table already has is skipped. Write each table at most once then: Delta would skip a
    second write, too.
    """
    conf = session.conf
    try:
        conf.set(_METADATA, signature.to_text())
        if app_id is not None:
            conf.set(_APP_ID, app_id)
            conf.set(_APP_VERSION, str(signature.epoch))
        yield
    finally:
        for name in (_METADATA, _APP_ID, _APP_VERSION):
            conf.unset(name)


@contextmanager
def settings(session: SparkSession, values: Mapping[str, str]) -> Iterator[None]:
    """Set these values inside the block, then restore the earlier ones."""
    before = {name: session.conf.get(name, None) for name in values}
    try:
        for name, value in values.items():
            session.conf.set(name, value)
        yield
    finally:
        for name, earlier in before.items():
            if earlier is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, earlier)


def current_version(session: SparkSession, path: str) -> int:
    """Return the newest version of a table. Spark job: see `snapshot_of`."""
    return int(snapshot_of(session, path).version())


def newest_entry(session: SparkSession, path: str) -> int:
    """Return the newest version of a table, by the file names in its log; -1 without a table.

    Unlike `current_version`, this loads no snapshot of a newer version, which would cost a Spark
    job if another engine wrote it.
    """
    log = delta_log(session, path)
    found = int(log.unsafeVolatileSnapshot().version())
    names = log.listFrom(max(found, 0))
    for _ in range(_MAX_LISTED):
        if not names.hasNext():
            return found
        number, _, kind = str(names.next().getPath().getName()).partition(".")
        if kind == "json":
            found = int(number)
    return current_version(session, path)


_MAX_LISTED = 100


def size_bytes(session: SparkSession, path: str) -> int | None:
    """Return the size of a table's newest version; None if Delta does not know it.

    Delta 4.4.0 finds it by a Spark job, once a version, so it always knows it.
    """
    found = snapshot_of(session, path).sizeInBytesIfKnown()
    return int(found.get()) if found.isDefined() else None


def identity(session: SparkSession, path: str) -> tuple[str, dict[str, str]]:
    """Return a table's id and its properties named ``ingestd.*``. Spark job: see `snapshot_of`."""
    metadata = snapshot_of(session, path).metadata()
    pairs = metadata.configuration().toSeq()
    found = [pairs.apply(n) for n in range(pairs.size())]
    properties = {pair._1(): pair._2() for pair in found}  # noqa: SLF001 - Scala's names
    return metadata.id(), {k: v for k, v in properties.items() if k.startswith("ingestd.")}


def table_property(session: SparkSession, path: str, name: str) -> str | None:
    """Return a property of a table; None if it is not set. Spark job: see `snapshot_of`."""
    found = snapshot_of(session, path).metadata().configuration().get(name)
    return str(found.get()) if found.isDefined() else None


def snapshot_of(session: SparkSession, path: str) -> Any:  # noqa: ANN401 - a Scala object
    """Return Delta's snapshot of a table's newest version.

    No Spark job for a version that Delta wrote; one for a version of another engine, once.
    """
    logs = java_class(session, f"{DELTA}.DeltaLog")  # Delta has no call for it in Python
    own = session._jsparkSession  # noqa: SLF001
    # Delta reads a checkpoint in the session of the thread, which a new thread does not have.
    java_class(session, own.getClass().getName()).setActiveSession(own)
    # (`update` takes other arguments in each version)
    return logs.forTableWithSnapshot(own, path)._2()  # noqa: SLF001


def delta_log(session: SparkSession, path: str) -> Any:  # noqa: ANN401 - a Scala object
    """Return Delta's view of a table's log."""
    logs = java_class(session, f"{DELTA}.DeltaLog")
    return logs.forTable(session._jsparkSession, path)  # noqa: SLF001


def commits_above(session: SparkSession, path: str, version: int) -> list[JobCommit]:
    """Return the commits of a table above a version, newest first. Spark job: see `snapshot_of`.

    At most HISTORY_LIMIT, and only those whose log entries have not been cleaned up.
    """
    newest = current_version(session, path)
    found = []
    for number in range(newest, max(version, newest - HISTORY_LIMIT), -1):
        commit = _commit(session, path, number)
        if commit is None:
            break
        found.append(commit)
    return found


def _commit(session: SparkSession, path: str, version: int) -> JobCommit | None:
    entries = log_entries(session, path, version)
    if entries is None:
        return None
    info: dict[str, Any] = next((e["commitInfo"] for e in entries if "commitInfo" in e), {})
    operation = str(info.get("operation", ""))
    return JobCommit(version, operation, Signature.parse(info.get("userMetadata")))


def log_entries(session: SparkSession, path: str, version: int) -> list[dict[str, Any]] | None:
    """Return the actions of a version; None if its log entry no longer exists. No Spark job.

    Raise FolderError if the entry is not one that a daemon would accept, or too large.

    Source: Delta transaction log protocol, "Delta Log Entries".
    """
    log = delta_log(session, path)
    file = java_class(session, HADOOP_PATH)(log.logPath(), f"{version:020d}.json")
    configuration = log.newDeltaHadoopConf()
    try:
        nbytes = file.getFileSystem(configuration).getFileStatus(file).getLen()
    except Py4JJavaError as error:
        if error.java_exception.getClass().getName() == _MISSING:
            return None
        raise
    with storage_faults(path):
        ensure_size(file.toString(), nbytes, MOST_COMMIT_BYTES)
        lines: str = log.store().read(file, configuration).mkString("\n")
        return actions_in(lines.encode(), file.toString())
