"""A source's lake as Spark reads it: its epochs, its tables, and rows of a range of epochs.

Raw tables are append-only, and rows of an epoch that is not yet in `_epochs` have a higher number
than all that are. So a bound on `_cdc_epoch` makes the newest version equal to an older one, and no
version needs to be kept for readers.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as f

from ingestd.lake.definitions import Registry
from ingestd.lake.layout import Layout
from ingestd.lake.registry_table import SCHEMA as TABLES_SCHEMA
from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync
from ingestd.lake.store.store import ensure_own_links
from ingestd.model.errors import OperatorError
from ingestd.model.schema import TableId
from spark_jobs.delta_log.acceleration import Accelerator, SparkAlone
from spark_jobs.delta_log.checked_tables import CheckedTables
from spark_jobs.delta_log.table_files import folder_here
from spark_jobs.delta_log.tables import DeltaState, is_connect
from spark_jobs.lake.exchange import to_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class Epoch:
    """A row of `_epochs`.

    `rows`: the number of rows by changed table ("schema.table"). `nbytes`: of all these rows, as
    the source sent them.
    """

    number: int
    end_lsn: int
    last_commit_ts: datetime
    rows: dict[str, int]
    nbytes: int = 0

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Epoch:
        """Return the epoch in a row with EPOCH_COLUMNS."""
        rows = {t["table"]: t["rows"] for t in row["tables"]}
        return cls(row["epoch"], row["end_lsn"], utc(row["last_commit_ts"]), rows, row["bytes"])

    def nbytes_of(self, table: str) -> int:
        """Return the estimated bytes of one table: its share of the rows."""
        return self.nbytes * self.rows.get(table, 0) // max(1, sum(self.rows.values()))


def utc(at: datetime) -> datetime:
    """Return a time of UTC, with its zone: Arrow's lack it in files with times as INT96."""
    return at.replace(tzinfo=UTC)


def _number(epoch: Epoch) -> int:
    return epoch.number


EPOCH_COLUMNS = ("epoch", "end_lsn", "last_commit_ts", "tables", "bytes")


class SourceLake:
    """One source's tables in a lake. `uri`: as Spark names it (`cli.arguments.spark_uri`).

    `unread_lsn`: raw rows up to this position are skipped because files of them are missing.
    `checked`: reads the lake's tables, and those of a job's target.
    """

    def __init__(
        self,
        session: SparkSession,
        uri: str,
        source: str,
        *,
        unread_lsn: int = -1,
        checked: CheckedTables | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.accelerator = accelerator or SparkAlone()
        self.unread_lsn = unread_lsn
        self.checked = checked or CheckedTables(self.accelerator.tables)
        self.session = session
        self.source = source
        self.uri = uri.rstrip("/")
        self._layout = Layout(source)

    @property
    def root(self) -> str:
        """The source's folder."""
        return f"{self.uri}/{self._layout.root}"

    @property
    def epochs_path(self) -> str:
        """The path of `_epochs`. Raises as `raw_path`."""
        return self._path(self._layout.epochs)

    @property
    def tables_path(self) -> str:
        """The path of `_tables`. Raises as `raw_path`."""
        return self._path(self._layout.tables)

    def raw_path(self, table: str) -> str:
        """Return the path of a raw table. Raises TableError for a name too long for a path.

        Raises FolderError behind another user's link, and for a log that Delta can't read safely.
        """
        return self._path(self._layout.raw(TableId.parse(table)))

    def _path(self, folder: str) -> str:
        path = f"{self.uri}/{folder}"
        if self._store is not None:
            with storage_faults(path):
                ensure_own_links(self._store, folder)
                self.checked.ensure_readable(self._store, folder)
        return path

    @cached_property
    def _store(self) -> LocalStore | None:
        """The lake's files, if Spark and this process have them on the same machine."""
        if is_connect(self.session):
            return None
        root = folder_here(self.uri)
        return None if root is None else LocalStore(root, Fsync())

    def using(self, session: SparkSession) -> SourceLake:
        """Return the same lake, read in another session."""
        return self._but(session, self.unread_lsn)

    def without_rows_up_to(self, lsn: int) -> SourceLake:
        """Return the same lake without the raw rows up to a position.

        Statistics of `_cdc_lsn` skip their files, but `_epochs` still counts their rows, so a
        caller that compares counts detects that they are missing.
        """
        return self._but(self.session, lsn)

    def _but(self, session: SparkSession, unread_lsn: int) -> SourceLake:
        return SourceLake(
            session,
            self.uri,
            self.source,
            unread_lsn=unread_lsn,
            checked=self.checked,
            accelerator=self.accelerator,
        )

    def require(self) -> DeltaState:
        """Return the state of `_epochs`. Raises OperatorError unless a daemon has created it."""
        found = self.checked.state(self.session, self.epochs_path)
        if found is None:
            raise OperatorError(
                f"{self.epochs_path} is missing: source {self.source} has no epochs in this lake",
                remedy="check --lake and --source; `ingestd run` commits the first epoch",
            )
        return found

    def epochs(self, above: int = 0) -> list[Epoch]:
        """Return the epochs with higher numbers, in order. Spark job, unless they are few.

        Raises OperatorError if one is missing or there twice before the last one.
        """
        found = self._few_epochs(above)
        if found is None:
            rows = self._load(self.epochs_path).where(f.col("epoch") > above).select(*EPOCH_COLUMNS)
            found = sorted(map(Epoch.from_row, to_rows(rows)), key=_number)
        for expected, epoch in enumerate(found, start=above + 1):
            if epoch.number != expected:
                raise self.epoch_missing(expected, f"the next one is {epoch.number}")
        return found

    def epoch_missing(self, number: int, what: str) -> OperatorError:
        """Return the error for an epoch that is not in `_epochs`."""
        return OperatorError(
            f"{self.epochs_path}: epoch {number} is missing, {what}; nothing was skipped",
            remedy="restore `_epochs` to the version that has it, or start over in a new --target",
        )

    def _few_epochs(self, above: int) -> list[Epoch] | None:
        """Return the epochs from the newest log entries; None if those may lack one."""
        few = self.accelerator.newest(self.session, self.epochs_path).rows_above("epoch", above)
        if few is None or not set(EPOCH_COLUMNS).issubset(few.column_names):
            return None
        found = sorted(map(Epoch.from_row, few.to_pylist()), key=_number)
        expected = range(above + 1, above + 1 + len(found))
        return found if [epoch.number for epoch in found] == list(expected) else None

    def registry(self) -> Registry:
        """Return the contents of `_tables`. Spark job, unless it is short."""
        few = self.accelerator.newest(self.session, self.tables_path).all_rows()
        if few is not None:
            absent = dict.fromkeys(TABLES_SCHEMA.names)  # for files without a column
            return Registry(absent | row for row in few.to_pylist())
        rows = self._load(self.tables_path).drop("storage")
        return Registry(to_rows(rows))

    def changes(self, table: str, *, above: int, through: int) -> DataFrame:
        """Return the raw rows of the epochs above one, up to another (inclusive).

        Statistics of `_cdc_epoch` skip the files of other epochs. Raises AnalysisException if the
        raw table does not exist, FolderError if its log names files that are not its own.
        """
        epoch = f.col("_cdc_epoch")
        rows = self._load(self.raw_path(table)).where((epoch > above) & (epoch <= through))
        return rows if self.unread_lsn < 0 else rows.where(f.col("_cdc_lsn") > self.unread_lsn)

    def epochs_lacking_rows(
        self, table: str, through: int, above_lsn: int, *, found: int
    ) -> list[int]:
        """Return the epochs of which the raw table has fewer rows than `_epochs` says.

        Checks epochs up to one that end above a position. `found`: the raw table's rows of all
        epochs up to that one. Spark job, unless no row is missing.
        """
        wanted = [e for e in self.epochs() if e.number <= through and table in e.rows]
        if found >= sum(e.rows[table] for e in wanted):
            return []
        wanted = [e for e in wanted if e.end_lsn > above_lsn]
        if not wanted:
            return []
        rows = self.changes(table, above=wanted[0].number - 1, through=through)
        counted = rows.groupBy("_cdc_epoch").count().collect()
        there = {row["_cdc_epoch"]: row["count"] for row in counted}
        return [e.number for e in wanted if there.get(e.number, 0) < e.rows[table]]

    def _load(self, path: str) -> DataFrame:
        return self.checked.rows(self.session, path)


class EpochMemory:
    """The most recent epochs of a lake, by number; earlier ones are re-read.

    Safe to use from several threads.
    """

    def __init__(self, lake: SourceLake) -> None:
        self._lake = lake
        self._known: dict[int, Epoch] = {}
        self._lock = threading.Lock()

    def add_epochs(self, epochs: Sequence[Epoch]) -> None:
        """Add a batch, and drop all earlier epochs except the one before it."""
        if epochs:
            last = self._known.get(epochs[0].number - 1)
            self._known = {e.number: e for e in epochs}
            if last is not None:
                self._known[last.number] = last

    def between(self, above: int, through: int) -> list[Epoch]:
        """Return the epochs above `above`, up to and including `through`."""
        self._ensure(above + 1, through)
        return [self._known[n] for n in range(above + 1, through + 1)]

    def end_lsn(self, number: int) -> int:
        """Return the end position of an epoch; 0 for epoch 0."""
        if number == 0:
            return 0
        self._ensure(number, number)
        return self._known[number].end_lsn

    def _ensure(self, first: int, last: int) -> None:
        with self._lock:
            if not all(n in self._known for n in range(first, last + 1)):
                self._known |= {e.number: e for e in self._lake.epochs(first - 1)}
