"""Versions of rows that have a key, from a window of raw rows and the versions before it.

SQL windows over the events of a key, in the order of their positions, decide everything. An event
is a stored version (`b`), a row that exists from then on (`o`), a deletion (`d`), or a row that
leaves its key (`x`, which begins no version).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window as Over
from pyspark.sql import functions as f
from pyspark.sql.types import DoubleType, FloatType

from ingestd.model.changes import OF_BEFORE, TRUNCATE
from spark_jobs.histories.shape import UNCHANGED, HistoryShape
from spark_jobs.histories.unsent_values import filled
from spark_jobs.histories.version_columns import (
    VERSION,
    count_below,
    first_above,
    kept_raw,
    no_end,
    with_missing,
)
from spark_jobs.histories.window import BEFORE, Window, moved
from spark_jobs.lake.columns import RAW, col
from spark_jobs.lake.missing_values import missing_value

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.window import WindowSpec

_BASE, _OPEN, _DELETE, _LEFT = "b", "o", "d", "x"
_YES = f.lit


def keyed_versions(window: Window, before: DataFrame | None, shape: HistoryShape) -> DataFrame:
    """Return the versions after the window, including those of `before`.

    `before`: versions that begin below the window and do not end there (`versions.stored`), of the
    keys in the window; of all keys if the window has marks. Columns: `VERSION`, the source's, and
    the key's parts.
    """
    events = _events(window, shape)
    if before is not None:
        events = events.unionByName(_standing(before), allowMissingColumns=True)
    if window.unsent:
        events = filled(events, window, shape)
    over = Over.partitionBy(*shape.part_names).orderBy("_cdc_lsn", "_cdc_seq")
    events = _with_ends_by_snapshots(events, window, over)
    if window.has_reads:
        events = _without_repeated_reads(events, window, shape, over)
    following = f.lead(
        f.struct(
            f.col("_cdc_lsn").alias("lsn"),
            f.col("_cdc_seq").alias("seq"),
            f.col("_cdc_ts").alias("at"),
        )
    ).over(over)
    truncates = [m for m in window.marks if not m.is_snapshot]
    emptied = first_above(truncates, f.col("_cdc_lsn"), f.col("_cdc_seq"))
    own = f.struct(
        f.col("_cdc_lsn").alias("lsn"), f.col("_cdc_seq").alias("seq"), f.col("_cdc_ts").alias("at")
    )
    ends = f.least(following, emptied, f.col("_cdc_vanished"))
    versions = (
        events.withColumn("_cdc_to", f.when(f.col("_cdc_kind") == _DELETE, own).otherwise(ends))
        .where(f.col("_cdc_kind") != _LEFT)
        .select(*(col(n) for n in shape.columns), *VERSION, *shape.part_names)
    )
    return with_missing(versions, shape)


def keys_of(window: Window, shape: HistoryShape) -> DataFrame:
    """Return the parts of every key, new or old, of the window's rows. Each key comes once."""
    rows = window.rows.where(f.col("_cdc_op") != TRUNCATE)
    keys = rows.select(*shape.named_parts())
    if window.moves:
        old = rows.where(moved(rows, shape))
        keys = keys.union(old.select(*shape.named_parts(struct=BEFORE, prefix=OF_BEFORE)))
    return keys.distinct()


def _events(window: Window, shape: HistoryShape) -> DataFrame:
    rows = window.rows.where(f.col("_cdc_op") != TRUNCATE)
    has_moved = moved(rows, shape) if window.moves else f.expr("false")
    op = f.col("_cdc_op")
    own = rows.select(
        *(col(n) for n in shape.columns),
        f.when(f.col(RAW).isNotNull(), kept_raw(f.col(RAW))).alias(RAW),
        f.col(RAW).alias("_cdc_sent_raw"),
        UNCHANGED,
        BEFORE,
        "_cdc_lsn",
        "_cdc_seq",
        "_cdc_ts",
        "_cdc_op",
        f.when(op == "d", _DELETE).otherwise(_OPEN).alias("_cdc_kind"),
        (has_moved | (op == "c")).alias("_cdc_comes"),
        has_moved.alias("_cdc_moved"),
        no_end().alias("_cdc_had"),
        f.expr("false").alias("_cdc_is_old"),
        *shape.named_parts(),
    )
    if not window.moves:
        return own
    left = rows.where(has_moved).select(
        *(f.lit(None).cast(kind).alias(n) for n, kind in shape.types.items()),
        f.lit(None).cast("map<string,string>").alias(RAW),
        f.lit(None).cast("map<string,string>").alias("_cdc_sent_raw"),
        f.lit(None).cast("array<string>").alias(UNCHANGED),
        BEFORE,
        "_cdc_lsn",
        "_cdc_seq",
        "_cdc_ts",
        "_cdc_op",
        f.lit(_LEFT).alias("_cdc_kind"),
        f.expr("false").alias("_cdc_comes"),
        f.expr("false").alias("_cdc_moved"),
        no_end().alias("_cdc_had"),
        f.expr("false").alias("_cdc_is_old"),
        *shape.named_parts(struct=BEFORE, prefix=OF_BEFORE),
    )
    return own.unionByName(left)


def _standing(before: DataFrame) -> DataFrame:
    return before.drop("_cdc_to").withColumns(
        {
            "_cdc_kind": f.lit(_BASE),
            "_cdc_comes": f.expr("false"),
            "_cdc_moved": f.expr("false"),
        }
    )


def _with_ends_by_snapshots(events: DataFrame, window: Window, over: WindowSpec) -> DataFrame:
    """Add `_cdc_vanished`: the `t` of the snapshot that shows that a row no longer exists.

    It does not if its key has no event above the `t`, or if the next one inserts it. A row that is
    re-read, changed or deleted above the `t` still existed there.
    """
    snapshots = [m for m in window.marks if m.is_snapshot]
    if not snapshots:
        return events.withColumn("_cdc_vanished", no_end())
    mark = first_above(snapshots, f.col("_cdc_lsn"), f.col("_cdc_seq"))
    next_lsn, next_seq = (f.lead(n).over(over) for n in ("_cdc_lsn", "_cdc_seq"))
    is_beyond = (next_lsn > mark["lsn"]) | ((next_lsn == mark["lsn"]) & (next_seq > mark["seq"]))
    comes = f.lead("_cdc_comes").over(over)
    vanished = f.when(next_lsn.isNull() | (is_beyond & comes), mark)
    is_row = f.col("_cdc_kind").isin(_BASE, _OPEN)
    return events.withColumn("_cdc_vanished", f.when(is_row, vanished).otherwise(no_end()))


def _without_repeated_reads(
    events: DataFrame, window: Window, shape: HistoryShape, over: WindowSpec
) -> DataFrame:
    """Leave out `r` rows that equal the row before them: nothing changed.

    If the row vanished after such an `r`, the `r` becomes the event that ends it.
    """
    truncates = [m for m in window.marks if not m.is_snapshot]
    era = count_below(truncates, f.col("_cdc_lsn"), f.col("_cdc_seq"))
    then = f.lag(f.struct("_cdc_lsn", *_values(shape)))
    events = events.withColumns(
        {
            "_cdc_then": then.over(over),
            "_cdc_was": f.lag("_cdc_kind").over(over),
            "_cdc_same_era": f.lag(era).over(over) == era,
        }
    )
    same = f.col("_cdc_same_era") & _is_same(shape)
    is_repeated = (
        (f.col("_cdc_op") == "r")
        & (f.col("_cdc_kind") == _OPEN)
        & f.col("_cdc_was").isin(_BASE, _OPEN)
        & f.coalesce(same, f.expr("false"))
    )
    mark = f.col("_cdc_vanished")
    events = events.withColumn("_cdc_repeated", is_repeated)
    events = events.where(~f.col("_cdc_repeated") | mark.isNotNull())
    repeated = f.col("_cdc_repeated")
    return events.withColumns(
        {
            "_cdc_kind": f.when(repeated, _LEFT).otherwise(f.col("_cdc_kind")),
            "_cdc_lsn": f.when(repeated, mark["lsn"]).otherwise(f.col("_cdc_lsn")),
            "_cdc_seq": f.when(repeated, mark["seq"]).otherwise(f.col("_cdc_seq")),
            "_cdc_ts": f.when(repeated, mark["at"]).otherwise(f.col("_cdc_ts")),
            "_cdc_vanished": f.when(~repeated, mark),
        }
    )


def _values(shape: HistoryShape) -> list[Column]:
    """Return what rows are compared by: value `v` and text `t`, with the column's number."""
    found: list[Column] = [f.coalesce(f.col(UNCHANGED), f.array()).alias("unchanged")]
    for number, (name, kind) in enumerate(shape.types.items()):
        value = col(name)
        if isinstance(kind, (FloatType, DoubleType)):
            value = value.cast("string")  # 0 and -0 are not the same
        text = f.try_element_at(f.col(RAW), f.lit(name))
        found += [value.alias(f"v{number}"), text.alias(f"t{number}")]
    return found


def _is_same(shape: HistoryShape) -> Column:
    """Return whether an event's row equals `_cdc_then`, brought up to date; null equals null.

    Compares the columns that the source has at the event. `_cdc_then` has the constant of a column
    that was added in between.
    """
    then, lsn = f.col("_cdc_then"), f.col("_cdc_lsn")
    unchanged, *values = _values(shape)
    unknown = then["unchanged"]
    before: list[Column] = []
    for number, (name, kind) in enumerate(shape.types.items()):
        value, text = then[f"v{number}"], then[f"t{number}"]
        lives = [c for c in shape.lives if c.name == name]
        if len(lives) != 1 or lives[0].from_lsn or lives[0].until_lsn is not None:
            own, own_text = values[2 * number : 2 * number + 2]
            is_there = f.expr("false")
            for life in lives:
                is_in = lsn >= life.from_lsn
                if life.until_lsn is not None:
                    is_in = is_in & (lsn < life.until_lsn)
                is_there = is_there | is_in
                came = is_in & (then["_cdc_lsn"] < life.since_lsn)
                filled, missing_text = missing_value(life)
                missing = f.expr(filled)
                if isinstance(kind, (FloatType, DoubleType)):
                    missing = missing.cast("string")
                value = f.when(came, missing).otherwise(value)
                text = f.when(came, f.lit(missing_text)).otherwise(text)
                unknown = f.when(came, f.array_remove(unknown, name)).otherwise(unknown)
            is_nothing = ~is_there & own.isNull() & own_text.isNull()
            value, text = f.when(~is_nothing, value), f.when(~is_nothing, text)
            unknown = f.when(is_nothing, f.array_remove(unknown, name)).otherwise(unknown)
        before += [value.alias(f"v{number}"), text.alias(f"t{number}")]
    return f.struct(unchanged, *values).eqNullSafe(f.struct(unknown.alias("unchanged"), *before))
