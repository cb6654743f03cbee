"""Moves tables from epoch to epoch, all of them to the same one.

The job looks for new epochs (`epoch_poll.py`). It moves every table that changed from its own epoch
to the newest, several tables in parallel, then adds a cut to the log. A table's own commits record
its epoch (`table_mover.py`). So a job may be killed, or stopped, between any two commits: a table
that has reached the epoch is not moved again, and the cut is added once all have. States of a
table, as of the newest epoch::

    incomplete --(`_tables`: live)--> behind --move--> current --(changed later)--> behind
        ^                               | fault
        +-- snapshot or gap             +----> stopped: retried with the next epochs

An incomplete table keeps its rows, and is in no cut until it is complete again. A table that stops
does not stop the others.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import structlog

from ingestd.config import included
from ingestd.model.errors import (
    FolderError,
    IngestdError,
    OperatorError,
    TableError,
    did_you_mean_table,
)
from ingestd.model.schema import TableId
from spark_jobs.catalog.table_names import CatalogNames
from spark_jobs.delta_log.faults import SPARK_ERRORS
from spark_jobs.engine.cuts import CutLog, EpochCut
from spark_jobs.engine.epoch_poll import EpochPoll
from spark_jobs.engine.table_mover import Owner, TableMover, TablePosition
from spark_jobs.lake.source_lake import Epoch, EpochMemory, SourceLake
from spark_jobs.lake.targets import table_path
from spark_jobs.spark_errors import meaning_of

if TYPE_CHECKING:
    from ingestd.lake.definitions import Definition, Registry
    from spark_jobs.engine.table_mover import TableJob


def _is_in(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")


@dataclass(slots=True)
class EpochRun:
    """Drives a `TableJob` over the epochs of a lake, into tables below `target`.

    `patterns`: tables to include, as the config's `tables`. `rebuild`: tables to re-create first.
    `after_commit`: called after each commit with the table's name (or the log's), for tests.
    `names`: the tables' names in a catalog.
    `needs_key`: leave out tables without a key, and log that once.
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
    names: CatalogNames = field(default_factory=CatalogNames)
    needs_key: bool = False
    stopped: dict[str, TableError] = field(default_factory=dict)
    _at: dict[str, TablePosition] = field(default_factory=dict, init=False)
    _last: EpochCut | None = field(default=None, init=False)
    _is_first_look: bool = field(default=True, init=False)
    _stop_wanted: threading.Event = field(init=False)
    _pool: ThreadPoolExecutor = field(init=False)
    _epochs: EpochMemory = field(init=False)
    _poll: EpochPoll = field(init=False)
    _mover: TableMover = field(init=False)
    _cuts: CutLog = field(init=False)
    _known: Registry = field(init=False)
    _registry_version: object = field(default=-1, init=False)
    _without_key: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._epochs = EpochMemory(self.lake)
        path = f"{self.target}/{self.log_name}"
        self._cuts = CutLog(self.lake.session, path, self.job.name, self.lake.accelerator)

    def run(self, *, once: bool, interval_s: float, stop: threading.Event) -> None:
        """Move all tables to the newest epoch (`once`), or continue until `stop` is set.

        Looks for epochs every `interval_s`, on the caller's thread. A stop ends the run once the
        tables in progress have moved. Raises OperatorError for a gap in the epochs, a target of
        another source, and (`once`) patterns that match no table.
        """
        self._stop_wanted = stop
        with ThreadPoolExecutor(max(1, self.parallel)) as self._pool:
            self._open()
            try:
                if once:
                    self._ensure_any()
                next_look = time.monotonic()
                while True:
                    self._look()
                    next_look = max(next_look + interval_s, time.monotonic())
                    if once or stop.wait(next_look - time.monotonic()):
                        break
            finally:
                self._mover.close()

    def _open(self) -> None:
        """Find the target's newest cut, and the tables' positions in it."""
        lake_id = self.lake.require().table_id
        self._ensure_apart()
        self.names.open()
        is_new = self._cuts.open(self.lake, lake_id)
        self.names.register_log(self.log_name, self._cuts.path)
        self._poll = EpochPoll(self.lake, lake_id)
        self._mover = TableMover(
            self.lake,
            self.target,
            self.job,
            Owner(self.job.name, self.lake.source, lake_id),
            self.settings,
            self.rebuild,
            self.after_commit,
            self.parallel,
        )
        self._ensure_known(self.rebuild)
        self._last = None if is_new else self._cuts.last()
        if self._last is not None:
            self._at = self._recorded_positions(self._last)

    def _ensure_apart(self) -> None:
        """Raise OperatorError if the target is among the lake's tables."""
        if self.target == self.lake.uri or _is_in(self.target, self.lake.root):
            raise OperatorError(
                f"--target {self.target} is in the lake, among the raw tables",
                remedy="use a separate folder: the job would overwrite what the daemon wrote",
            )

    def _look(self) -> None:
        """Move tables to the newest epoch; without a new one, those that became complete since."""
        found = self._poll.look(self._last)
        last, self._is_first_look, is_first = self._last, False, self._is_first_look
        if last is not None and is_first and found:
            self._epochs.add_epochs(found[:1])
            self._advance([], found[0])
        new = [epoch for epoch in found or () if last is None or epoch.number > last.epoch]
        if new:
            self._advance(new, new[-1])
        elif last is not None and self._registry_version != self._newest_registry():
            self._advance([], Epoch(last.epoch, last.end_lsn, last.last_commit_ts, {}))

    def _recorded_positions(self, cut: EpochCut) -> dict[str, TablePosition]:
        """Return the positions in a cut, except of tables that are behind it or replaced."""
        at = {
            table: TablePosition(version, cut.epoch, cut.schemas[table])
            for table, version in cut.tables.items()
        }
        chosen = [table for table in at if self._is_chosen(table)]
        reached = self._pool.map(lambda table: self._mover.has_reached(table, at[table]), chosen)
        lost = {table for table, is_reached in zip(chosen, reached, strict=True) if not is_reached}
        return {table: known for table, known in at.items() if table not in lost}

    def _advance(self, epochs: Sequence[Epoch], through: Epoch) -> None:
        """Move all tables to the end of `through`. `epochs`: those since the last cut."""
        if self._stop_wanted.is_set():
            return
        self._epochs.add_epochs(epochs)
        registry = self._registry()
        complete = self._complete_tables(registry, through)
        for table in filter(self._is_chosen, registry.dropped):
            self.names.remove(table, table_path(self.target, table))
        changed = {table for epoch in epochs for table in epoch.rows}
        for table in changed - complete.keys():
            self._at.pop(table, None)  # its position is looked up when it is complete again
        due = [
            table
            for table in complete
            if table in changed
            or table in self.rebuild
            or table not in self._at
            or self._at[table].schema_version != complete[table].schema_version
            or self.names.lacks(table, complete[table])
        ]
        if not epochs and not due and self._is_cut(complete):
            return
        self._move_all({table: complete[table] for table in due}, through)
        if self._stop_wanted.is_set():  # some may not have moved: the next run continues
            return
        # A table that is ahead was moved by a run that was killed before it added the cut.
        reached = [t for t in complete if t in self._at and self._at[t].epoch <= through.number]
        tables = {t: self._at[t].version for t in reached}
        schemas = {t: self._at[t].schema_version for t in reached}
        if not epochs and self._last is not None:  # the same cut: keep all other tables
            is_ahead = complete.keys() - set(reached)
            others = [
                t
                for t in self._last.tables
                if t in is_ahead or t in self.stopped or not self._is_chosen(t)
            ]
            tables |= {t: self._last.tables[t] for t in others}
            schemas |= {t: self._last.schemas[t] for t in others}
        cut = EpochCut(through.number, through.end_lsn, through.last_commit_ts, tables, schemas)
        if cut == self._last:
            return
        self._cuts.append_cut(cut, replace=not epochs)
        self._last = cut
        self.after_commit(self.log_name)
        self._log.info(
            f"{self.job.name}.moved",
            epoch=cut.epoch,
            moved=len(due),
            tables=len(cut.tables),
            stopped=len(self.stopped),
        )

    # --- the tables ---------------------------------------------------------------------------

    def _complete_tables(self, registry: Registry, through: Epoch) -> dict[str, Definition]:
        """Return the tables that their raw tables show completely, up to an epoch."""
        found: dict[str, Definition] = {}
        is_newest = cache(lambda: not self.lake.epochs(through.number))
        for table in registry.tables:
            if not self._is_chosen(table):
                continue
            try:
                definition = registry.at_epoch(table, through.end_lsn, is_newest)
            except FolderError as error:
                self._stop(table, TableError(TableId.parse(table), error.what, remedy=error.remedy))
                continue
            if definition is None or not definition.is_complete_at_every_epoch:
                continue
            if definition.key or not self.needs_key:
                found[table] = definition
            elif table not in self._without_key:
                self._without_key.add(table)
                self._log.warning("table.no_key", table=table)
        return found

    def _ensure_any(self) -> None:
        known = self._registry().tables
        if known and not any(map(self._is_chosen, known)):
            raise OperatorError(
                f"no table of source {self.lake.source} matches {' '.join(self.patterns)}",
                remedy=f"the lake has {', '.join(known[:10])}",
            )

    def _is_chosen(self, table: str) -> bool:
        named = TableId.parse(table)
        return included(list(self.patterns), named.schema, named.name)

    def _ensure_known(self, tables: Collection[str]) -> None:
        known = self._registry().tables if tables else []
        for table in tables:
            if table not in known:
                others = [TableId.parse(name) for name in known if name not in tables]
                hint = did_you_mean_table(TableId.parse(table), others).rstrip()
                raise OperatorError(
                    f"table {table} is not in the lake",
                    remedy=hint or f"the lake has {', '.join(known)}",
                )

    def _is_cut(self, complete: Collection[str]) -> bool:
        if self._last is None:
            return False
        chosen = {table for table in self._last.tables if self._is_chosen(table)}
        return chosen == set(complete) - set(self.stopped)

    def _move_all(self, due: Mapping[str, Definition], through: Epoch) -> None:
        moves = [self._pool.submit(self._try, table, due[table], through) for table in due]
        try:
            for move in moves:
                move.result()
        finally:
            for move in moves:
                move.cancel()
            wait(moves)

    def _try(self, table: str, definition: Definition, through: Epoch) -> None:
        if self._stop_wanted.is_set():
            return
        try:
            known, path = self._at.get(table), table_path(self.target, table)
            self.names.ensure_free(table, path)
            at = self._mover.advance(table, definition, known, self._epochs, through)
            self._at[table] = at
            signature = self._mover.owner.signature(at.epoch, at.schema_version)
            self.names.register(table, path, definition, signature)
            self.rebuild.discard(table)
            if self.stopped.pop(table, None) is not None:
                self._log.info("table.resumed", table=table, epoch=through.number)
        except TableError as error:
            self._stop(table, error)
        except FolderError as error:
            self._stop(table, TableError(TableId.parse(table), error.what, remedy=error.remedy))
        except IngestdError:
            raise
        except SPARK_ERRORS as error:
            meaning = meaning_of(error)
            self._stop(table, TableError(TableId.parse(table), meaning.what, remedy=meaning.remedy))
        except (pa.ArrowException, ArithmeticError, LookupError, TypeError, ValueError) as error:
            # Without its text, which may contain a value.
            place = traceback.extract_tb(error.__traceback__)[-1]
            what = (
                f"{type(error).__name__} in {Path(place.filename).name}, line {place.lineno}, while"
                f" moving it to epoch {through.number}"
            )
            remedy = f"--rebuild {table} re-creates it; report this if it happens again"
            self._stop(table, TableError(TableId.parse(table), what, remedy=remedy))

    def _stop(self, table: str, error: TableError) -> None:
        self._at.pop(table, None)
        if table not in self.stopped:
            self._log.error("table.stopped", table=table, reason=error.reason, remedy=error.remedy)
        self.stopped[table] = error

    def _registry(self) -> Registry:
        """Return the contents of `_tables`, re-read if it has changed."""
        newest = self._newest_registry()
        if newest != self._registry_version:
            self._known = self.lake.registry()
            self._registry_version = newest
        return self._known

    def _newest_registry(self) -> object:
        found = self.lake.checked.state(self.lake.session, self.lake.tables_path)
        return None if found is None else found.mark

    @property
    def _log(self) -> structlog.stdlib.BoundLogger:
        log: structlog.stdlib.BoundLogger = structlog.get_logger("ingestd")
        return log.bind(source=self.lake.source)
