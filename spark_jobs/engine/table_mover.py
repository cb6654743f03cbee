"""Moves one table from its epoch to a later one, by a job.

The table's own commits determine its epoch and its owner, not a position seen earlier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import structlog

from ingestd.model.errors import TableError, TransientError
from ingestd.model.schema import TableId
from spark_jobs.delta_log.commits import Signature
from spark_jobs.delta_log.faults import SPARK_ERRORS
from spark_jobs.lake.targets import table_path
from spark_jobs.own_session import derived_session, release

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ingestd.lake.definitions import Definition
    from spark_jobs.lake.source_lake import Epoch, EpochMemory, SourceLake


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
        lake: SourceLake,
        table: str,
        path: str,
        known: TablePosition | None,
        rebuild: Collection[str],
    ) -> TablePosition | None:
        """Return the position of a table; None if it does not exist. `known`: the last known one.

        Raises TableError if another writer made or changed it, unless it must be rebuilt.
        """
        above = -1 if known is None else known.version
        found = lake.checked.commits_above(lake.session, path, above)
        version, commits = found.version, found.newer
        if version < 0:
            return None
        if known is not None and known.version == version:
            return known
        if known is not None and known.version > version:
            known = None  # an older copy was restored
            commits = lake.checked.commits_above(lake.session, path, -1).newer
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
        self, table: str, path: str, signature: Signature, rebuild: Collection[str]
    ) -> None:
        ours = (self.job, self.source, self.lake)
        if (signature.job, signature.source, signature.lake) != ours and table not in rebuild:
            raise TableError(
                TableId.parse(table),
                f"{path} belongs to the {signature.job} of source {signature.source}, of this lake"
                " or an earlier one",
                remedy=f"give this {self.job} a separate --target, or --rebuild {table}",
            )


def position_after_step(
    lake: SourceLake,
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
    found = lake.checked.commits_above(lake.session, path, -1 if before is None else before.version)
    for commit in found.newer:
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
    return TablePosition(found.version, signature.epoch, signature.schema_version)


@dataclass(frozen=True, slots=True)
class TableStep:
    """A table's step from the epoch `above` to the epoch `through`.

    `above` is 0 for a table that must be created; `above_lsn`: the end of that epoch.
    `rows`: the raw table's rows between that and `through`, according to `_epochs`; `nbytes`:
    their approximate size. `schema_version`: the last one it was brought to, 0 if unknown.
    """

    table: str
    path: str
    definition: Definition
    above: int
    above_lsn: int
    through: Epoch
    rows: int
    nbytes: int
    schema_version: int
    signature: Signature
    app_id: str


class TableJob(Protocol):
    """A job on one table. Called from several threads, each with a separate session."""

    @property
    def name(self) -> str:
        """The job's name: in signatures, application ids and logs."""
        ...

    def advance(self, lake: SourceLake, step: TableStep) -> None:
        """Bring a table to the end of `step.through`, and sign the last commit with it.

        Idempotent up to that commit. Raises TableError if the table can't be moved.
        """
        ...


@dataclass(frozen=True, slots=True)
class TableMover:
    """Moves tables below `target` by a job, several of them in parallel.

    `parallel`: threads. `settings`: of the sessions. `rebuild`: tables to re-create; the caller
    removes those that are done. `after_commit`: as `EpochRun`'s.
    """

    lake: SourceLake
    target: str
    job: TableJob
    owner: Owner
    settings: Mapping[str, str]
    rebuild: Collection[str]
    after_commit: Callable[[str], None]
    parallel: int
    _sessions: threading.local = field(default_factory=threading.local, init=False)
    _made: list[SparkSession] = field(default_factory=list, init=False)

    def close(self) -> None:
        """Release the threads' sessions, once no table moves any more."""
        for session in self._made:
            with suppress(*SPARK_ERRORS):
                release(session)

    def has_reached(self, table: str, at: TablePosition) -> bool:
        """Return whether a table is as in a cut, or ahead; if not, only its own commits count."""
        lake, path = self.lake.using(self._session()), table_path(self.target, table)
        try:
            found = self.owner.find(lake, table, path, at, self.rebuild)
        except TableError:
            return False  # `advance` reports it
        if found is None or found.version != at.version:
            return found is not None and found.version > at.version
        # a re-created table may have reached the same version
        newest = lake.checked.commits_above(lake.session, path, at.version - 1)
        return all(c.signature is None or c.signature.epoch <= at.epoch for c in newest.newer)

    def advance(
        self,
        table: str,
        definition: Definition,
        known: TablePosition | None,
        epochs: EpochMemory,
        through: Epoch,
    ) -> TablePosition:
        """Bring a table to the end of `through`; return its new position.

        `known`: its last known position. Raises TableError if it can't be moved.
        """
        lake = self.lake.using(self._session())
        path = table_path(self.target, table)
        rebuild = table in self.rebuild
        at = self.owner.find(lake, table, path, known, self.rebuild)
        if at is not None and not rebuild:
            is_same = at.schema_version == definition.schema_version
            if at.epoch > through.number or (at.epoch == through.number and is_same):
                return at
        above = 0 if at is None or rebuild else at.epoch
        between = epochs.between(above, through.number)
        step = TableStep(
            table=table,
            path=path,
            definition=definition,
            above=above,
            above_lsn=epochs.end_lsn(above),
            through=through,
            rows=sum(e.rows.get(table, 0) for e in between),
            nbytes=sum(e.nbytes_of(table) for e in between),
            schema_version=0 if at is None else at.schema_version,
            signature=self.owner.signature(through.number, definition.schema_version),
            app_id=self.owner.app_id(table),
        )
        self._take_step(lake, step)
        self.after_commit(table)
        return position_after_step(lake, table, path, step.signature, at, above=above)

    def _take_step(self, lake: SourceLake, step: TableStep) -> None:
        try:
            self.job.advance(lake, step)
        except SPARK_ERRORS:
            rest = self._without_missing_files(lake, step)
            if rest is None:
                raise
            self.job.advance(rest, step)

    def _without_missing_files(self, lake: SourceLake, step: TableStep) -> SourceLake | None:
        """Return the lake above its missing raw files; None if none is missing.

        Raises TableError if files of the table itself are missing.
        """
        own = lake.checked.missing_files(lake.session, step.path)
        if own and step.table not in self.rebuild:
            raise TableError(
                TableId.parse(step.table),
                f"{step.path}: {len(own)} files are missing, such as {own[0].name}",
                remedy=f"--rebuild {step.table} re-creates it from the lake",
            )
        raw = lake.checked.missing_files(lake.session, lake.raw_path(step.table))
        if not raw:
            return None
        highest = [file.highest_lsn for file in raw if file.highest_lsn is not None]
        if len(highest) < len(raw):
            raise TableError(
                TableId.parse(step.table),
                f"{lake.raw_path(step.table)}: {len(raw)} files are missing, such as {raw[0].name}",
                remedy=f"`ingestd snapshot {lake.source} {step.table}` re-reads it",
            )
        log: structlog.stdlib.BoundLogger = structlog.get_logger("ingestd")
        log.warning(
            "raw.files_gone",
            source=lake.source,
            table=step.table,
            files=len(raw),
            such_as=raw[0].name,
        )
        return lake.without_rows_up_to(max(highest))

    def _session(self) -> SparkSession:
        """Return this thread's session: the settings that sign a commit belong to a session."""
        session: SparkSession | None = getattr(self._sessions, "session", None)
        if session is None:
            session = derived_session(self.lake.session, self.settings)
            if session is not self.lake.session:
                self._made.append(session)
            elif self.parallel > 1:
                raise TransientError(
                    "Spark makes no further session for another thread",
                    remedy="run the job again, or with --parallel 1",
                    reason="spark",
                )
            self._sessions.session = session
        return session
