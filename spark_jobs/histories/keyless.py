"""Versions of the rows of tables without a key, where nothing distinguishes equal rows.

Each copy of a row is a version. A deletion ends the oldest copy: any choice is equally right. A
snapshot shows how many copies of each row exist: surplus ones end at its `t`, missing ones begin
with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import Window as Over
from pyspark.sql import functions as f

from ingestd.model.changes import DELETE, INSERT, OF_BEFORE, SNAPSHOT, UPDATE
from spark_jobs.histories.shape import (
    UNCHANGED,
    HistoryShape,
    literal_position,
    position,
)
from spark_jobs.histories.version_columns import (
    VERSION,
    count_below,
    first_above,
    kept_raw,
    no_end,
    with_missing,
)
from spark_jobs.histories.window import BEFORE, Mark, Window, old_columns
from spark_jobs.lake.columns import RAW, col

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_OPENS = "_cdc_opens"


def keyless_versions(window: Window, before: DataFrame | None, shape: HistoryShape) -> DataFrame:
    """Return the versions after the window, including those of `before`.

    `before`: as in `keyed.keyed_versions`, but of all rows that the window ends, or of all rows.
    """
    columns = [*shape.columns, *VERSION, *shape.part_names]
    changes = _changes(window, shape)
    standing = None
    if before is not None:
        standing = before.drop("_cdc_to").withColumn(_OPENS, f.expr("true"))
    ended: DataFrame | None = None
    low: Mark | None = None
    for mark in [*(m for m in window.marks if m.is_snapshot), None]:
        part = changes
        if low is not None:
            part = part.where(position() >= literal_position(low.lsn, low.seq))
        if mark is not None:
            part = part.where(position() < literal_position(mark.lsn, mark.seq))
        events = part if standing is None else part.unionByName(standing)
        truncates = [
            m
            for m in window.marks
            if not m.is_snapshot and (low is None or m > low) and (mark is None or m < mark)
        ]
        versions = _paired(events, truncates, shape)
        if mark is not None:
            versions = _recounted(versions, _reads(window, mark, shape), mark, shape)
            done = versions.where(f.col("_cdc_to").isNotNull()).select(columns)
            ended = done if ended is None else ended.unionByName(done)
            standing = (
                versions.where(f.col("_cdc_to").isNull())
                .select(columns)
                .drop("_cdc_to")
                .withColumn(_OPENS, f.expr("true"))
            )
            low = mark
            continue
        versions = versions.select(columns)
        found = versions if ended is None else ended.unionByName(versions)
    return with_missing(found, shape)


def rows_of(window: Window, shape: HistoryShape) -> DataFrame:
    """Return the parts of every row that the window inserts or removes. Each row comes once."""
    return _changes(window, shape).select(*shape.part_names).distinct()


def _old_rows(rows: DataFrame, shape: HistoryShape) -> DataFrame:
    """Return the old rows; a column that they lack is null."""
    fields = old_columns(rows)
    values = [
        (f.col(BEFORE).getField(n) if n in fields else f.lit(None)).cast(kind).alias(n)
        for n, kind in shape.types.items()
    ]
    of_old = f.map_filter(f.col(RAW), lambda name, _: f.startswith(name, f.lit(OF_BEFORE)))
    raw = f.transform_keys(of_old, lambda name, _: f.substr(name, f.lit(len(OF_BEFORE) + 1)))
    others = [n for n in rows.columns if n not in shape.types and n != RAW]
    return rows.select(*values, f.when(f.size(raw) > 0, raw).alias(RAW), *others)


def _changes(window: Window, shape: HistoryShape) -> DataFrame:
    """Return the events that begin or end a row, with the columns of versions."""
    op = f.col("_cdc_op")
    rows = window.rows
    opened = rows.where(op.isin(INSERT, UPDATE))
    fields = old_columns(rows)
    sent, texts = {}, []
    for name in window.unsent:  # the old row has them
        lacks = f.coalesce(f.array_contains(UNCHANGED, name), f.expr("false"))
        old = f.col(BEFORE).getField(name) if name in fields else f.lit(None)
        text = f.try_element_at(f.col(RAW), f.lit(OF_BEFORE + name))
        sent[name] = f.when(lacks, old).otherwise(col(name)).cast(shape.types[name])
        own = f.try_element_at(f.col(RAW), f.lit(name))
        texts.append((name, f.when(lacks, text).otherwise(own)))
    raw = kept_raw(f.coalesce(f.col(RAW), f.create_map().cast("map<string,string>")), texts=texts)
    opened = opened.withColumns({**sent, RAW: raw, _OPENS: f.expr("true")})
    deleted = rows.where(op == DELETE).withColumn(
        RAW, f.when(f.col(RAW).isNotNull(), kept_raw(f.col(RAW)))
    )
    updated = _old_rows(rows.where((op == UPDATE) & f.col(BEFORE).isNotNull()), shape)
    ending = deleted.unionByName(updated).withColumn(_OPENS, f.expr("false"))
    return opened.unionByName(ending).select(
        *(col(n) for n in shape.columns),
        RAW,
        f.lit(None).cast("array<string>").alias(UNCHANGED),
        "_cdc_lsn",
        "_cdc_seq",
        "_cdc_ts",
        "_cdc_op",
        no_end().alias("_cdc_had"),
        f.expr("false").alias("_cdc_is_old"),
        _OPENS,
        *shape.named_parts(),
    )


def _reads(window: Window, mark: Mark, shape: HistoryShape) -> DataFrame:
    """Return the rows that this mark's snapshot read, as current versions."""
    is_its = (f.col("_cdc_op") == SNAPSHOT) & (f.col("_cdc_lsn") == mark.lsn)
    return window.rows.where(is_its).select(
        *(col(n) for n in shape.columns),
        RAW,
        f.lit(None).cast("array<string>").alias(UNCHANGED),
        "_cdc_lsn",
        "_cdc_seq",
        "_cdc_ts",
        "_cdc_op",
        no_end().alias("_cdc_had"),
        f.expr("false").alias("_cdc_is_old"),
        no_end().alias("_cdc_to"),
        *shape.named_parts(),
    )


def _paired(events: DataFrame, truncates: Sequence[Mark], shape: HistoryShape) -> DataFrame:
    """Return each beginning with the end of its row, paired in order.

    An end without a beginning is left out: it is a change captured before the table was read.
    """
    lsn, seq = f.col("_cdc_lsn"), f.col("_cdc_seq")
    events = events.withColumn("_cdc_era", count_below(truncates, lsn, seq))
    of = [*shape.part_names, "_cdc_era"]
    in_order = Over.partitionBy(*of).orderBy("_cdc_lsn", "_cdc_seq", _OPENS)
    so_far = in_order.rowsBetween(Over.unboundedPreceding, Over.currentRow)
    opens = f.col(_OPENS)
    events = events.withColumn("_cdc_sum", f.sum(f.when(opens, 1).otherwise(-1)).over(so_far))
    events = events.withColumn("_cdc_low", f.least(f.min("_cdc_sum").over(so_far), f.lit(0)))
    lower = f.col("_cdc_low") < f.coalesce(f.lag("_cdc_low").over(in_order), f.lit(0))
    events = events.withColumn("_cdc_finds", opens | ~lower).where("_cdc_finds")
    ranks = Over.partitionBy(*of, _OPENS).orderBy("_cdc_lsn", "_cdc_seq")
    events = events.withColumn("_cdc_rank", f.row_number().over(ranks))
    pairs = Over.partitionBy(*of, "_cdc_rank").orderBy(f.col(_OPENS).desc())
    here = f.struct(lsn.alias("lsn"), seq.alias("seq"), f.col("_cdc_ts").alias("at"))
    emptied = first_above(truncates, lsn, seq)
    events = events.withColumn("_cdc_to", f.coalesce(f.lead(here).over(pairs), emptied))
    return events.where(_OPENS)


def _recounted(versions: DataFrame, reads: DataFrame, mark: Mark, shape: HistoryShape) -> DataFrame:
    """Keep as many current versions of each row as a snapshot read copies."""
    columns = [*shape.columns, *VERSION, *shape.part_names]
    both = (
        versions.select(columns)
        .withColumn("_cdc_read", f.expr("false"))
        .unionByName(reads.select(columns).withColumn("_cdc_read", f.expr("true")))
    )
    is_read, stands = f.col("_cdc_read"), f.col("_cdc_to").isNull()
    of = Over.partitionBy(*shape.part_names)
    there = f.count_if(~is_read & stands).over(of)
    read = f.count_if(is_read).over(of)
    both = both.withColumns({"_cdc_there": there, "_cdc_reads": read})
    each = Over.partitionBy(*shape.part_names, "_cdc_read", stands).orderBy("_cdc_lsn", "_cdc_seq")
    number = f.row_number().over(each)
    both = both.withColumn("_cdc_number", number)
    goes = ~is_read & stands & (f.col("_cdc_number") <= f.col("_cdc_there") - f.col("_cdc_reads"))
    stays = ~is_read | (f.col("_cdc_number") <= f.col("_cdc_reads") - f.col("_cdc_there"))
    at = first_above([mark], f.lit(-1), f.lit(-1))
    return both.where(stays).withColumn("_cdc_to", _end(goes, at))


def _end(goes: Column, at: Column) -> Column:
    return f.when(goes, at).otherwise(f.col("_cdc_to"))
