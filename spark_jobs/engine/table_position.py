"""Where a job's table is, as its own commits say: which epoch it holds, and whether it is ours."""

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
    """Where a table is: its version, the epoch it holds, the version of its schema."""

    version: int
    epoch: int
    schema_version: int


@dataclass(frozen=True, slots=True)
class Owner:
    """Who keeps tables: a job, on a source of a lake (the id of its `_epochs`)."""

    job: str
    source: str
    lake: str

    def signature(self, epoch: int, schema_version: int) -> Signature:
        """Return what it signs a commit with."""
        return Signature(self.job, self.source, self.lake, epoch, schema_version)

    def app_id(self, table: str) -> str:
        """Name it as a Delta application that writes a table."""
        return f"ingestd-{self.job}/{self.source}/{self.lake}/{table}"

    def find(
        self,
        session: SparkSession,
        table: str,
        path: str,
        known: TablePosition | None,
        rebuild: Collection[str],
    ) -> TablePosition | None:
        """See where a table is; `known` is what was seen last. None: there is none yet.

        Raises TableError if someone else made or changed it, unless it must be rebuilt.
        """
        if not DeltaTable.isDeltaTable(session, path):
            return None
        version = current_version(session, path)
        if known is not None and known.version == version:
            return known
        if known is not None and known.version > version:
            known = None  # an older copy was put in its place
        commits = commits_above(session, path, -1 if known is None else known.version)
        own = next((c for c in commits if c.signature is not None), None)
        if own is not None and own.signature is not None:
            self._ensure_ours(table, path, own.signature, rebuild)
        elif known is None:
            raise TableError(
                TableId.parse(table),
                f"there is a table at {path} that no {self.job} made",
                remedy=f"give this {self.job} a --target of its own",
            )
        foreign = [c for c in commits if c.is_foreign and (own is None or c.version > own.version)]
        if foreign and table not in rebuild:
            raise TableError(
                TableId.parse(table),
                f"{path} was changed by somebody else (version {foreign[0].version},"
                f" {foreign[0].operation})",
                remedy=f"--rebuild {table} makes it anew from the lake",
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
                f"{path} is kept by the {found.job} of source {found.source}, of this lake or one"
                " before it",
                remedy=f"give this {self.job} a --target of its own, or --rebuild {table}",
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
    """Return where a table is after a step. Raises TableError if another job moved it meanwhile.

    `signature`: of the step's last commit; `above`: the epoch that it began with.
    """
    version = current_version(session, path)
    for commit in commits_above(session, path, -1 if before is None else before.version):
        if commit.signature == signature:
            continue
        is_step = commit.signature is not None and commit.signature.epoch <= above
        if commit.is_foreign or not (is_step or commit.signature is None):
            raise TableError(
                TableId.parse(table),
                f"{path} was changed by somebody else (version {commit.version},"
                f" {commit.operation}) while it was moved to epoch {signature.epoch}",
                remedy="let only one job write to a target",
            )
    return TablePosition(version, signature.epoch, signature.schema_version)
