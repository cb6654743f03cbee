"""The feed job: appends a table's changes from one epoch to another to its feed.

======================================  ==========================================================
the step                                action
======================================  ==========================================================
changes, TRUNCATEs, rows that were      one row for each change, with all of its values
read again
the first step, the `t` of a snapshot,  the differences between the feed's current rows and those
a column with a value in old rows,      of the table: at most one row per key
raw rows that are missing, --rebuild
======================================  ==========================================================

Both are one commit. A consumer that keeps the newest row per key, and removes deletions, has the
table as it was at the end of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from spark_jobs.feeds.feed_rows import changes_of, differences_of
from spark_jobs.feeds.table import FeedTable, names_of
from spark_jobs.histories.job import shape_of
from spark_jobs.histories.keyed import keyed_versions, keys_of
from spark_jobs.histories.window import (
    RowsGoneError,
    empty_window,
    raw_rows,
    read_changes,
    read_window,
)
from spark_jobs.lake.missing_values import with_missing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from ingestd.lake.definitions import LakeColumn
    from spark_jobs.engine.table_mover import Step
    from spark_jobs.histories.shape import HistoryShape
    from spark_jobs.histories.window import Window
    from spark_jobs.lake.source_lake import SourceLake

FEED_SETTINGS = {
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.adaptive.coalescePartitions.parallelismFirst": "false",
    "spark.databricks.delta.snapshotPartitions": "1",
}
"""Settings of the sessions that append: few files."""
_NEWEST = 1 << 62
"""Above all positions: the newest snapshot is wanted."""


class FeedJob:
    """The feed job, for `spark_jobs.engine.epoch_run.EpochRun`. Tables must have a key."""

    name = "feed"

    def advance(self, lake: SourceLake, step: Step) -> None:
        """Append a table's changes up to the end of `step.through`. See `TableJob`."""
        _FeedStep(lake, step, FeedTable(lake.session, step.path, lake.checked)).run()


@dataclass(frozen=True, slots=True)
class _FeedStep:
    lake: SourceLake
    step: Step
    feed: FeedTable

    def run(self) -> None:
        step = self.step
        shape = shape_of(self.lake, step)
        key = self.feed.key
        if key is None:
            self.feed.create(step.definition, step.signature)
        else:
            self._ensure_same_columns_identify(key)
        if self._is_altered:
            # Signed with the earlier epoch: a run that is killed in between is repeated.
            earlier = replace(step.signature, epoch=step.above, schema_version=0)
            self.feed.evolve(step.definition, earlier)
        has_new_values = self._is_altered and any(
            c.since_lsn and (c.missing is not None or c.is_again) for c in step.definition.columns
        )
        if not step.above or has_new_values or not self._append_changes(shape):
            self._append_differences(shape)

    @property
    def _is_altered(self) -> bool:
        return self.step.schema_version != self.step.definition.schema_version

    def _append_changes(self, shape: HistoryShape) -> bool:
        """Append the step's changes, one by one; return False if only the differences are known."""
        step = self.step
        try:
            window = read_changes(
                self.lake,
                step.table,
                shape,
                above=step.above,
                through=step.through.number,
                rows=step.rows,
            )
        except RowsGoneError:
            return False
        if window is None:
            if not self._is_altered:
                return True
            window = self._empty_window(shape)  # its commit records that the columns are known
        try:
            if any(mark.is_snapshot for mark in window.marks):
                return False
            self._ensure_same_key(window)
            self._append(self._changes(window, shape))
        finally:
            window.close()
        return True

    def _changes(self, window: Window, shape: HistoryShape) -> DataFrame:
        plain = _without_history(shape)
        added = [c for c in shape.present if c.since_lsn]
        window = replace(window, rows=with_missing(window.rows, added))
        needs_rows = bool(window.unsent or window.has_reads or window.moves or window.marks)
        before = None
        if needs_rows:
            keys = None if window.marks else keys_of(window, plain)
            before = self.feed.current_rows(plain, keys)
        versions = keyed_versions(window, before, plain)
        return changes_of(versions, window, plain, has_rows_before=needs_rows)

    def _append_differences(self, shape: HistoryShape) -> None:
        step, epochs = self.step, self.lake.epochs()
        total = sum(e.rows.get(step.table, 0) for e in epochs if e.number <= step.through.number)
        try:
            window = read_window(
                self.lake,
                step.table,
                shape,
                above=0,
                above_lsn=0,
                through=step.through.number,
                rows=total,
                key_since=_NEWEST,
            )
        except RowsGoneError as error:
            raise TableError(
                TableId.parse(step.table),
                f"{self.lake.raw_path(step.table)}: {error}",
                remedy=f"`ingestd snapshot {self.lake.source} {step.table}`: the feed continues"
                " with the differences",
            ) from error
        window = window or self._empty_window(shape)
        try:
            self._ensure_same_key(window)
            version = self.feed.version
            plain = _without_history(shape)
            rows = differences_of(
                keyed_versions(window, None, shape),
                self.feed.current_rows(plain) if version else None,
                plain,
                epoch=step.through.number,
                end=(step.through.end_lsn, step.through.last_commit_ts),
                number=version + 1,
            )
            self._append(rows)
        finally:
            window.close()

    def _append(self, rows: DataFrame) -> None:
        # An epoch is appended again for --rebuild, and for a column's default that was recorded
        # without an epoch. The differences are none if they have been appended already.
        is_later = 0 < self.step.above < self.step.through.number
        app_id = self.step.app_id if is_later else None
        self.feed.append_rows(rows, self.step.signature, app_id)

    def _empty_window(self, shape: HistoryShape) -> Window:
        return empty_window(raw_rows(self.lake, self.step.table, shape, above=0, through=0))

    def _ensure_same_columns_identify(self, known: list[str]) -> None:
        """Raise TableError if the feed identifies rows by other columns: consumers do, too."""
        step = self.step
        if known != list(step.definition.key):
            raise TableError(
                TableId.parse(step.table),
                f"its key changed from {names_of(known)} to {names_of(step.definition.key)}, and"
                " consumers of the feed identify rows by the former",
                remedy=f"move {step.path} away: a new feed begins, with all rows; let its"
                " consumers begin again, by the new key",
            )

    def _ensure_same_key(self, window: Window) -> None:
        """Raise TableError if any of the changes may identify their rows by another key."""
        since = self.step.definition.key_since_lsn
        if window.named_from is not None and window.named_from < since:
            raise TableError(
                TableId.parse(self.step.table),
                f"its replica identity changed at {since}, and earlier changes identify rows by the"
                " previous one",
                remedy=f"`ingestd snapshot {self.lake.source} {self.step.table}`: the feed"
                " continues with the differences",
            )


def _without_history(shape: HistoryShape) -> HistoryShape:
    """Return the shape of rows that have the source's present values in all present columns."""
    present = tuple(map(_as_always_there, shape.present))
    return replace(shape, present=present, lives=present)


def _as_always_there(column: LakeColumn) -> LakeColumn:
    return replace(
        column, missing=None, since_lsn=0, since=None, is_again=False, from_lsn=0, until_lsn=None
    )
