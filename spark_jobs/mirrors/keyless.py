"""Mirrors of tables without a key (REPLICA IDENTITY FULL), by counting equal rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as f

from ingestd.lake.fold.outcomes import DELETED
from ingestd.model.changes import OF_BEFORE
from spark_jobs.delta_log.commits import signed
from spark_jobs.delta_log.statements import delete_matched, insert_unmatched, literal
from spark_jobs.fold.spark_sql import old_texts
from spark_jobs.lake.columns import RAW, RAW_TYPE, col, named
from spark_jobs.lake.missing_values import with_missing
from spark_jobs.lake.variants import parsed, stored_text, variant_names

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from ingestd.lake.definitions import LakeColumn
    from spark_jobs.engine.table_mover import TableStep
    from spark_jobs.mirrors.table import MirrorTable

_TEXT, _COUNT = "_cdc_text", "_cdc_count"
_COPY, _THERE = "_cdc_copy", "_cdc_there"
_POSITION = ("_cdc_lsn", "_cdc_seq")
_EXACT = {
    "ignoreNullFields": "false",
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd HH:mm:ss.SSSSSS",
    "timestampNTZFormat": "yyyy-MM-dd HH:mm:ss.SSSSSS",
}


def keyless_outcomes(
    changes: DataFrame, columns: Sequence[LakeColumn], added: Sequence[LakeColumn]
) -> DataFrame:
    """Return the rows of an empty table after these changes, as outcomes.

    `added`: columns that were added after some of the changes were written.
    """
    rows = _net(changes, columns, added).where(col(_COUNT) > 0)
    return _copies(rows, col(_COUNT).cast("int")).withColumn(DELETED, f.lit(False))  # noqa: FBT003


def apply_keyless(
    table: MirrorTable,
    changes: DataFrame,
    columns: Sequence[LakeColumn],
    added: Sequence[LakeColumn],
    step: TableStep,
) -> None:
    """Apply changes without `t`: one commit, which is skipped if it already exists."""
    net = _net(changes, columns, added).where(col(_COUNT) != 0).cache()
    try:
        if net.where(col(_COUNT) < 0).isEmpty():
            new = _copies(net, col(_COUNT).cast("int")).drop(_TEXT, _COUNT)
            new = parsed(new, variant_names(columns))
            with signed(table.session, step.signature, step.app_id):
                new.write.format("delta").mode("append").save(table.path)
            return
        _merge(table, net, columns, step)
    finally:
        net.unpersist()


def _merge(
    table: MirrorTable, net: DataFrame, columns: Sequence[LakeColumn], step: TableStep
) -> None:
    """Delete all copies of a row, and insert as many as remain: copies have no identity."""
    less = net.where(col(_COUNT) < 0)
    there = table.rows().select(f.expr(_text_of(columns)).alias(_TEXT))
    counts = (
        there.join(f.broadcast(less.select(_TEXT)), _TEXT, "left_semi")
        .groupBy(_TEXT)
        .agg(f.count("*").alias(_THERE))
    )
    staying = less.join(counts, _TEXT).withColumn(_COUNT, col(_COUNT) + col(_THERE))
    new = _copies(
        net.where(col(_COUNT) > 0).unionByName(staying.drop(_THERE)).where(col(_COUNT) > 0),
        col(_COUNT).cast("int"),
    )
    no_text = f.lit(None).cast("string")
    source = less.select("*").unionByName(new.withColumn(_TEXT, no_text))
    source = parsed(source, variant_names(columns))
    names = [*(c.name for c in columns), RAW, *_POSITION]
    inserted = insert_unmatched({name: named(name, "s") for name in names}, f"s.{_TEXT} IS NULL")
    on = f"{_text_of(columns, 't')} = s.{_TEXT}"
    with signed(table.session, step.signature, step.app_id):
        table.merge(source, on, [delete_matched(), inserted])


def _copies(rows: DataFrame, count: Column) -> DataFrame:
    """Return each row `count` times."""
    return rows.withColumn(_COPY, f.explode(f.sequence(f.lit(1), count))).drop(_COPY)


def _net(
    changes: DataFrame, columns: Sequence[LakeColumn], added: Sequence[LakeColumn]
) -> DataFrame:
    """Return each distinct row with its net change in copies (negative: fewer) and its text."""
    op = col("_cdc_op")
    before = f.col("_cdc_before")
    came = _rows(changes.where(op != "d"), columns, 1)
    went = _rows(changes.where(op == "d"), columns, -1)
    changed = changes.where((op == "u") & before.isNotNull())
    old = changed.select(
        *[_old(changed, c).alias(c.name) for c in columns],
        old_texts().alias(RAW),
        *_POSITION,
        f.lit(-1).alias(_COUNT),
    )
    events = (
        came.unionByName(went)
        .unionByName(with_missing(old, added))
        .withColumn(_TEXT, f.expr(_text_of(columns)))
    )
    position = f.struct(*_POSITION)
    newest = f.max_by(f.struct(*[col(n) for n in events.columns]), position).alias("newest")
    grouped = events.groupBy(_TEXT).agg(newest, f.sum(_COUNT).alias(_COUNT))
    return grouped.select(
        *[f.col("newest")[n].alias(n) for n in (*(c.name for c in columns), RAW, *_POSITION)],
        _TEXT,
        _COUNT,
    )


def _rows(changes: DataFrame, columns: Sequence[LakeColumn], count: int) -> DataFrame:
    there = set(changes.columns)
    own = f.map_filter(RAW, lambda name, _: ~name.startswith(OF_BEFORE))
    unsent = f.coalesce(f.col("_cdc_unchanged"), f.array().cast("array<string>"))
    values = []
    for c in columns:
        value = col(c.name) if c.name in there else f.lit(None).cast(c.delta_type)
        filled = f.when(f.array_contains(unsent, c.name), _old(changes, c)).otherwise(value)
        values.append(filled.alias(c.name))
    texts = f.map_filter(old_texts(), lambda name, _: f.array_contains(unsent, name))
    every = f.map_concat(
        f.coalesce(own, f.create_map().cast(RAW_TYPE)),
        f.coalesce(texts, f.create_map().cast(RAW_TYPE)),
    )
    return changes.select(
        *values,
        f.when(f.size(every) > 0, every).alias(RAW),
        *_POSITION,
        f.lit(count).alias(_COUNT),
    )


def _old(changes: DataFrame, column: LakeColumn) -> Column:
    fields = changes.schema["_cdc_before"].dataType
    if column.name not in fields.fieldNames():  # type: ignore[attr-defined]
        return f.lit(None).cast(column.delta_type)
    return f.col("_cdc_before").getField(column.name)


def _text_of(columns: Sequence[LakeColumn], of: str | None = None) -> str:
    """Return, as SQL, a text that is the same for equal rows only. `of`: the mirror's alias."""
    own = [named(c.name) if of is None else stored_text(c, of) for c in columns]
    values = ", ".join(f"'c{n}', {value}" for n, value in enumerate(own))
    # A dropped column is not part of a row, but earlier rows still have its texts.
    names = ", ".join(literal(c.name) for c in columns)
    texts = f"map_filter({named(RAW, of)}, (name, _text) -> name IN ({names}))"
    raw = f"CASE WHEN size({texts}) > 0 THEN array_sort(map_entries({texts})) END"
    whole = f"named_struct('v', named_struct({values}), 'r', {raw})"
    options = ", ".join(f"{literal(k)}, {literal(v)}" for k, v in _EXACT.items())
    return f"sha2(to_json({whole}, map({options})), 256)"
