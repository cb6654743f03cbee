"""What the driver may do without a Spark job, and the fallback by which Spark does all of it.

Each method returns None or False if Spark must do the work. So callers always have both ways, and
a job is right without an accelerator. `spark_jobs.accelerator` works by Delta's own classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from spark_jobs.delta_log.sql_tables import SqlTables

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import pyarrow as pa
    from pyspark.sql import SparkSession

    from spark_jobs.delta_log.commits import Signature
    from spark_jobs.delta_log.tables import DeltaTables


class NewestRows(Protocol):
    """The rows that the newest entries of a table's log added."""

    def rows_above(self, column: str, above: int, through: int | None = None) -> pa.Table | None:
        """Return the rows whose integer `column` is above `above`; None if Spark must read.

        Later log entries must not have lower values than earlier ones. `through`: rows above this
        value are not needed, though some may be returned.
        """
        ...

    def all_rows(self) -> pa.Table | None:
        """Return all rows of a table with few entries; None if Spark must read."""
        ...

    def last_rows(self, app_id: str | None = None) -> pa.Table | None:
        """Return the rows that the last adding commit added; None if Spark must read.

        That commit may have removed rows only if it is of the Delta application `app_id`.
        """
        ...


class RowWriter(Protocol):
    """Adds rows to a table that has one row for each epoch."""

    def look(self) -> bool:
        """Note the version of the table; return whether `follow` needs its newest row after that.

        (To read it may be a Spark job.)
        """
        ...

    def follow(self, epoch: int | None) -> None:
        """Note the epoch of the newest row at the version that `look` saw; None without a row."""
        ...

    def put(self, rows: pa.Table, epoch: int, *, replace: bool) -> bool:
        """Add the row of an epoch, or replace it; return False if Spark must write.

        It must be written by Spark if another writer may have committed.
        """
        ...


class OutcomeMerge(Protocol):
    """A mirror that the driver may change."""

    @property
    def is_likely(self) -> bool:
        """Return whether `apply` is worth trying for any outcomes: not for large mirrors."""
        ...

    def apply(self, outcomes: pa.Table, key: Sequence[str], signature: Signature) -> bool:
        """Apply outcomes, signed as by `commits.signed`; return False if Spark must."""
        ...


class MergeLimits(Protocol):
    """See `spark_jobs.mirrors.policy.MirrorPolicy`."""

    @property
    def small_file_bytes(self) -> int: ...  # noqa: D102 - as there
    @property
    def most_small_files(self) -> int: ...  # noqa: D102
    @property
    def read_file_bytes(self) -> int: ...  # noqa: D102
    @property
    def file_changed_share(self) -> int: ...  # noqa: D102
    @property
    def read_memory_bytes(self) -> int: ...  # noqa: D102


class Accelerator(Protocol):
    """The driver's part of a run. Safe to use from several threads, each with its session."""

    @property
    def tables(self) -> DeltaTables:
        """What answers questions about logs of tables."""
        ...

    def newest(self, session: SparkSession, path: str) -> NewestRows:
        """Return the newest rows of the table at `path`."""
        ...

    def row_writer(self, session: SparkSession, path: str, app_id: str) -> RowWriter:
        """Return a writer to the table at `path`, as the Delta application `app_id`."""
        ...

    def merge(
        self, session: SparkSession, path: str, app_id: str, above: int, limits: MergeLimits
    ) -> OutcomeMerge | None:
        """Return the mirror at `path`, which holds epoch `above`; None if Spark must change it."""
        ...

    def room_for(self, nbytes: int) -> AbstractContextManager[None]:
        """Wait until no other caller holds more than a few MB in memory; no wait for few bytes."""
        ...


@dataclass(frozen=True, slots=True)
class SparkAlone:
    """The accelerator that leaves everything to Spark."""

    tables: DeltaTables = field(default_factory=SqlTables)

    def newest(self, session: SparkSession, path: str) -> NewestRows:
        """Return no rows."""
        del session, path
        return _NOTHING

    def row_writer(self, session: SparkSession, path: str, app_id: str) -> RowWriter:
        """Return a writer that writes nothing."""
        del session, path, app_id
        return _NOTHING

    def merge(
        self, session: SparkSession, path: str, app_id: str, above: int, limits: MergeLimits
    ) -> OutcomeMerge | None:
        """Return None."""
        del session, path, app_id, above, limits
        return None

    def room_for(self, nbytes: int) -> AbstractContextManager[None]:
        """Return at once: Spark's own memory holds the rows."""
        del nbytes
        return nullcontext()


class _LeftToSpark:
    def rows_above(self, column: str, above: int, through: int | None = None) -> pa.Table | None:
        del column, above, through
        return None

    def all_rows(self) -> pa.Table | None:
        return None

    def last_rows(self, app_id: str | None = None) -> pa.Table | None:
        del app_id
        return None

    def look(self) -> bool:
        return False

    def follow(self, epoch: int | None) -> None:
        del epoch

    def put(self, rows: pa.Table, epoch: int, *, replace: bool) -> bool:
        del rows, epoch, replace
        return False


_NOTHING = _LeftToSpark()
