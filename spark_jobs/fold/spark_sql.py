"""A fold of keyed changes to one outcome per key, by Spark, for batches of any size.

Smaller batches are folded in the driver by `ingestd.lake.fold.vectorized`. The result is the same,
except for rows whose key changed while values were unsent. Those must be followed from key to key,
which only the driver does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import functions as f

from ingestd.lake.fold.outcomes import DELETED, KEPT
from ingestd.model.changes import OF_BEFORE
from spark_jobs.lake.columns import RAW, RAW_TYPE, col, may_be_raw, same_key
from spark_jobs.lake.exchange import from_arrow, to_arrow
from spark_jobs.lake.variants import kept_texts

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from ingestd.lake.definitions import LakeColumn

_BEFORE = "_cdc_before"


@dataclass(frozen=True, slots=True)
class Survey:
    """Figures of a batch of changes.

    `truncated`: position of the newest `t`. `read_from`, `read_to`: lowest and highest commit_lsn
    of the `r` rows. `others`: rows that are neither `r` nor `t`. `unsent`: columns that some update
    did not send. `key_changes`: updates that changed the key; `links`: those of them that also
    have unsent values. `changed_from`: lowest commit_lsn of the `others`. `kept_texts`: values that
    VARIANT can't hold.
    """

    rows: int
    truncated: tuple[int, int] | None
    read_from: int | None
    read_to: int | None
    others: int
    unsent: tuple[str, ...]
    key_changes: int
    links: int
    changed_from: int | None
    kept_texts: int = 0


def survey(changes: DataFrame, key: Sequence[LakeColumn], variants: Collection[str] = ()) -> Survey:
    """Return the figures of a batch. One Spark job that reads few columns.

    `variants`: the columns that become VARIANT.
    """
    op, lsn = col("_cdc_op"), col("_cdc_lsn")
    changed = _key_changed(changes, key)
    unsent = f.coalesce(f.size(f.col("_cdc_unchanged")), f.lit(0)) > 0
    position = f.struct("_cdc_lsn", "_cdc_seq")
    found = changes.agg(
        f.count("*").alias("rows"),
        f.max(f.when(op == "t", position)).alias("truncated"),
        f.min(f.when(op == "r", lsn)).alias("read_from"),
        f.max(f.when(op == "r", lsn)).alias("read_to"),
        f.count_if((op != "r") & (op != "t")).alias("others"),
        f.array_sort(
            f.array_distinct(f.flatten(f.collect_set(f.when(unsent, f.col("_cdc_unchanged")))))
        ).alias("unsent"),
        f.count_if(changed).alias("key_changes"),
        f.count_if(changed & unsent).alias("links"),
        f.min(f.when((op != "r") & (op != "t"), lsn)).alias("changed_from"),
        (kept_texts(variants) if variants else f.lit(0)).alias("kept_texts"),
    ).collect()[0]
    truncated = found["truncated"]
    return Survey(
        rows=found["rows"],
        truncated=None if truncated is None else (truncated[0], truncated[1]),
        read_from=found["read_from"],
        read_to=found["read_to"],
        others=found["others"],
        unsent=tuple(found["unsent"]),
        key_changes=found["key_changes"],
        links=found["links"],
        changed_from=found["changed_from"],
        kept_texts=found["kept_texts"],
    )


def with_keys(changes: DataFrame, key: Sequence[LakeColumn]) -> DataFrame:
    """Fill in parts of keys that updates did not send: TOASTed ones are in the old row."""
    fields = set(_fields(changes))
    for k in key:
        if not k.delta_type.startswith(_TOASTED) or k.name not in fields:
            continue
        is_unsent = f.array_contains(f.col("_cdc_unchanged"), k.name) & f.col(_BEFORE).isNotNull()
        text = _text_of(k.name, OF_BEFORE)
        with_text = f.map_concat(
            f.coalesce(f.col(RAW), _no_texts()), f.create_map(f.lit(k.name), text)
        )
        raw = f.when(is_unsent & text.isNotNull(), with_text).otherwise(f.col(RAW))
        unsent = f.when(is_unsent, f.array_remove("_cdc_unchanged", k.name)).otherwise(
            f.col("_cdc_unchanged")
        )
        changes = changes.withColumns(
            {
                k.name: f.when(is_unsent, _old(k.name)).otherwise(col(k.name)),
                RAW: raw,
                "_cdc_unchanged": unsent,
            }
        )
    return changes


_TOASTED = ("string", "binary", "array", "struct")
"""Delta types of keys that may be long enough to be TOASTed."""


def linked_changes(changes: DataFrame, key: Sequence[LakeColumn]) -> tuple[pa.Table, DataFrame]:
    """Return the changes that must be followed from key to key, and the keys involved.

    Those are the old and new keys of updates that changed a key and did not send every value.
    Two Spark jobs; both results are in the driver's memory.
    """
    session = changes.sparkSession
    changed = changes.where(_key_changed(changes, key))
    links = changed.where(f.size("_cdc_unchanged") > 0)
    new = links.select(*[col(k.name) for k in key], f.col(RAW))
    old = links.select(*[_old(k.name).alias(k.name) for k in key], old_texts().alias(RAW))
    keys = from_arrow(session, to_arrow(new.union(old)))
    same, was_same = f.expr(same_key(key, "c", "k")), f.lit(True)  # noqa: FBT003 - SQL's true
    for k in key:
        was_same = was_same & f.col("c._cdc_before").getField(k.name).eqNullSafe(col(k.name, "k"))
        if may_be_raw(k):
            text = f.element_at(col(RAW, "c"), f.lit(OF_BEFORE + k.name))
            was_same = was_same & text.eqNullSafe(f.element_at(col(RAW, "k"), f.lit(k.name)))
    named = f.broadcast(keys.alias("k"))
    touching = changes.alias("c").join(named, same, "left_semi")
    vacating = changed.alias("c").join(named, was_same, "left_semi").alias("c")
    others = vacating.join(named, same, "left_anti")
    return pa.concat_tables([to_arrow(touching), to_arrow(others)]), keys


def old_texts() -> Column:
    """Return the old row's part of `_cdc_raw`, by column name; null if it is empty."""
    texts = f.map_from_entries(
        f.transform(
            f.filter(f.map_entries(RAW), lambda e: e["key"].startswith(OF_BEFORE)),
            lambda e: f.struct(
                e["key"].substr(f.lit(len(OF_BEFORE) + 1), f.length(e["key"])), e["value"]
            ),
        )
    )
    return f.when(f.size(texts) > 0, texts)


def fold_in_spark(
    changes: DataFrame, columns: Sequence[LakeColumn], key: Sequence[LakeColumn], figures: Survey
) -> DataFrame:
    """Fold raw rows without `t` to the outcomes of `ingestd.lake.fold.outcomes.FoldedChanges`.

    Ignore the outcomes of keys that `linked_changes` returns.
    """
    unsent = [
        c for c in columns if c.name in figures.unsent and c.name not in {k.name for k in key}
    ]
    events = _own(changes, columns, unsent)
    if figures.key_changes:
        events = events.unionByName(_vacated(changes, columns, key, events))
    grouped = events.groupBy(*_grouping(key))
    newest = f.max_by(f.struct(*[col(c) for c in events.columns]), _position()).alias("newest")
    sent = [
        f.max_by(
            f.struct(col(c.name).alias("value"), _text_of(c.name).alias("text")),
            f.when(~col(DELETED) & ~_is_unsent(c.name), _position()),
        ).alias(f"sent{n}")
        for n, c in enumerate(unsent)
    ]
    return _filled(grouped.agg(newest, *sent), columns, unsent)


def snapshot_outcomes_in_spark(changes: DataFrame, columns: Sequence[LakeColumn]) -> DataFrame:
    """Return the rows of a snapshot as outcomes: it has one complete row per key."""
    return _own(changes, columns, ())


def _position() -> Column:
    return f.struct(col("_cdc_lsn"), col("_cdc_seq"))


def _text_of(name: str, prefix: str = "") -> Column:
    return f.element_at(col(RAW), f.lit(prefix + name))


def _is_unsent(name: str) -> Column:
    return f.array_contains(f.coalesce(col(KEPT), f.array().cast("array<string>")), name)


def _old(name: str) -> Column:
    return f.col(_BEFORE).getField(name)


def _grouping(key: Sequence[LakeColumn]) -> list[Column]:
    found = [col(k.name).alias(f"key{n}") for n, k in enumerate(key)]
    texts = [_text_of(k.name).alias(f"text{n}") for n, k in enumerate(key) if may_be_raw(k)]
    return found + texts


def _key_changed(changes: DataFrame, key: Sequence[LakeColumn]) -> Column:
    """Return whether a row is an update that changed its key."""
    nothing = f.lit(False)  # noqa: FBT003 - SQL's false
    if not set(_fields(changes)).issuperset(k.name for k in key):
        return nothing
    differs = nothing
    for k in key:
        differs = differs | ~_old(k.name).eqNullSafe(col(k.name))
        if may_be_raw(k):
            differs = differs | ~_text_of(k.name, OF_BEFORE).eqNullSafe(_text_of(k.name))
    return (f.col("_cdc_op") == "u") & f.col(_BEFORE).isNotNull() & differs


def _fields(changes: DataFrame) -> list[str]:
    kind: Any = changes.schema[_BEFORE].dataType
    return list(kind.fieldNames())


def _own(
    changes: DataFrame, columns: Sequence[LakeColumn], unsent: Sequence[LakeColumn]
) -> DataFrame:
    """Return each change as an event of its key, with unsent values taken from the old row."""
    there, fields = set(changes.columns), set(_fields(changes))
    kept = f.col("_cdc_unchanged")
    raw = f.map_filter(RAW, lambda name, _: ~name.startswith(OF_BEFORE))
    values = {c.name: col(c.name) for c in columns if c.name in there}
    for c in unsent:
        if c.name not in fields or c.name not in there:
            continue
        text = _text_of(c.name, OF_BEFORE)
        is_in_old_row = f.array_contains(f.col("_cdc_unchanged"), c.name) & (
            _old(c.name).isNotNull() | text.isNotNull()
        )
        values[c.name] = f.when(is_in_old_row, _old(c.name)).otherwise(col(c.name))
        kept = f.when(is_in_old_row, f.array_remove(kept, c.name)).otherwise(kept)
        raw = f.when(
            is_in_old_row & text.isNotNull(),
            f.map_concat(f.coalesce(raw, _no_texts()), f.create_map(f.lit(c.name), text)),
        ).otherwise(raw)
    return changes.select(
        *[values.get(c.name, f.lit(None).cast(c.delta_type)).alias(c.name) for c in columns],
        f.when(f.size(raw) > 0, raw).alias(RAW),
        "_cdc_lsn",
        "_cdc_seq",
        "_cdc_ts",
        (f.col("_cdc_op") == "d").alias(DELETED),
        kept.alias(KEPT),
    )


def _vacated(
    changes: DataFrame,
    columns: Sequence[LakeColumn],
    key: Sequence[LakeColumn],
    events: DataFrame,
) -> DataFrame:
    """Return a deletion for each old key of an update that changed the key."""
    names = {k.name for k in key}
    return changes.where(_key_changed(changes, key)).select(
        *[
            (_old(c.name) if c.name in names else f.lit(None))
            .cast(events.schema[c.name].dataType)
            .alias(c.name)
            for c in columns
        ],
        old_texts().alias(RAW),
        "_cdc_lsn",
        "_cdc_seq",
        "_cdc_ts",
        f.lit(True).alias(DELETED),  # noqa: FBT003 - SQL's true
        f.lit(None).cast("array<string>").alias(KEPT),
    )


def _filled(
    folded: DataFrame, columns: Sequence[LakeColumn], unsent: Sequence[LakeColumn]
) -> DataFrame:
    """Fill in values that an earlier change of the batch sent; KEPT names those that none sent."""
    newest = f.col("newest")
    newest_unsent = newest[KEPT]
    values = {c.name: newest[c.name] for c in columns}
    raw = newest[RAW]
    kept = newest_unsent
    for n, c in enumerate(unsent):
        sent = f.col(f"sent{n}")
        taken = f.coalesce(f.array_contains(newest_unsent, c.name), f.lit(False)) & sent.isNotNull()  # noqa: FBT003
        values[c.name] = f.when(taken, sent["value"]).otherwise(newest[c.name])
        kept = f.when(taken, f.array_remove(kept, c.name)).otherwise(kept)
        raw = f.when(
            taken & sent["text"].isNotNull(),
            f.map_concat(f.coalesce(raw, _no_texts()), f.create_map(f.lit(c.name), sent["text"])),
        ).otherwise(raw)
    return folded.select(
        *[values[c.name].alias(c.name) for c in columns],
        raw.alias(RAW),
        newest["_cdc_lsn"].alias("_cdc_lsn"),
        newest["_cdc_seq"].alias("_cdc_seq"),
        newest["_cdc_ts"].alias("_cdc_ts"),
        newest[DELETED].alias(DELETED),
        f.when(f.size(kept) > 0, kept).alias(KEPT),
    )


def _no_texts() -> Column:
    return f.create_map().cast(RAW_TYPE)
