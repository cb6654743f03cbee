"""The position of a job's table, read from its commits: its epoch and its owner."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from delta.tables import DeltaTable

from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from spark_jobs.delta_log.commits import Signature, commits_above, current_version

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class TablePosition:
    """A table's version, its epoch, and the version of its schema."""

    version: int
    epoch: int
    schema_version: int


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of tables: a job on a source of a lake. `lake`: the id of its `_epochs`."""

    job: str
    source: str
    lake: str

    def signature(self, epoch: int, schema_version: int) -> Signature:
        """Return the owner's signature of a commit."""
        return Signature(self.job, self.source, self.lake, epoch, schema_version)

    def app_id(self, table: str) -> str:
        """Return the Delta application id for writes to a table."""
        return f"ingestd-{self.job}/{self.source}/{self.lake}/{table}"

    def find(
        self,
        session: SparkSession,
        table: str,
        path: str,
        known: TablePosition | None,
        rebuild: Collection[str],
    ) -> TablePosition | None:
        """Return the position of a table; None if it does not exist. `known`: the last known one.

        Raises TableError if another writer made or changed it, unless it must be rebuilt.
        """
        if not DeltaTable.isDeltaTable(session, path):
            return None
        version = current_version(session, path)
        if known is not None and known.version == version:
            return known
        if known is not None and known.version > version:
            known = None  # an older copy was restored
        commits = commits_above(session, path, -1 if known is None else known.version)
        own = next((c for c in commits if c.signature is not None), None)
        if own is not None and own.signature is not None:
            self._ensure_ours(table, path, own.signature, rebuild)
        elif known is None:
            raise TableError(
                TableId.parse(table),
                f"the table at {path} was not made by a {self.job}",
                remedy=f"give this {self.job} a separate --target",
            )
        foreign = [c for c in commits if c.is_foreign and (own is None or c.version > own.version)]
        if foreign and table not in rebuild:
            raise TableError(
                TableId.parse(table),
                f"{path} was changed by another writer (version {foreign[0].version},"
                f" {foreign[0].operation})",
                remedy=f"--rebuild {table} re-creates it from the lake",
            )
        if own is None:
            return None if known is None else replace(known, version=version)
        assert own.signature is not None
        return TablePosition(version, own.signature.epoch, own.signature.schema_version)

    def _ensure_ours(
        self, table: str, path: str, found: Signature, rebuild: Collection[str]
    ) -> None:
        ours = (self.job, self.source, self.lake)
        if (found.job, found.source, found.lake) != ours and table not in rebuild:
            raise TableError(
                TableId.parse(table),
                f"{path} belongs to the {found.job} of source {found.source}, of this lake or"
                " an earlier one",
                remedy=f"give this {self.job} a separate --target, or --rebuild {table}",
            )


def moved(
    session: SparkSession,
    table: str,
    path: str,
    signature: Signature,
    before: TablePosition | None,
    *,
    above: int,
) -> TablePosition:
    """Return a table's position after a step. Raises TableError if another job moved it, too.

    `signature`: of the step's last commit; `above`: the epoch before the step.
    """
    version = current_version(session, path)
    for commit in commits_above(session, path, -1 if before is None else before.version):
        if commit.signature == signature:
            continue
        is_step = commit.signature is not None and commit.signature.epoch <= above
        if commit.is_foreign or not (is_step or commit.signature is None):
            raise TableError(
                TableId.parse(table),
                f"{path} was changed by another writer (version {commit.version},"
                f" {commit.operation}) while this job moved it to epoch {signature.epoch}",
                remedy="let only one job write to a target",
            )
    return TablePosition(version, signature.epoch, signature.schema_version)
