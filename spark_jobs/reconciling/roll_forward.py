"""Rolls a table's rows at a position forward, by the changes that the lake has from there.

The expected rows of a mirror are computed, not read: from the source's rows at L, and from the
changes with `_cdc_lsn` >= L of the epochs that the mirror has. docs/reconcile.md explains why that
is exact.

Rows whose keys have no changes stay as they are. The source's rows are read again only for changes
that did not send every value (unsent TOAST values).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import DataType, LongType, StructField, StructType

from ingestd.model.changes import OF_BEFORE
from spark_jobs.lake.columns import with_columns
from spark_jobs.reconciling.key_lineage import KeyHashes, KeyMove, Position, lineages
from spark_jobs.reconciling.row_hashes import (
    RAW,
    WEIGHT,
    ComparedTable,
    Value,
    hashed,
    key_hashes,
    named,
    value_of,
)

_POSITION = ("_cdc_lsn", "_cdc_seq")


@dataclass(frozen=True, slots=True)
class RolledForward:
    """The expected rows, hashed (`row_hashes.hashed`); `close` it.

    `changes`: the number of changes applied.
    """

    rows: DataFrame
    changes: int = 0
    kept: list[DataFrame] = field(default_factory=list)

    def close(self) -> None:
        """Free the rows that Spark caches."""
        for frame in self.kept:
            frame.unpersist()


def roll_forward(
    source: DataFrame, changes: DataFrame | None, comparison: ComparedTable
) -> RolledForward:
    """Roll `source` forward by `changes`: raw rows from its position on; None without any.

    Only changes of the stream count: a snapshot's `t` and `r` rows change nothing. One small Spark
    job; two if changed rows were not sent completely.
    """
    if changes is None:
        return RolledForward(hashed(source, comparison))
    changes = changes.where("_cdc_seq > 0")
    if comparison.key:
        changes = _with_keys(changes, comparison)
    seen = _survey(changes, has_key=bool(comparison.key))
    if seen.emptied is not None:
        source = source.where("false")
        emptied = (f.lit(number).cast("long") for number in seen.emptied)
        changes = changes.where(_position() > _position(*emptied))
    changes = changes.where("_cdc_op IN ('c', 'u', 'd')")
    if not seen.changes:
        return RolledForward(hashed(source, comparison))
    if not comparison.key:
        rows = _recounted(source, changes, comparison)
        return RolledForward(hashed(rows, comparison), seen.changes)
    return _settled(source, changes, comparison, seen)


@dataclass(frozen=True, slots=True)
class _ChangeSurvey:
    """Figures of changes: the last `t`, the number of others, incomplete rows, and key moves."""

    emptied: Position | None
    changes: int
    unsent: int
    moves: list[KeyMove]


def _survey(changes: DataFrame, *, has_key: bool) -> _ChangeSurvey:
    moves = f.array()
    if has_key:
        new1, new2, old1, old2 = map(f.col, _KEYS)
        move = f.struct(*_KEYS, *_POSITION)
        moves = f.collect_list(f.when((old1 != new1) | (old2 != new2), move))
    [summary] = changes.agg(
        f.max(f.when(f.col("_cdc_op") == "t", _position())).alias("emptied"),
        f.count_if(f.col("_cdc_op") != "t").alias("changes"),
        f.count_if(f.size("_cdc_unchanged") > 0).alias("unsent"),
        moves.alias("moves"),
    ).collect()
    emptied = None if summary["emptied"] is None else tuple(summary["emptied"])
    found = [
        KeyMove(KeyHashes(r[2], r[3]), KeyHashes(r[0], r[1]), (r[4], r[5]))
        for r in summary["moves"]
    ]
    above = [move for move in found if emptied is None or move.position > emptied]
    return _ChangeSurvey(emptied, summary["changes"], summary["unsent"], above)


def _position(lsn: Column | str = _POSITION[0], seq: Column | str = _POSITION[1]) -> Column:
    """Return a position as a column; Spark 3.5 compares only those with equal names."""
    columns = (f.col(c) if isinstance(c, str) else c for c in (lsn, seq))
    return f.struct(*(c.alias(name) for c, name in zip(columns, ("lsn", "seq"), strict=True)))


# --- whole rows ------------------------------------------------------------------------------


def _recounted(source: DataFrame, changes: DataFrame, comparison: ComparedTable) -> DataFrame:
    """Return rows with weights: 1 for each row present or inserted, -1 for each one removed."""
    came = changes.where("_cdc_op IN ('c', 'u')").select(
        *_rows([(n, _sent_or_old(changes, n, k)) for n, k in comparison.columns]),
        f.lit(1).alias(WEIGHT),
    )
    deleted = changes.where("_cdc_op = 'd'").select(
        *map(named, comparison.names), RAW, f.lit(-1).alias(WEIGHT)
    )
    replaced = changes.where("_cdc_op = 'u'").select(
        *_rows([(n, _old(changes, n, k)) for n, k in comparison.columns]),
        f.lit(-1).alias(WEIGHT),
    )
    counted = source.select(*map(named, comparison.names), RAW, f.lit(1).alias(WEIGHT))
    return counted.unionByName(came).unionByName(deleted).unionByName(replaced)


def _old(changes: DataFrame, name: str, kind: DataType) -> Value:
    """Return a value of the old row, if it was sent."""
    before = changes.schema["_cdc_before"].dataType
    assert isinstance(before, StructType)
    if name not in before.names:
        return Value(f.lit(None).cast(kind), f.lit(None).cast("string"), kind)
    raw = f.try_element_at(f.col(RAW), f.lit(OF_BEFORE + name))
    return Value(f.col("_cdc_before").getField(name), raw, kind)


def _is_sent(name: str) -> Column:
    return f.coalesce(~f.array_contains("_cdc_unchanged", name), f.expr("true"))


def _sent_or_old(changes: DataFrame, name: str, kind: DataType) -> Value:
    new, old = value_of(name, kind), _old(changes, name, kind)
    return Value(
        f.when(_is_sent(name), new.column).otherwise(old.column),
        f.when(_is_sent(name), new.raw).otherwise(old.raw),
        kind,
    )


def _rows(values: Sequence[tuple[str, Value]]) -> list[Column]:
    """Return columns and `_cdc_raw` of rows with these values."""
    names = f.array(*(f.lit(name) for name, _ in values))
    texts = f.map_from_arrays(names, f.array(*(value.raw for _, value in values)))
    kept = f.map_filter(texts, lambda _, text: text.isNotNull())
    return [*(value.column.alias(name) for name, value in values), kept.alias(RAW)]


# --- rows with a key -------------------------------------------------------------------------


_KEYS = ("_cdc_new1", "_cdc_new2", "_cdc_old1", "_cdc_old2")
"""Hashes of a change's key, and of its old key if the old row was sent."""


def _with_keys(changes: DataFrame, comparison: ComparedTable) -> DataFrame:
    keys = comparison.key_columns
    new = key_hashes([_sent_or_old(changes, name, kind) for name, kind in keys])
    old = key_hashes([_old(changes, name, kind) for name, kind in keys])
    has_old = (f.col("_cdc_op") == "u") & f.col("_cdc_before").isNotNull()
    hashes = (*new, *(f.when(has_old, one) for one in old))
    return with_columns(changes, dict(zip(_KEYS, hashes, strict=True)))


def _settled(
    source: DataFrame, changes: DataFrame, comparison: ComparedTable, seen: _ChangeSurvey
) -> RolledForward:
    touched = changes.selectExpr("_cdc_new1 AS h1", "_cdc_new2 AS h2").union(
        changes.where("_cdc_old1 IS NOT NULL").select("_cdc_old1", "_cdc_old2")
    )
    touched = touched.distinct().persist()
    last = _last_values(_with_lineage(changes, seen.moves), comparison).persist()
    rows = _as_rows(last.where("NOT _cdc_lacks"), comparison)
    if seen.unsent and last.where("_cdc_lacks").limit(1).count():
        rows = rows.unionByName(_filled(last.where("_cdc_lacks"), source, comparison))
    ours = hashed(source, comparison).join(touched, ["h1", "h2"], "left_anti")
    expected = ours.unionByName(hashed(rows, comparison))
    return RolledForward(expected, seen.changes, [touched, last])


def _last_values(changes: DataFrame, comparison: ComparedTable) -> DataFrame:
    """Return, for each row that exists at the end, each column's last sent value.

    It is a struct of value and raw text with the column's name, null if none was sent.
    `_cdc_lacks`: some are null; `_cdc_first1`, `_cdc_first2`: the row's key in the source.
    """
    position = _position()
    is_row = f.col("_cdc_op") != "d"
    columns = []
    for name, kind in comparison.columns:
        # if an update did not send a key column, it sent the old key with the same value
        is_key = name in comparison.key
        value = _sent_or_old(changes, name, kind) if is_key else value_of(name, kind)
        sent = is_row if is_key else is_row & _is_sent(name)
        pair = f.struct(value.column.alias("value"), value.raw.alias("raw"))
        columns.append(f.max_by(pair, f.when(sent, position)).alias(name))
    last = (
        changes.groupBy(*_ROW)
        .agg(f.max_by("_cdc_op", position).alias("_cdc_op"), *columns)
        .where(is_row)
    )
    lacks = f.expr("false")
    for name in comparison.names:
        lacks |= named(name).isNull()
    return last.withColumn("_cdc_lacks", lacks)


_ROW = ("_cdc_first1", "_cdc_first2", "_cdc_since_lsn", "_cdc_since_seq")
"""The columns that identify a row, see `spark_jobs.reconciling.key_lineage`."""
_SPAN = ("key1", "key2", "from_lsn", "from_seq", "until_lsn", "until_seq")
_KNOWN = ("first1", "first2", "since_lsn", "since_seq")


def _with_lineage(changes: DataFrame, moves: Sequence[KeyMove]) -> DataFrame:
    """Add the identity of each change's row, which stays the same when its key changes."""
    new1, new2 = f.col("_cdc_new1"), f.col("_cdc_new2")
    own = dict(zip(_ROW, (new1, new2, f.lit(0).cast("long"), f.lit(0).cast("long")), strict=True))
    if not moves:
        return with_columns(changes, own)
    schema = StructType([StructField(f"_cdc_{name}", LongType()) for name in (*_SPAN, *_KNOWN)])
    rows = [
        (*one.key, *one.start, *(one.end or (None, None)), *one.first, *one.since)
        for one in lineages(moves)
    ]
    renamed = {f"_cdc_{name}": f"_cdc_known_{name}" for name in _KNOWN}
    known = changes.sparkSession.createDataFrame(rows, schema).withColumnsRenamed(renamed)
    start = _position("_cdc_from_lsn", "_cdc_from_seq")
    end = _position("_cdc_until_lsn", "_cdc_until_seq")
    is_within = (new1 == f.col("_cdc_key1")) & (new2 == f.col("_cdc_key2"))
    is_within &= _position() >= start
    is_within &= f.col("_cdc_until_lsn").isNull() | (_position() < end)
    joined = changes.join(f.broadcast(known), is_within, "left")
    return with_columns(
        joined,
        {
            name: f.coalesce(f.col(found), default)
            for (name, default), found in zip(own.items(), renamed.values(), strict=True)
        },
    )


def _as_rows(last: DataFrame, comparison: ComparedTable) -> DataFrame:
    return last.select(
        *_rows(
            [
                (name, Value(named(name).getField("value"), named(name).getField("raw"), kind))
                for name, kind in comparison.columns
            ]
        )
    )


def _filled(lacking: DataFrame, source: DataFrame, comparison: ComparedTable) -> DataFrame:
    """Fill in unsent values from the source's rows, which are read once more for it."""
    h1, h2 = key_hashes([value_of(name, kind) for name, kind in comparison.key_columns])
    there = source.select(
        h1.alias("_cdc_first1"),
        h2.alias("_cdc_first2"),
        *(
            f.struct(named(name).alias("value"), value_of(name, kind).raw.alias("raw")).alias(
                f"_cdc_source_{number}"
            )
            for number, (name, kind) in enumerate(comparison.columns)
        ),
    )
    found = lacking.join(there, ["_cdc_first1", "_cdc_first2"])
    values = []
    for number, (name, kind) in enumerate(comparison.columns):
        pair = f.coalesce(named(name), f.col(f"_cdc_source_{number}"))
        values.append((name, Value(pair.getField("value"), pair.getField("raw"), kind)))
    return found.select(*_rows(values))
