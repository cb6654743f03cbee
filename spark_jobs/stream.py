"""Takes tables from epoch to epoch: one streaming query over `_epochs` drives all of them.

Each micro-batch moves every table that changed from where it is to the last epoch of the batch,
some at once, then adds a cut to the log. Where a table is, its own commits say (`commits.py`); the
query's checkpoint only says what is new. So it may be lost, and a job may be killed between any two
commits: a table that is there already is not moved again.

States of a table, as of the batch's last epoch::

    not whole --(`_tables`: live)--> behind --move--> there --(changed in a later epoch)--> behind
        ^                              | fault
        +-- snapshot or gap            +----> stopped: tried again with the next batch

A table that is not whole stays as it was, and is in no cut until it is whole again. One that stops
does not stop the others.
"""

from __future__ import annotations

import difflib
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
import structlog
from delta.tables import DeltaTable
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException, StreamingQueryException

from ingestd.config import included
from ingestd.errors import IngestdError, OperatorError, TableError
from ingestd.recorded import TableState
from ingestd.schema import TableId
from spark_jobs.commits import Signature, commits_above, current_version
from spark_jobs.cuts import Cut, CutLog
from spark_jobs.lake import EPOCH_COLUMNS, Epoch, SourceLake
from spark_jobs.spark_errors import meaning_of
from spark_jobs.targets import table_path

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from spark_jobs.registry import Definition, Registry

_EVERY_FILE = str(1 << 30)
"""A batch takes all there is: more epochs at once are fewer merges."""
_POLL_S = 1
_LOG_GONE = ("DELTA_LOG_FILE_NOT_FOUND", "DELTA_VERSIONS_NOT_CONTIGUOUS", "DELTA_FILE_NOT_FOUND")


@dataclass(frozen=True, slots=True)
class Step:
    """A table to be moved.

    `above`: the epoch it is at, 0 for one that is to be made; `above_lsn`: the end of that epoch.
    `rows`: what `_epochs` says the raw table has of the epochs between that and `through`;
    `nbytes`: about how much that is.
    `schema_version`: that it was brought to last, 0 if that is not known.
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
    """What is done to one table. Called from several threads, each with a session of its own."""

    @property
    def name(self) -> str:
        """The job's: in signatures, application ids and logs."""
        ...

    def move(self, lake: SourceLake, step: Step) -> None:
        """Bring a table to the end of `step.through`: its last commit is signed with it.

        Idempotent up to that commit. Raises TableError if it can't be.
        """
        ...


@dataclass(slots=True)
class _At:
    """Where a table is: its version, the epoch it holds, the version of its schema."""

    version: int
    epoch: int
    schema_version: int


def is_whole(definition: Definition) -> bool:
    """Whether the fold of the raw table, at every epoch, is the table.

    A table without a key is not while it is read anew: what was read stands beside the old rows
    until its `t` comes.
    """
    return definition.is_whole and (bool(definition.key) or definition.state is TableState.LIVE)


class _Epochs:
    """The epochs that were taken lately; earlier ones are read when somebody asks."""

    def __init__(self, lake: SourceLake) -> None:
        self._lake = lake
        self._known: dict[int, Epoch] = {}
        self._lock = threading.Lock()

    def add(self, epochs: Sequence[Epoch]) -> None:
        """Take a batch; what was known before is forgotten but for its end."""
        if epochs:
            last = self._known.get(epochs[0].number - 1)
            self._known = {e.number: e for e in epochs}
            if last is not None:
                self._known[last.number] = last

    def between(self, above: int, through: int) -> list[Epoch]:
        """Give the epochs above one, through another."""
        self._ensure(above + 1, through)
        return [self._known[n] for n in range(above + 1, through + 1)]

    def end_lsn(self, number: int) -> int:
        """Give the position that an epoch ends at; 0 for epoch 0."""
        if number == 0:
            return 0
        self._ensure(number, number)
        return self._known[number].end_lsn

    def _ensure(self, first: int, last: int) -> None:
        with self._lock:
            if not all(n in self._known for n in range(first, last + 1)):
                self._known |= {e.number: e for e in self._lake.epochs(first - 1)}


@dataclass(slots=True)
class EpochStream:
    """Drives a `TableJob` over the epochs of a lake, into tables below `target`.

    `patterns`: tables to take, as the config's `tables`. `rebuild`: tables to be made anew first.
    `after_commit`: called with a table's name (or the log's) after its commit: for tests.
    """

    lake: SourceLake
    target: str
    log_name: str
    job: TableJob
    patterns: Sequence[str] = ("*.*",)
    parallel: int = 4
    rebuild: set[str] = field(default_factory=set)
    settings: Mapping[str, str] = field(default_factory=dict)
    after_commit: Callable[[str], None] = lambda _: None
    stopped: dict[str, TableError] = field(default_factory=dict)
    _at: dict[str, _At] = field(default_factory=dict)
    _last: Cut | None = None
    _fault: BaseException | None = None
    _sessions: threading.local = field(default_factory=threading.local)
    _pool: ThreadPoolExecutor | None = None
    _history: _Epochs | None = None
    _lake_id: str = ""

    def run(self, checkpoint: str, *, once: bool, interval_s: float, stop: threading.Event) -> None:
        """Take what there is (`once`), or go on until `stop` is set.

        Raises OperatorError for a gap in the epochs, another source's target, a checkpoint that
        can't go on, and (`once`) for patterns that match no table.
        """
        self.open()
        if once:
            self._ensure_any()
        query = self._start(checkpoint, once=once, interval_s=interval_s)
        try:
            while not query.awaitTermination(_POLL_S):
                if stop.is_set():
                    query.stop()
        except StreamingQueryException as error:
            if not stop.is_set():
                raise self._cause(error, checkpoint) from error

    def open(self) -> None:
        """See where the target is, and bring it to where `_tables` says it can be."""
        self.lake.require()
        if self.target == self.lake.uri or f"{self.target}/".startswith(f"{self.lake.root}/"):
            raise OperatorError(
                f"--target {self.target} is in the lake, among the raw tables",
                remedy="give a folder of its own; the job would write over what the daemon wrote",
            )
        self._lake_id = self._cuts.open(self.lake)
        self._ensure_known(self.rebuild)
        self._last = self._cuts.last()
        if self._last is None:
            return
        self._at = {
            table: _At(version, self._last.epoch, self._last.schemas[table])
            for table, version in self._last.tables.items()
        }
        there = self.lake.epochs(self._last.epoch - 1)
        if not there or there[0].number != self._last.epoch:
            raise self._gap(self._last.epoch, there[0].number if there else None)
        self._epochs.add(there)
        self.advance([], there[0])

    def advance(self, epochs: Sequence[Epoch], through: Epoch) -> None:
        """Move all tables to the end of `through`; `epochs` are those since the last cut."""
        self._epochs.add(epochs)
        registry = self.lake.registry()
        whole = self._whole(registry, through)
        changed = {table for epoch in epochs for table in epoch.rows}
        for table in changed - whole.keys():
            self._at.pop(table, None)  # what it misses is looked up when it is whole again
        due = [
            table
            for table in whole
            if table in changed
            or table in self.rebuild
            or table not in self._at
            or self._at[table].schema_version != whole[table].schema_version
        ]
        if not epochs and not due and self._is_cut(whole):
            return
        self._move_all({table: whole[table] for table in due}, through)
        # One that is ahead was moved by a run that was killed before its cut.
        there = [t for t in whole if t in self._at and self._at[t].epoch <= through.number]
        tables = {t: self._at[t].version for t in there}
        schemas = {t: self._at[t].schema_version for t in there}
        if not epochs and self._last is not None:  # the same cut: what this run leaves out stays
            others = [t for t in self._last.tables if not self._is_chosen(t)]
            tables |= {t: self._last.tables[t] for t in others}
            schemas |= {t: self._last.schemas[t] for t in others}
        cut = Cut(through.number, through.end_lsn, through.last_commit_ts, tables, schemas)
        if cut == self._last:
            return
        self._cuts.append(cut, replace=not epochs)
        self._last = cut
        self.after_commit(self.log_name)
        self._log.info(
            f"{self.job.name}.moved",
            epoch=cut.epoch,
            moved=len(due),
            tables=len(cut.tables),
            stopped=len(self.stopped),
        )

    # --- the query ----------------------------------------------------------------------------

    def _start(self, checkpoint: str, *, once: bool, interval_s: float) -> StreamingQuery:
        session = self.lake.session
        epochs = self._stream(session, self.lake.epochs_path).select(*EPOCH_COLUMNS)
        # A table may become whole after the last epoch that there is: that is news as well.
        events = self._stream(session, self.lake.tables_path).selectExpr(
            "CAST(NULL AS LONG) AS epoch",
            "at_lsn AS end_lsn",
            "CAST(NULL AS TIMESTAMP) AS last_commit_ts",
            "CAST(NULL AS array<struct<table:string,version:long,rows:long>>) AS tables",
            "CAST(NULL AS LONG) AS bytes",
        )
        writer = (
            epochs.unionByName(events)
            .writeStream.queryName(f"ingestd {self.job.name} {self.lake.source}")
            .foreachBatch(self._batch)
            .option("checkpointLocation", checkpoint)
        )
        if once:
            return writer.trigger(availableNow=True).start()
        return writer.trigger(processingTime=f"{interval_s} seconds").start()

    @staticmethod
    def _stream(session: SparkSession, path: str) -> DataFrame:
        return (
            session.readStream.format("delta").option("maxFilesPerTrigger", _EVERY_FILE).load(path)
        )

    def _batch(self, rows: DataFrame, _: int) -> None:
        try:
            found = [row for row in rows.collect() if row["epoch"] is not None]
            self._take([Epoch.of(row) for row in found])
        except Exception as error:  # noqa: BLE001 - `run` raises it
            self._fault = error
            # Without the text: Spark matches it with a regular expression that overflows the stack.
            raise RuntimeError(type(error).__name__) from None

    def _take(self, found: Iterable[Epoch]) -> None:
        """Move on by these epochs; those before the last cut were taken already."""
        last = 0 if self._last is None else self._last.epoch
        epochs = sorted((e for e in found if e.number > last), key=lambda e: e.number)
        for expected, epoch in enumerate(epochs, start=last + 1):
            if epoch.number != expected:
                raise self._gap(expected, epoch.number)
        if epochs:
            self.advance(epochs, epochs[-1])
        elif self._last is not None:
            there = Epoch(self._last.epoch, self._last.end_lsn, self._last.last_commit_ts, {})
            self.advance([], there)

    def _gap(self, expected: int, found: int | None) -> OperatorError:
        what = "the lake ends before it" if found is None else f"the next one is {found}"
        return OperatorError(
            f"{self.lake.epochs_path}: epoch {expected} is missing, {what};"
            f" nothing was skipped: {self.target} stays as it is",
            remedy="is the --checkpoint another job's? Else restore `_epochs`, or begin anew in a"
            " new --target",
        )

    def _cause(self, error: StreamingQueryException, checkpoint: str) -> BaseException:
        """Say what a query ended with: our own error, or what Spark's means."""
        if self._fault is not None and not isinstance(self._fault, (PySparkException, Py4JError)):
            return self._fault
        text = str(self._fault or error)
        if "DIFFERENT_DELTA_TABLE_READ_BY_STREAMING_SOURCE" in text:
            return OperatorError(
                f"the checkpoint {checkpoint} is of another lake than {self.lake.epochs_path}",
                remedy="give a --checkpoint of its own; where the tables are, they say themselves",
            )
        if any(sign in text for sign in _LOG_GONE):
            return OperatorError(
                f"the log of {self.lake.epochs_path} was cleaned behind the checkpoint",
                remedy=f"remove {checkpoint}: nothing is applied twice or skipped by that",
            )
        return meaning_of(self._fault if isinstance(self._fault, Exception) else error)

    # --- the tables ---------------------------------------------------------------------------

    def _whole(self, registry: Registry, through: Epoch) -> dict[str, Definition]:
        """Give the tables whose raw tables, up to an epoch, are the tables."""
        found: dict[str, Definition] = {}
        is_newest: bool | None = None
        for table in registry.tables:
            if not self._is_chosen(table):
                continue
            definition = registry.at(table, through.end_lsn)
            now = registry.at(table)
            if (
                now is not None
                and now != definition
                and now.state is TableState.LIVE
                and (now.snapshot_lsn or 0) <= through.end_lsn
            ):
                # What was recorded above the newest epoch is of it, if there is no other since.
                if is_newest is None:
                    is_newest = not self.lake.epochs(through.number)
                definition = now if is_newest else definition
            if definition is not None and is_whole(definition):
                found[table] = definition
        return found

    def _ensure_any(self) -> None:
        known = self.lake.registry().tables
        if known and not any(map(self._is_chosen, known)):
            raise OperatorError(
                f"no table of source {self.lake.source} matches {' '.join(self.patterns)}",
                remedy=f"there are {', '.join(known[:10])}",
            )

    def _is_chosen(self, table: str) -> bool:
        named = TableId.parse(table)
        return included(list(self.patterns), named.schema, named.name)

    def _ensure_known(self, tables: Collection[str]) -> None:
        known = self.lake.registry().tables if tables else []
        for table in tables:
            if table not in known:
                near = difflib.get_close_matches(table, known, n=1)
                raise OperatorError(
                    f"table {table} is not in the lake",
                    remedy=f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}",
                )

    def _is_cut(self, whole: Collection[str]) -> bool:
        if self._last is None:
            return False
        chosen = {table for table in self._last.tables if self._is_chosen(table)}
        return chosen == set(whole) - set(self.stopped)

    def _move_all(self, due: Mapping[str, Definition], through: Epoch) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max(1, self.parallel))
        moves = [self._pool.submit(self._try, table, due[table], through) for table in due]
        try:
            for move in moves:
                move.result()
        finally:
            for move in moves:
                move.cancel()
            wait(moves)

    def _try(self, table: str, definition: Definition, through: Epoch) -> None:
        try:
            self._at[table] = self._move(table, definition, through)
            self.rebuild.discard(table)
            if self.stopped.pop(table, None) is not None:
                self._log.info("table.resumed", table=table, epoch=through.number)
        except TableError as error:
            self._stop(table, error)
        except IngestdError:
            raise
        except (PySparkException, Py4JError) as error:
            meaning = meaning_of(error)
            self._stop(table, TableError(TableId.parse(table), meaning.what, remedy=meaning.remedy))
        except (pa.ArrowException, ArithmeticError, LookupError, TypeError, ValueError) as error:
            # Without its text, which may quote a value.
            place = traceback.extract_tb(error.__traceback__)[-1]
            what = (
                f"{type(error).__name__} in {Path(place.filename).name}, line {place.lineno}, while"
                f" it was moved to epoch {through.number}"
            )
            remedy = f"--rebuild {table} makes it anew; report this if it comes again"
            self._stop(table, TableError(TableId.parse(table), what, remedy=remedy))

    def _stop(self, table: str, error: TableError) -> None:
        self._at.pop(table, None)
        if table not in self.stopped:
            self._log.error("table.stopped", table=table, reason=error.reason, remedy=error.remedy)
        self.stopped[table] = error

    def _move(self, table: str, definition: Definition, through: Epoch) -> _At:
        lake = self.lake.using(self._session())
        path = table_path(self.target, table)
        rebuild = table in self.rebuild
        at = self._look(lake.session, table, path)
        if at is not None and not rebuild:
            is_same = at.schema_version == definition.schema_version
            if at.epoch > through.number or (at.epoch == through.number and is_same):
                return at
        above = 0 if at is None or rebuild else at.epoch
        between = self._epochs.between(above, through.number)
        step = Step(
            table=table,
            path=path,
            definition=definition,
            above=above,
            above_lsn=self._epochs.end_lsn(above),
            through=through,
            rows=sum(e.rows.get(table, 0) for e in between),
            nbytes=sum(e.nbytes_of(table) for e in between),
            schema_version=0 if at is None else at.schema_version,
            signature=Signature(
                self.job.name,
                self.lake.source,
                self._lake_id,
                through.number,
                definition.schema_version,
            ),
            app_id=f"ingestd-{self.job.name}/{self.lake.source}/{self._lake_id}/{table}",
        )
        self.job.move(lake, step)
        self.after_commit(table)
        return self._moved(lake.session, step, None if at is None else at.version)

    def _moved(self, session: SparkSession, step: Step, before: int | None) -> _At:
        """Give where a table is after a step. Raises TableError if another job moved it too."""
        version = current_version(session, step.path)
        for commit in commits_above(session, step.path, -1 if before is None else before):
            if commit.signature == step.signature:
                break
            is_step = commit.signature is not None and commit.signature.epoch <= step.above
            if commit.is_foreign or not (is_step or commit.signature is None):
                raise TableError(
                    TableId.parse(step.table),
                    f"{step.path} was changed by somebody else (version {commit.version},"
                    f" {commit.operation}) while it was moved to epoch {step.through.number}",
                    remedy="let only one job write to a target",
                )
        return _At(version, step.through.number, step.definition.schema_version)

    def _look(self, session: SparkSession, table: str, path: str) -> _At | None:
        """See where a table is. Raises TableError if somebody else has changed it."""
        if not DeltaTable.isDeltaTable(session, path):
            return None
        known = self._at.get(table)
        version = current_version(session, path)
        if known is not None and known.version == version:
            return known
        commits = commits_above(session, path, -1 if known is None else known.version)
        own = next((c for c in commits if c.signature is not None), None)
        if own is not None and own.signature is not None:
            self._ensure_ours(table, path, own.signature)
        elif known is None:
            raise TableError(
                TableId.parse(table),
                f"there is a table at {path} that no {self.job.name} made",
                remedy=f"give this {self.job.name} a --target of its own",
            )
        foreign = [c for c in commits if c.is_foreign and (own is None or c.version > own.version)]
        if foreign and table not in self.rebuild:
            raise TableError(
                TableId.parse(table),
                f"{path} was changed by somebody else (version {foreign[0].version},"
                f" {foreign[0].operation})",
                remedy=f"--rebuild {table} makes it anew from the lake",
            )
        if own is None:
            return None if known is None else replace(known, version=version)
        assert own.signature is not None
        return _At(version, own.signature.epoch, own.signature.schema_version)

    def _ensure_ours(self, table: str, path: str, found: Signature) -> None:
        if (found.job, found.source, found.lake) != (
            self.job.name,
            self.lake.source,
            self._lake_id,
        ) and table not in self.rebuild:
            raise TableError(
                TableId.parse(table),
                f"{path} is kept by the {found.job} of source {found.source}, of this lake or one"
                " before it",
                remedy=f"give this {self.job.name} a --target of its own, or --rebuild {table}",
            )

    def _session(self) -> SparkSession:
        """Give this thread's own session: what signs a commit is the session's."""
        session: SparkSession | None = getattr(self._sessions, "session", None)
        if session is None:
            session = self.lake.session.newSession()
            # Times are compared and written as texts of it.
            session.conf.set("spark.sql.session.timeZone", "UTC")
            for name, value in self.settings.items():
                session.conf.set(name, value)
            self._sessions.session = session
        return session

    @property
    def _epochs(self) -> _Epochs:
        if self._history is None:
            self._history = _Epochs(self.lake)
        return self._history

    @property
    def _cuts(self) -> CutLog:
        return CutLog(self.lake.session, f"{self.target}/{self.log_name}", self.job.name)

    @property
    def _log(self) -> structlog.stdlib.BoundLogger:
        log: structlog.stdlib.BoundLogger = structlog.get_logger("ingestd")
        return log.bind(source=self.lake.source)
