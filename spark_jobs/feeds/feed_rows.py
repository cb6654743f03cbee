"""The rows of a feed: changes with all of their values.

A row has a table's columns and `_cdc_raw`, then FEED_COLUMNS. A deletion has the columns of the key
alone. `_cdc_sequence` orders all rows of a feed that have the same key: it is text of fixed width
with the epoch, the position, and 0 for a deletion or 1, since a change of a key is a deletion and
an insertion at one position. Every row that is appended later has a higher one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from pyspark.sql import Window as Over
from pyspark.sql import functions as f
from pyspark.sql.types import DoubleType, FloatType

from ingestd.model.changes import DELETE, SNAPSHOT_SEQ, UPDATE
from spark_jobs.histories.shape import UNCHANGED, HistoryShape
from spark_jobs.lake.columns import RAW, col

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from spark_jobs.histories.window import Window

OPERATION, SEQUENCE, EPOCH = "_cdc_operation", "_cdc_sequence", "_cdc_epoch"
INSERTED, UPDATED, DELETED = "INSERT", "UPDATE", "DELETE"
FEED_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        OPERATION: "string",
        SEQUENCE: "string",
        EPOCH: "bigint",
        "_cdc_lsn": "bigint",
        "_cdc_seq": "bigint",
        "_cdc_ts": "timestamp",
    }
)
_WIDTHS = {"epoch": 12, "lsn": 16, "seq": 12}
"""Hexadecimal digits of the parts of a sequence."""
_CHANGE = "_cdc_change"
_AT_LSN, _AT_READ = "_cdc_at_lsn", "_cdc_at_read"
_UNKNOWN = (
    "a change did not send a value that no earlier change has: `ingestd snapshot` re-reads the"
    " table, and the feed continues with the differences"
)


def changes_of(
    versions: DataFrame, window: Window, shape: HistoryShape, *, has_rows_before: bool
) -> DataFrame:
    """Return the changes that made these versions, as rows of a feed.

    `versions`: as `keyed_versions` returns them. `has_rows_before`: they include the rows before
    the window; otherwise the window has only changes that need none of these. Reading a row raises
    Spark's USER_RAISED_EXCEPTION if a value of it is not known.
    """
    over = Over.partitionBy(*shape.part_names).orderBy("_cdc_lsn", "_cdc_seq")
    to, op = f.col("_cdc_to"), f.col("_cdc_op")
    begin = f.struct(f.col("_cdc_lsn").alias("lsn"), f.col("_cdc_seq").alias("seq"))
    end = f.when(to.isNotNull(), f.struct(to["lsn"].alias("lsn"), to["seq"].alias("seq")))
    versions = versions.withColumns(
        {
            "_cdc_is_first": f.lag(f.lit(1)).over(over).isNull(),
            "_cdc_replaces": f.lag(end).over(over).eqNullSafe(begin),
            "_cdc_is_replaced": f.lead(begin).over(over).eqNullSafe(end),
        }
    )
    is_new, is_deletion = ~f.col("_cdc_is_old"), op == DELETE
    follows = f.col("_cdc_replaces")
    if not has_rows_before:
        follows |= f.col("_cdc_is_first") & op.isin(UPDATE, DELETE)
    own, ended = _place("_cdc_lsn", "_cdc_seq", "_cdc_ts"), _place(*_parts_of_end())
    began = f.when(follows, _change(UPDATED, own)).otherwise(_change(INSERTED, own))
    went = f.when(is_deletion & follows, _change(DELETED, own)).when(
        ~is_deletion & to.isNotNull() & ~f.col("_cdc_is_replaced"), _change(DELETED, ended)
    )
    each = f.array_compact(f.array(f.when(is_new & ~is_deletion, began), went))
    rows = versions.select(*map(col, shape.columns), RAW, UNCHANGED, f.explode(each).alias(_CHANGE))
    rows = _with_epochs(rows, window)
    change = f.col(_CHANGE)
    operation = f.when(
        (change["operation"] != DELETED) & f.col(UNCHANGED).isNotNull(),
        f.raise_error(f.lit(_UNKNOWN)),
    ).otherwise(change["operation"])
    rows = rows.withColumn(OPERATION, operation)
    parts = {"epoch": f.col(EPOCH), "lsn": change["lsn"], "seq": change["seq"]}
    return _as_feed(rows, shape, {**parts, "at": change["at"]}, parts)


def _parts_of_end() -> tuple[str, str, str]:
    return ("_cdc_to.lsn", "_cdc_to.seq", "_cdc_to.at")


def _place(lsn: str, seq: str, at: str) -> list[Column]:
    return [f.col(lsn).alias("lsn"), f.col(seq).alias("seq"), f.col(at).alias("at")]


def _change(operation: str, place: Sequence[Column]) -> Column:
    return f.struct(f.lit(operation).alias("operation"), *place)


def _with_epochs(rows: DataFrame, window: Window) -> DataFrame:
    """Add the epoch that committed each change, to which its position belongs."""
    is_read = f.col("_cdc_seq") == SNAPSHOT_SEQ
    place = (f.col("_cdc_lsn").alias(_AT_LSN), is_read.alias(_AT_READ))
    epochs = window.rows.groupBy(*place).agg(f.min(EPOCH).alias(EPOCH)).alias("e")
    lsn, seq = f.col(f"{_CHANGE}.lsn"), f.col(f"{_CHANGE}.seq")
    is_its = (lsn == f.col(f"e.{_AT_LSN}")) & ((seq == SNAPSHOT_SEQ) == f.col(f"e.{_AT_READ}"))
    return rows.join(epochs, is_its).drop(_AT_LSN, _AT_READ)


def differences_of(
    versions: DataFrame,
    before: DataFrame | None,
    shape: HistoryShape,
    *,
    epoch: int,
    end: tuple[int, object],
    number: int,
) -> DataFrame:
    """Return the rows that bring a feed from the rows `before` to the current versions.

    `versions`: as `keyed_versions` returns them. `before`: the current rows of the feed, with the
    parts of their keys; None for a feed that is empty. `epoch`, `end`: an epoch, its end_lsn and
    last_commit_ts; `number`: higher than that of any earlier call. At most one row per key; columns
    that the source no longer has are not compared.
    """
    after = versions.where(f.col("_cdc_to").isNull())
    after = after.withColumn("_cdc_unknown", f.col(UNCHANGED).isNotNull())
    names = ["_cdc_lsn", "_cdc_seq", "_cdc_ts"]
    after = after.select(*map(col, shape.columns), RAW, *names, "_cdc_unknown", *shape.part_names)
    if before is None:
        both = after.withColumn(OPERATION, f.lit(INSERTED))
    else:
        both = _compared(after, before, shape)
    unknown = f.when(f.col("_cdc_unknown"), f.raise_error(f.lit(_UNKNOWN)))
    both = both.withColumn(OPERATION, unknown.otherwise(f.col(OPERATION)))
    is_gone = f.col(OPERATION) == DELETED
    place = {
        "epoch": f.lit(epoch).cast("bigint"),
        "lsn": f.when(is_gone, f.lit(end[0]).cast("bigint")).otherwise(f.col("_cdc_lsn")),
        "seq": f.when(is_gone, f.lit(0).cast("bigint")).otherwise(f.col("_cdc_seq")),
        "at": f.when(is_gone, f.lit(end[1])).otherwise(f.col("_cdc_ts")),
    }
    last = {"lsn": f.lit(end[0]).cast("bigint"), "seq": f.lit(number).cast("bigint")}
    return _as_feed(both, shape, place, {**place, **last})


def _compared(after: DataFrame, before: DataFrame, shape: HistoryShape) -> DataFrame:
    is_same_key = f.expr("true")
    for name in shape.part_names:
        is_same_key = is_same_key & f.col(f"a.{name}").eqNullSafe(f.col(f"b.{name}"))
    both = after.alias("a").join(before.alias("b"), is_same_key, "full_outer")
    is_there, was_there = f.col("a._cdc_lsn").isNotNull(), f.col("b._cdc_lsn").isNotNull()
    differs = f.expr("false")
    for column in shape.present:
        for now, then in zip(
            _value("a", column.name, shape), _value("b", column.name, shape), strict=True
        ):
            differs = differs | ~now.eqNullSafe(then)
    operation = (
        f.when(~was_there, INSERTED).when(~is_there, DELETED).when(differs, UPDATED)
    ).alias(OPERATION)
    names = [*shape.columns, RAW]
    chosen = [
        f.when(is_there, col(name, "a")).otherwise(col(name, "b")).alias(name) for name in names
    ]
    others = [col(name, "a") for name in ("_cdc_lsn", "_cdc_seq", "_cdc_ts", "_cdc_unknown")]
    return both.select(*chosen, *others, operation).where(f.col(OPERATION).isNotNull())


def _value(of: str, name: str, shape: HistoryShape) -> tuple[Column, Column]:
    value = col(name, of)
    if isinstance(shape.types[name], (FloatType, DoubleType)):
        value = value.cast("string")  # 0 and -0 are not the same
    return value, f.try_element_at(col(RAW, of), f.lit(name))


def _as_feed(
    rows: DataFrame, shape: HistoryShape, place: Mapping[str, Column], order: Mapping[str, Column]
) -> DataFrame:
    key = {column.name for column in shape.key}
    is_gone = f.col(OPERATION) == DELETED
    texts = f.map_filter(RAW, lambda name, _: name.isin(list(key)))
    raw = f.when(is_gone, f.when(f.size(texts) > 0, texts)).otherwise(f.col(RAW))
    digits = [f.lpad(f.hex(order[part]), width, "0") for part, width in _WIDTHS.items()]
    sequence = f.concat_ws("-", *digits, f.when(is_gone, "0").otherwise("1"))
    return rows.select(
        *(col(n) if n in key else f.when(~is_gone, col(n)).alias(n) for n in shape.columns),
        raw.alias(RAW),
        OPERATION,
        sequence.alias(SEQUENCE),
        place["epoch"].alias(EPOCH),
        place["lsn"].alias("_cdc_lsn"),
        place["seq"].alias("_cdc_seq"),
        place["at"].alias("_cdc_ts"),
    )
