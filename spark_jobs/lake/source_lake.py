"""A source's lake as Spark reads it: its epochs, its tables, rows of a range of epochs.

Raw tables are append-only, and rows of an epoch that is not in `_epochs` yet have a number above
all that are. So the newest version with a bound on `_cdc_epoch` is what an older version was: no
version has to be kept for readers.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as f

from ingestd.lake.layout import Layout
from ingestd.lake.registry_table import SCHEMA as TABLES_SCHEMA
from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.fsync import Fsync
from ingestd.lake.store.store import LocalStore, ensure_own_links
from ingestd.model.errors import OperatorError
from ingestd.model.schema import TableId
from spark_jobs.delta_log.checked_tables import CheckedTables, is_connect
from spark_jobs.delta_log.commits import current_version
from spark_jobs.delta_log.driver_files import local_folder
from spark_jobs.delta_log.newest_files import NewestFiles
from spark_jobs.lake.tables import Registry

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True)
class Epoch:
    """A row of `_epochs`.

    `rows`: of each table that changed, by its text ("schema.table"). `nbytes`: of all of them, as
    the source sent them.
    """

    number: int
    end_lsn: int
    last_commit_ts: Any
    rows: dict[str, int]
    nbytes: int = 0

    @classmethod
    def of(cls, row: Any) -> Epoch:  # noqa: ANN401 - a pyspark Row
        """Take a row with EPOCH_COLUMNS."""
        rows = {t["table"]: t["rows"] for t in row["tables"]}
        return cls(row["epoch"], row["end_lsn"], row["last_commit_ts"], rows, row["bytes"])

    @classmethod
    def of_arrow(cls, row: dict[str, Any]) -> Epoch:
        """Take a row that Arrow gave."""
        return cls.of(row | {"last_commit_ts": as_spark_gives(row["last_commit_ts"])})

    def nbytes_of(self, table: str) -> int:
        """Estimate the bytes of one table: its share of the rows."""
        return self.nbytes * self.rows.get(table, 0) // max(1, sum(self.rows.values()))


def as_spark_gives(at: datetime) -> datetime:
    """Return a time of Arrow's (UTC) as Spark's rows have it: of this process' zone, without it."""
    return at.replace(tzinfo=UTC).astimezone().replace(tzinfo=None)


def _number(epoch: Epoch) -> int:
    return epoch.number


EPOCH_COLUMNS = ("epoch", "end_lsn", "last_commit_ts", "tables", "bytes")


class SourceLake:
    """One source's tables in a lake. `uri` as Spark names it (`cli.arguments.spark_uri`).

    `unread_lsn`: of raw tables, rows up to this position are not read (files of them are gone).
    `checked`: by what tables are read, those of a job's target as well.
    """

    def __init__(
        self,
        session: SparkSession,
        uri: str,
        source: str,
        *,
        unread_lsn: int = -1,
        checked: CheckedTables | None = None,
    ) -> None:
        self.unread_lsn = unread_lsn
        self.checked = checked or CheckedTables()
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
        """Where `_epochs` lies. Raises FolderError behind a link of another user."""
        return self._path(self._layout.epochs)

    @property
    def tables_path(self) -> str:
        """Where `_tables` lies. Raises FolderError behind a link of another user."""
        return self._path(self._layout.tables)

    def raw_path(self, table: str) -> str:
        """Where a table's raw table lies. Raises TableError for a name too long for a path.

        Raises FolderError behind a link of another user.
        """
        return self._path(self._layout.raw(TableId.parse(table)))

    def _path(self, folder: str) -> str:
        path = f"{self.uri}/{folder}"
        if self._store is not None:
            with storage_faults(path):
                ensure_own_links(self._store, folder)
        return path

    @cached_property
    def _store(self) -> LocalStore | None:
        """The lake's files where this process and Spark have them on one machine."""
        if is_connect(self.session):
            return None
        root = local_folder(self.session, self.uri)
        return None if root is None else LocalStore(root, Fsync())

    def using(self, session: SparkSession) -> SourceLake:
        """Return the same lake, read in another session."""
        return self._but(session, self.unread_lsn)

    def above(self, lsn: int) -> SourceLake:
        """Return the same lake without the raw rows up to a position.

        Their files are not read (statistics of `_cdc_lsn`), but `_epochs` still has their number:
        whoever counts sees whether they are missed.
        """
        return self._but(self.session, lsn)

    def _but(self, session: SparkSession, unread_lsn: int) -> SourceLake:
        return SourceLake(
            session, self.uri, self.source, unread_lsn=unread_lsn, checked=self.checked
        )

    def require(self) -> None:
        """Raise OperatorError unless a daemon has made this lake."""
        if current_version(self.session, self.epochs_path) < 0:
            raise OperatorError(
                f"there is no {self.epochs_path}: source {self.source} has no epochs in this lake",
                remedy="check --lake and --source; `ingestd run` makes the first epoch",
            )

    def epochs(self, above: int = 0) -> list[Epoch]:
        """Return the epochs with higher numbers, in order. Spark job, unless they are few."""
        few = NewestFiles(self.session, self.epochs_path).rows_above("epoch", above)
        if few is not None and set(EPOCH_COLUMNS).issubset(few.column_names):
            found = sorted((Epoch.of_arrow(row) for row in few.to_pylist()), key=_number)
            if [epoch.number for epoch in found] == list(range(above + 1, above + 1 + len(found))):
                return found
        rows = self._load(self.epochs_path).where(f.col("epoch") > above).select(*EPOCH_COLUMNS)
        return sorted(map(Epoch.of, rows.collect()), key=_number)

    def registry(self) -> Registry:
        """Read `_tables`. Spark job, unless it is short."""
        few = NewestFiles(self.session, self.tables_path).all_rows()
        if few is not None:
            absent = dict.fromkeys(TABLES_SCHEMA.names)  # of files from before a column came
            return Registry(absent | row for row in few.to_pylist())
        rows = self._load(self.tables_path).drop("storage")
        return Registry(row.asDict(recursive=True) for row in rows.collect())

    def changes(self, table: str, *, above: int, through: int) -> DataFrame:
        """Return the raw rows of the epochs above one and through another (inclusive).

        Files of other epochs are not read (statistics of `_cdc_epoch`). Raises AnalysisException if
        there is no raw table, FolderError if its log names files of others.
        """
        epoch = f.col("_cdc_epoch")
        rows = self._load(self.raw_path(table)).where((epoch > above) & (epoch <= through))
        return rows if self.unread_lsn < 0 else rows.where(f.col("_cdc_lsn") > self.unread_lsn)

    def epochs_lacking_rows(
        self, table: str, through: int, above_lsn: int, *, found: int
    ) -> list[int]:
        """Name the epochs of which the raw table has fewer rows than `_epochs` says.

        Those up to one that end above a position. `found`: rows that it has of all up to that one.
        A Spark job, unless it has all.
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
