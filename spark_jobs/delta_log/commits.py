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
from typing import TYPE_CHECKING

from ingestd.model.recorded import RecordError, read_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

_METADATA = "spark.databricks.delta.commitInfo.userMetadata"
_APP_ID = "spark.databricks.delta.write.txnAppId"
_APP_VERSION = "spark.databricks.delta.write.txnVersion"
OF_A_COMMIT = (_METADATA, _APP_ID, _APP_VERSION)
"""Settings of a session that mark its next commit."""

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
"""Number of commits of a table that are looked at."""

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
        for name in OF_A_COMMIT:
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
