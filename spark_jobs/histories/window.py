"""The raw rows from which a part of a history is computed: a window of positions.

Rows of later epochs mostly have higher positions than all earlier rows. A snapshot is the
exception: its rows and its `t` may precede changes of earlier epochs. So a window begins at the
lowest position of the new rows and contains *all* rows from there on, even of earlier epochs, and
the history is re-created from there on. This makes a history a function of the raw rows, however
they were batched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as f

from ingestd.model.changes import DELETE, MARKER_SEQ, OF_BEFORE, SNAPSHOT, TRUNCATE, UPDATE
from spark_jobs.fold.spark_sql import with_keys
from spark_jobs.histories.shape import (
    UNCHANGED,
    HistoryShape,
    literal_position,
    position,
)
from spark_jobs.lake.columns import with_columns
from spark_jobs.lake.variants import as_texts, kept_texts

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from spark_jobs.lake.source_lake import SourceLake

BEFORE = "_cdc_before"


class RowsGoneError(Exception):
    """The raw table has fewer rows than `_epochs` says."""


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """A `t` of a snapshot (`seq` is -1) or a TRUNCATE. `at_us`: microseconds since 1970 UTC."""

    lsn: int
    seq: int
    at_us: int

    @property
    def is_snapshot(self) -> bool:
        """Return whether it is the `t` of a snapshot."""
        return self.seq == MARKER_SEQ


@dataclass(frozen=True, slots=True)
class Window:
    """Raw rows of all epochs up to one, from the position `first` on (cached; `close` it).

    `marks`: its `t`, in order. `unsent`: columns that some update did not send. `moves`: updates
    that changed the key; `moves_unsent`: those of them that left out values. `has_reads`: it has
    `r` rows; `lowest_read`: the LSN of the lowest. `named_from`: LSN of the lowest change that
    identifies an existing row. `is_late`: the history may have versions that begin in the window,
    because it has rows of earlier epochs, or because a column was re-created. `kept_texts`: values
    that VARIANT can't hold.
    """

    rows: DataFrame
    count: int
    first: tuple[int, int]
    marks: tuple[Mark, ...]
    unsent: tuple[str, ...]
    moves: int
    moves_unsent: int
    has_reads: bool
    lowest_read: int | None
    named_from: int | None = None
    is_late: bool = False
    kept_texts: int = 0

    def close(self) -> None:
        """Free the rows that Spark caches."""
        self.rows.unpersist()

    @property
    def begins(self) -> Column:
        """`first`, for comparison with a `position`."""
        return literal_position(*self.first)


def read_window(
    lake: SourceLake,
    table: str,
    shape: HistoryShape,
    *,
    above: int,
    above_lsn: int,
    through: int,
    rows: int,
    key_since: int = 0,
) -> Window | None:
    """Return the window for the epochs above one, up to another; its rows are cached.

    None if they have no row of the table. `above_lsn`: the end of epoch `above`. `rows`: the
    expected number; raises RowsGoneError if there are fewer.

    If `above` is 0, a history begins. It begins with the first snapshot from `key_since` on, where
    changes began to identify rows by the present key. It begins with the newest snapshot if there
    is no such one, without a key, or if rows are missing. Rows from before that snapshot do not
    form a complete table. One or two Spark jobs, more if rows came late.
    """
    found = _measured(raw_rows(lake, table, shape, above=above, through=through), shape)
    count = 0 if found is None else found.count
    if above == 0:
        if found is None:
            if rows:
                msg = f"all {rows} rows of epochs 1 to {through} are missing"
                raise RowsGoneError(msg)
            return None
        if count < rows:
            _ensure_nothing_counts(lake, table, found, through)
        return _beginning(found, shape, key_since, is_lacking=count < rows)
    if count < rows:
        if found is not None:
            found.close()
        msg = f"{rows - count} rows of epochs {above + 1} to {through} are missing"
        raise RowsGoneError(msg)
    if found is None:
        return None
    first = found.first
    if found.has_reads and not shape.is_keyed and found.lowest_read is not None:
        first = min(first, (found.lowest_read, MARKER_SEQ))  # without a key, reads need their `t`
    if first >= (above_lsn, 1):  # above all earlier rows, including reads
        return found
    found.close()
    _ensure_all_from(lake, table, first[0], through)
    every = raw_rows(lake, table, shape, above=0, through=through)
    above_first = (f.col("_cdc_lsn") >= first[0]) & (position() >= literal_position(*first))
    return _measured(every.where(above_first), shape, first)


def read_changes(
    lake: SourceLake, table: str, shape: HistoryShape, *, above: int, through: int, rows: int
) -> Window | None:
    """Return the rows of the epochs above one, up to another, of a keyed table; they are cached.

    Leaves out each `r` row that came after a change of its key, or a `t`, with a higher position.
    So a row has a higher position than all rows of its key in earlier epochs, unless the window has
    the `t` of a snapshot. None if the epochs have no row. `rows`: the expected number; raises
    RowsGoneError if there are fewer. One Spark job; two if there are `r` rows.
    """
    found = _measured(raw_rows(lake, table, shape, above=above, through=through), shape)
    count = 0 if found is None else found.count
    if count < rows:
        if found is not None:
            found.close()
        msg = f"{rows - count} rows of epochs {above + 1} to {through} are missing"
        raise RowsGoneError(msg)
    if found is None or found.lowest_read is None:
        return found
    try:
        _ensure_all_from(lake, table, found.lowest_read, through)
        every = raw_rows(lake, table, shape, above=0, through=through)
        later = _key_changes(every.where(f.col("_cdc_lsn") >= found.lowest_read), shape)
        return _measured(_without_overtaken(found.rows, later, shape), shape)
    finally:
        found.close()


def _key_changes(rows: DataFrame, shape: HistoryShape) -> DataFrame:
    """Return the keys of rows, new and old, with their positions, epochs and operations."""
    place = ("_cdc_lsn", "_cdc_seq", "_cdc_epoch", "_cdc_op")
    own = rows.select(*shape.named_parts(), *place)
    if not has_old_keys(rows, shape):
        return own
    old = rows.where(moved(rows, shape))
    return own.union(old.select(*shape.named_parts(struct=BEFORE, prefix=OF_BEFORE), *place))


def _without_overtaken(rows: DataFrame, changes: DataFrame, shape: HistoryShape) -> DataFrame:
    """Leave out `r` rows that came after a change of their key, or a `t`, above their position."""
    is_read = f.col("_cdc_op") == SNAPSHOT
    read = rows.where(is_read).select("*", *shape.named_parts())
    is_same = f.expr("true")
    for name in shape.part_names:
        is_same = is_same & f.col(f"k.{name}").eqNullSafe(f.col(f"c.{name}"))
    is_above = position("k._cdc_lsn", "k._cdc_seq") > position("c._cdc_lsn", "c._cdc_seq")
    came_before = f.col("k._cdc_epoch") < f.col("c._cdc_epoch")
    kept = read.alias("c")
    for kind in (f.col("k._cdc_op") == TRUNCATE, (f.col("k._cdc_op") != TRUNCATE) & is_same):
        kept = kept.join(changes.alias("k"), kind & is_above & came_before, "left_anti").alias("c")
    return rows.where(~is_read).unionByName(kept.drop(*shape.part_names))


def _ensure_all_from(lake: SourceLake, table: str, lsn: int, through: int) -> None:
    """Raise RowsGoneError unless all rows from a position on can be read again."""
    lost = lake.epochs_lacking_rows(table, through, lsn, found=0)
    if lost:
        msg = f"rows of epoch {min(lost)} are missing"
        raise RowsGoneError(msg)


def raw_rows(
    lake: SourceLake, table: str, shape: HistoryShape, *, above: int, through: int
) -> DataFrame:
    """Return the raw rows of the epochs above one, up to another, with all of the shape's columns.

    Key parts that an update did not send (unchanged TOAST) are taken from the old row.
    """
    rows = as_texts(lake.changes(table, above=above, through=through), shape.variants)
    lacking = {
        n: f.lit(None).cast(kind) for n, kind in shape.types.items() if n not in rows.columns
    }
    rows = with_columns(rows, lacking)
    keyed = with_keys(rows, shape.key)
    if keyed is rows:
        return rows
    return keyed.withColumn(UNCHANGED, f.when(f.size(UNCHANGED) > 0, f.col(UNCHANGED)))


def _beginning(
    found: Window, shape: HistoryShape, key_since: int, *, is_lacking: bool
) -> Window | None:
    points = [(m.lsn, m.seq) for m in found.marks if m.is_snapshot]
    if not points:
        return found
    named = [point for point in points if point[0] >= key_since] or points[-1:]
    first = named[0] if shape.is_keyed and not is_lacking else points[-1]
    if found.first >= first:
        return found
    whole = found.rows.where(position() >= literal_position(*first))
    found.close()
    return _measured(whole, shape)


def _ensure_nothing_counts(lake: SourceLake, table: str, found: Window, through: int) -> None:
    """Raise RowsGoneError unless all missing rows precede the newest snapshot."""
    newest = max((m.lsn for m in found.marks if m.is_snapshot), default=-1)
    lost = lake.epochs_lacking_rows(table, through, newest, found=found.count)
    if lost:
        found.close()
        msg = f"rows of epoch {min(lost)} are missing, and no snapshot followed"
        raise RowsGoneError(msg)


def _measured(
    rows: DataFrame, shape: HistoryShape, first: tuple[int, int] | None = None
) -> Window | None:
    rows = rows.persist()
    op, is_move = f.col("_cdc_op"), moved(rows, shape)
    mark = f.struct(
        f.col("_cdc_lsn").alias("lsn"),
        f.col("_cdc_seq").alias("seq"),
        f.unix_micros("_cdc_ts").alias("at_us"),
    )
    figures = rows.agg(
        f.count("*").alias("count"),
        f.min(position()).alias("first"),
        f.sort_array(f.collect_set(f.when(op == TRUNCATE, mark))).alias("marks"),
        f.array_distinct(f.flatten(f.collect_set(UNCHANGED))).alias("unsent"),
        f.count_if(is_move).alias("moves"),
        f.count_if(is_move & f.col(UNCHANGED).isNotNull()).alias("moves_unsent"),
        f.min(f.when(op == SNAPSHOT, f.col("_cdc_lsn"))).alias("lowest_read"),
        f.min(f.when(op.isin(UPDATE, DELETE), f.col("_cdc_lsn"))).alias("named_from"),
        (kept_texts(shape.variants) if shape.variants else f.lit(0)).alias("kept_texts"),
    )
    try:
        found: Any = figures.first()
    except BaseException:
        rows.unpersist()  # a retry must not read this cache
        raise
    if found["first"] is None:
        rows.unpersist()
        return None
    return Window(
        rows=rows,
        count=found["count"],
        first=first or (found["first"]["lsn"], found["first"]["seq"]),
        marks=tuple(Mark(m["lsn"], m["seq"], m["at_us"]) for m in found["marks"]),
        unsent=tuple(sorted(n for n in found["unsent"] or () if n in shape.types)),
        moves=found["moves"],
        moves_unsent=found["moves_unsent"],
        has_reads=found["lowest_read"] is not None,
        lowest_read=found["lowest_read"],
        named_from=found["named_from"],
        is_late=first is not None or any((lsn, 0) >= found["first"] for lsn in shape.made_again),
        kept_texts=found["kept_texts"],
    )


def empty_window(rows: DataFrame) -> Window:
    """Return a window of these rows, of which there are none."""
    return Window(rows, 0, (0, 0), (), (), 0, 0, has_reads=False, lowest_read=None)


def moved(rows: DataFrame, shape: HistoryShape) -> Column:
    """Return whether a raw row changed its key."""
    nothing = f.expr("false")
    if not shape.is_keyed or not has_old_keys(rows, shape):
        return nothing
    differs = nothing
    old = shape.parts(struct=BEFORE, prefix=OF_BEFORE)
    for ours, theirs in zip(shape.parts(), old, strict=True):
        differs = differs | f.expr(f"NOT ({ours} <=> {theirs})")
    return (f.col("_cdc_op") == UPDATE) & f.col(BEFORE).isNotNull() & differs


def has_old_keys(rows: DataFrame, shape: HistoryShape) -> bool:
    """Return whether `_cdc_before` has the key's columns."""
    there = old_columns(rows)
    return there.issuperset(name for names in shape.versions for name in names)


def old_columns(rows: DataFrame) -> set[str]:
    """Return the names of the columns that `_cdc_before` has."""
    kind: Any = rows.schema[BEFORE].dataType
    return set(kind.names)
