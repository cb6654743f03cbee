"""Moves one table from its epoch to a later one, by a job.

The table's own commits determine its epoch (`table_position.py`), not a position seen earlier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import structlog
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from spark_jobs.delta_log.commits import commits_above
from spark_jobs.delta_log.missing_files import gone_files
from spark_jobs.engine.table_position import Owner, TablePosition, moved
from spark_jobs.lake.targets import table_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_jobs.delta_log.commits import Signature
    from spark_jobs.engine.epoch_cache import EpochMemory
    from spark_jobs.lake.source_lake import Epoch, SourceLake
    from spark_jobs.lake.tables import Definition


@dataclass(frozen=True, slots=True)
class Step:
    """A table to move.

    `above`: its epoch, 0 for a table that must be created; `above_lsn`: the end of that epoch.
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

    def advance(self, lake: SourceLake, step: Step) -> None:
        """Bring a table to the end of `step.through`, and sign the last commit with it.

        Idempotent up to that commit. Raises TableError if the table can't be moved.
        """
        ...


@dataclass(frozen=True, slots=True)
class TableMover:
    """Moves tables below `target` by a job, several of them in parallel.

    `settings`: of the sessions. `rebuild`: tables to re-create; the caller removes those that are
    done. `after_commit`: as `EpochStream`'s.
    """

    lake: SourceLake
    target: str
    job: TableJob
    owner: Owner
    settings: Mapping[str, str]
    rebuild: Collection[str]
    after_commit: Callable[[str], None]
    _sessions: threading.local = field(default_factory=threading.local, init=False)

    def is_left(self, table: str, at: TablePosition) -> bool:
        """Return whether a table is as in a cut, or ahead; if not, only its own commits count."""
        session, path = self.lake.session, table_path(self.target, table)
        try:
            found = self.owner.find(session, table, path, at, self.rebuild)
        except TableError:
            return False  # `move` reports it
        if found is None or found.version != at.version:
            return found is not None and found.version > at.version
        # a re-created table may have reached the same version
        newest = commits_above(session, path, at.version - 1)
        return all(c.signature is None or c.signature.epoch <= at.epoch for c in newest)

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
        at = self.owner.find(lake.session, table, path, known, self.rebuild)
        if at is not None and not rebuild:
            is_same = at.schema_version == definition.schema_version
            if at.epoch > through.number or (at.epoch == through.number and is_same):
                return at
        above = 0 if at is None or rebuild else at.epoch
        between = epochs.between(above, through.number)
        step = Step(
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
        return moved(lake.session, table, path, step.signature, at, above=above)

    def _take_step(self, lake: SourceLake, step: Step) -> None:
        try:
            self.job.advance(lake, step)
        except (PySparkException, Py4JError):
            rest = self._without_gone_files(lake, step)
            if rest is None:
                raise
            self.job.advance(rest, step)

    def _without_gone_files(self, lake: SourceLake, step: Step) -> SourceLake | None:
        """Return the lake above its missing raw files; None if none is missing.

        Raises TableError if files of the table itself are missing.
        """
        own = gone_files(lake.session, step.path)
        if own and step.table not in self.rebuild:
            raise TableError(
                TableId.parse(step.table),
                f"{step.path}: {len(own)} files are missing, such as {own[0].name}",
                remedy=f"--rebuild {step.table} re-creates it from the lake",
            )
        raw = gone_files(lake.session, lake.raw_path(step.table))
        highest = [file.highest_lsn for file in raw if file.highest_lsn is not None]
        if not raw or len(highest) < len(raw):
            return None
        log: structlog.stdlib.BoundLogger = structlog.get_logger("ingestd")
        log.warning(
            "raw.files_gone",
            source=lake.source,
            table=step.table,
            files=len(raw),
            such_as=raw[0].name,
        )
        return lake.above(max(highest))

    def _session(self) -> SparkSession:
        """Return this thread's session: the settings that sign a commit belong to a session."""
        session: SparkSession | None = getattr(self._sessions, "session", None)
        if session is None:
            session = self.lake.session.newSession()
            # The session's time zone determines how times are compared and written as text.
            session.conf.set("spark.sql.session.timeZone", "UTC")
            for name, value in self.settings.items():
                session.conf.set(name, value)
            self._sessions.session = session
        return session
