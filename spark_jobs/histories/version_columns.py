"""Versions of rows inside a plan, before they become rows of a history.

Columns: the source's, `_cdc_raw`, `_cdc_unchanged`, the position and time at which they begin
(`_cdc_lsn`, `_cdc_seq`, `_cdc_ts`), `_cdc_op`, `_cdc_to` (struct lsn, seq, at; null while they are
current), and `_cdc_is_old`: the history has the version already, with the end `_cdc_had`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as f

from ingestd.model.changes import OF_BEFORE, UPDATE
from spark_jobs.histories.shape import ADDED, UNCHANGED, HistoryShape
from spark_jobs.lake.columns import RAW, RAW_TYPE, col, with_columns
from spark_jobs.lake.missing_values import missing_value

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from spark_jobs.histories.window import Mark

END_TYPE = "struct<lsn:bigint,seq:bigint,at:timestamp>"
PLACE = ("_cdc_lsn", "_cdc_seq", "_cdc_ts", "_cdc_op")
VERSION = (RAW, UNCHANGED, *PLACE, "_cdc_to", "_cdc_had", "_cdc_is_old")


def end(lsn: Column, seq: Column, at: Column) -> Column:
    """Return the end of a version; null if `lsn` is null."""
    return f.when(lsn.isNotNull(), f.struct(lsn.alias("lsn"), seq.alias("seq"), at.alias("at")))


def no_end() -> Column:
    """Return the end of a current version: null."""
    return f.lit(None).cast(END_TYPE)


def marks(found: Sequence[Mark]) -> Column:
    """Return marks as an array of ends, in order."""
    each = [
        f.struct(
            f.lit(m.lsn).cast("long").alias("lsn"),
            f.lit(m.seq).cast("long").alias("seq"),
            f.timestamp_micros(f.lit(m.at_us)).alias("at"),
        )
        for m in found
    ]
    return f.array(*each).cast(f"array<{END_TYPE}>")


def first_above(found: Sequence[Mark], lsn: Column, seq: Column) -> Column:
    """Return the first of these marks above a position, as an end; null without one."""
    if not found:
        return no_end()
    above = f.filter(
        marks(found), lambda m: (m["lsn"] > lsn) | ((m["lsn"] == lsn) & (m["seq"] > seq))
    )
    return f.get(above, f.lit(0))


def count_below(found: Sequence[Mark], lsn: Column, seq: Column) -> Column:
    """Return the number of marks at or below a position."""
    if not found:
        return f.lit(0)
    return f.size(
        f.filter(marks(found), lambda m: (m["lsn"] < lsn) | ((m["lsn"] == lsn) & (m["seq"] <= seq)))
    )


def kept_raw(
    raw: Column, without: Sequence[str] = (), texts: Sequence[tuple[str, Column]] = ()
) -> Column:
    """Return `_cdc_raw` without the old row's texts and these columns', and with `texts` added.

    A null text is not added. Returns null if nothing is left.
    """
    dropped = [*without, *(name for name, _ in texts)]

    def stays(name: Column, _: Column) -> Column:
        is_own = ~f.startswith(name, f.lit(OF_BEFORE))
        return is_own & ~name.isin(dropped) if dropped else is_own

    kept = f.map_filter(raw, stays)
    if texts:
        pairs = f.array(*(f.struct(f.lit(n).alias("key"), v.alias("value")) for n, v in texts))
        there = f.filter(pairs, lambda pair: pair["value"].isNotNull())
        kept = f.map_concat(
            f.coalesce(kept, f.create_map().cast(RAW_TYPE)), f.map_from_entries(there)
        )
    return f.when(f.size(kept) > 0, kept)


def stored(history: DataFrame, shape: HistoryShape, prefix: str) -> DataFrame:
    """Return a history's rows as versions, with the parts that identify them."""
    name = {n: f.col(prefix + n) for n in ADDED}
    ends = end(name["valid_to_lsn"], name["valid_to_seq"], name["valid_to"])
    rows = history.select(
        *(col(n) for n in shape.columns),
        RAW,
        UNCHANGED,
        name["valid_from_lsn"].alias("_cdc_lsn"),
        name["valid_from_seq"].alias("_cdc_seq"),
        name["valid_from"].alias("_cdc_ts"),
        name["operation"].alias("_cdc_op"),
        ends.alias("_cdc_to"),
        ends.alias("_cdc_had"),
        f.expr("true").alias("_cdc_is_old"),
    )
    return rows.select("*", *shape.named_parts())


def with_missing(versions: DataFrame, shape: HistoryShape) -> DataFrame:
    """Return versions with the source's values in columns added while they were current.

    If a late change now ends a version earlier, the value that `HistoryTable.evolve` filled in is
    removed again. Where the column is a re-created one, such a version becomes two.
    """
    for lsn in shape.made_again:
        versions = _split_at(versions, lsn, shape)
    for column in shape.added:
        spans = f.expr(spanning(column.since_lsn, "_cdc_lsn", "_cdc_to.lsn", "_cdc_to.seq"))
        had = spanning(column.since_lsn, "_cdc_lsn", "_cdc_had.lsn", "_cdc_had.seq")
        ended = f.col("_cdc_is_old") & f.expr(had) & ~spans
        value, text = missing_value(column)
        bare = kept_raw(f.col(RAW), [column.name])
        own = kept_raw(
            f.col(RAW), [column.name], [] if text is None else [(column.name, f.lit(text))]
        )
        versions = versions.withColumns(
            {
                column.name: f.when(spans, f.expr(value))
                .when(ended, None)
                .otherwise(col(column.name)),
                RAW: f.when(spans, own).when(ended, bare).otherwise(f.col(RAW)),
            }
        )
    return versions


def spanning(lsn: int, begins: str, ends_lsn: str, ends_seq: str) -> str:
    """Return, as SQL, whether a version was current before and at `lsn`, by its columns' names.

    A version that ends in the transaction at `lsn` counts as current when the transaction created
    a column. (The daemon re-reads the table if that is uncertain.)
    """
    is_later = f"{ends_lsn} > {lsn} OR ({ends_lsn} = {lsn} AND {ends_seq} > 0)"
    return f"{begins} < {lsn} AND ({ends_lsn} IS NULL OR {is_later})"


def _split_at(versions: DataFrame, lsn: int, shape: HistoryShape) -> DataFrame:
    """End versions that were current at `lsn`; new ones with the source's values continue them."""
    made = shape.made_at(lsn)
    spans = f.expr(spanning(lsn, "_cdc_lsn", "_cdc_to.lsn", "_cdc_to.seq"))
    at = next(c.since for c in shape.lives if c.since_lsn == lsn)
    here = end(f.lit(lsn).cast("long"), f.lit(0).cast("long"), f.lit(at))
    both = f.when(spans, f.array(f.expr("false"), f.expr("true")))
    whole = f.array(f.lit(None).cast("boolean"))
    versions = versions.withColumn("_cdc_is_second", f.explode(f.coalesce(both, whole)))
    is_second = f.col("_cdc_is_second")
    missing = {c.name: missing_value(c) for c in made}
    nothing = {n: f.lit(None).cast(shape.types[n]) for n in shape.without_values_at(lsn)}
    others = [*missing, *nothing]
    texts = [(n, f.lit(text)) for n, (_, text) in missing.items() if text is not None]
    known = f.array(*map(f.lit, others)).cast("array<string>")
    unknown = f.array_except(UNCHANGED, known)
    second = {
        **nothing,
        **{n: f.expr(value) for n, (value, _) in missing.items()},
        RAW: kept_raw(f.col(RAW), others, texts),
        UNCHANGED: f.when(f.size(unknown) > 0, unknown),
        "_cdc_lsn": here["lsn"],
        "_cdc_seq": here["seq"],
        "_cdc_ts": here["at"],
        "_cdc_op": f.lit(UPDATE),
        "_cdc_had": no_end(),
        "_cdc_is_old": f.expr("false"),
    }
    changed = {n: f.when(is_second, value).otherwise(col(n)) for n, value in second.items()}
    changed["_cdc_to"] = f.when(~is_second, here).otherwise(f.col("_cdc_to"))
    return with_columns(versions, changed).drop("_cdc_is_second")


def as_history(shape: HistoryShape, prefix: str) -> list[Column]:
    """Return the columns of a history, computed from versions."""
    ends = f.col("_cdc_to")
    added = {
        "valid_from": f.col("_cdc_ts"),
        "valid_to": ends["at"],
        "is_current": ends.isNull(),
        "operation": f.col("_cdc_op"),
        "valid_from_lsn": f.col("_cdc_lsn"),
        "valid_from_seq": f.col("_cdc_seq"),
        "valid_to_lsn": ends["lsn"],
        "valid_to_seq": ends["seq"],
    }
    return [
        *(col(n) for n in shape.columns),
        f.col(RAW),
        f.col(UNCHANGED),
        *(added[n].alias(prefix + n) for n in ADDED),
    ]
