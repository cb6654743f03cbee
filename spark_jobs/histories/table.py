"""A history: a Delta table with every version of a source table's rows (SCD type 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark.sql import functions as f

from ingestd.model.changes import UPDATE
from spark_jobs.delta_log.checked_tables import CheckedTables
from spark_jobs.delta_log.commits import TABLE_PROPERTIES, settings, signed
from spark_jobs.delta_log.statements import (
    add_columns,
    delete_matched,
    insert_unmatched,
    merge,
    run,
    set_properties,
    update,
)
from spark_jobs.histories.shape import ADDED, HistoryShape, is_clashing
from spark_jobs.histories.version_columns import as_history, spanning, stored, with_missing
from spark_jobs.lake.columns import RAW, missing_properties, named, needs_column_mapping
from spark_jobs.lake.missing_values import lacks, missing_value, with_text
from spark_jobs.lake.variants import as_texts, parsed, value_of_text
from spark_jobs.mirrors.policy import DEFAULT_POLICY

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from ingestd.lake.definitions import LakeColumn
    from spark_jobs.delta_log.commits import Signature
    from spark_jobs.histories.window import Window

_PREFIX = "_cdc_"
"""Prefix of a history's own columns if the source has one of their names."""
_MERGE_VECTORS = "spark.databricks.delta.merge.deletionVectors.persistent"
_UNCHECKED = {"spark.databricks.delta.replaceWhere.constraintCheck.enabled": "false"}
"""Lets replaceWhere write rows that do not match its condition."""
GOES = "_cdc_goes"
"""Column of a row to merge: whether the version is removed, not inserted."""


def prefix_of(columns: Sequence[str]) -> str:
    """Return the prefix of a history's own columns, given all of its columns."""
    return _PREFIX if f"{_PREFIX}valid_from" in columns else ""


@dataclass(frozen=True, slots=True)
class HistoryTable:
    """The history at `path`, changed in `session`."""

    session: SparkSession
    path: str
    app_id: str
    checked: CheckedTables = field(default_factory=CheckedTables)

    def rows(self) -> DataFrame:
        """Return the history's rows, with texts for VARIANT (`as_texts`)."""
        return as_texts(self.checked.rows(self.session, self.path))

    def columns(self) -> list[str]:
        """Return the names of the history's columns."""
        return self.checked.columns(self.session, self.path)

    def column_types(self) -> dict[str, str]:
        """Return the history's columns, name to type."""
        return self.checked.column_types(self.session, self.path)

    def before(self, window: Window, shape: HistoryShape, keys: DataFrame | None) -> DataFrame:
        """Return the versions that a window may change: those that do not end below it.

        Columns: those of `versions.stored`, and `_cdc_again`: whether the version begins in the
        window, which then re-creates it. `keys`: return only versions of rows with these parts.
        """
        rows = self.rows()
        prefix = prefix_of(rows.columns)
        lsn, seq = window.first
        to_lsn, to_seq = f.col(f"{prefix}valid_to_lsn"), f.col(f"{prefix}valid_to_seq")
        touched = to_lsn.isNull() | (to_lsn > lsn) | ((to_lsn == lsn) & (to_seq >= seq))
        found = stored(rows.where(touched), shape, prefix)
        begins = f.col("_cdc_lsn"), f.col("_cdc_seq")
        again = (begins[0] > lsn) | ((begins[0] == lsn) & (begins[1] >= seq))
        found = found.withColumn("_cdc_again", again)
        if keys is None:
            return found
        same = f.expr("true")
        for name in shape.part_names:
            same = same & f.col(f"v.{name}").eqNullSafe(f.col(f"k.{name}"))
        return found.alias("v").join(keys.alias("k"), same, "left_semi")

    def replace(self, versions: DataFrame, shape: HistoryShape, signature: Signature) -> None:
        """Replace all versions of the history by these: one commit, a plain write."""
        prefix = _PREFIX if is_clashing(shape.columns) else ""
        rows = parsed(versions.select(as_history(shape, prefix)), shape.variants)
        writer = (
            rows.write.format("delta")
            .mode("overwrite")
            .option("overwriteSchema", "true")
            .options(**TABLE_PROPERTIES)
        )
        if needs_column_mapping(rows.columns):
            writer = writer.option("delta.columnMapping.mode", "name")
        if self.checked.state(self.session, self.path) is not None:
            self._prepare_for(dict(rows.dtypes))
        with signed(self.session, signature, None):
            writer.save(self.path)

    def merge(
        self, changes: DataFrame, window: Window, shape: HistoryShape, signature: Signature
    ) -> None:
        """Remove and insert versions in one commit, which is skipped if it already exists.

        `changes`: versions, with the parts that identify them and `_cdc_goes`. In a version to
        remove, `_cdc_had` is its end in the table.
        """
        names = self.columns()
        prefix = prefix_of(names)
        source = changes.select(
            *as_history(shape, prefix),
            *shape.part_names,
            f.col("_cdc_had.lsn").alias("_cdc_had_lsn"),
            f.col("_cdc_had.seq").alias("_cdc_had_seq"),
            GOES,
        )
        source = parsed(source, shape.variants)
        first, ends = window.first[0], f"t.{prefix}valid_to_lsn"
        begins = (f"{prefix}valid_from_lsn", f"{prefix}valid_from_seq")
        theirs = shape.parts(of="t", lsn=begins[0])
        same = [
            f"s.{GOES}",
            f"({ends} IS NULL OR {ends} >= {first})",
            *(f"t.{name} = s.{name}" for name in begins),
            *(f"t.{prefix}valid_to_{name} <=> s._cdc_had_{name}" for name in ("lsn", "seq")),
            *(f"{t} <=> s.{s}" for t, s in zip(theirs, shape.part_names, strict=True)),
        ]
        put = {n: named(n, "s") for n in source.columns if n in names}
        size = self.checked.size_bytes(self.session, self.path)
        is_small = size is not None and size < DEFAULT_POLICY.small_bytes
        vectors = {_MERGE_VECTORS: str(not is_small).lower()}
        self.checked.ensure(self.session, self.path)
        with settings(self.session, vectors), signed(self.session, signature, self.app_id):
            merge(
                self.session,
                self.path,
                source,
                " AND ".join(same),
                [delete_matched(), insert_unmatched(put, f"NOT s.{GOES}")],
            )

    def evolve(self, shape: HistoryShape, signature: Signature) -> None:
        """Add missing columns, and fill them in the versions that have them in the source.

        Where a dropped column was re-created, versions that span that position are split in two.

        Every commit may be repeated without further effect, so that the job can be run again after
        it was killed at any point.
        """
        there = {name.lower() for name in self.columns()}
        new = {n: kind for n, kind in shape.stored_types.items() if n.lower() not in there}
        if new:
            with signed(self.session, signature, None):
                self._add(new)
        prefix = prefix_of(self.columns())
        begins, seq, ends, ends_seq = (
            f"{prefix}{n}"
            for n in ("valid_from_lsn", "valid_from_seq", "valid_to_lsn", "valid_to_seq")
        )
        for lsn in shape.made_again:
            self._split(spanning(lsn, begins, ends, ends_seq), shape, prefix, signature)
            went_on = f"{begins} = {lsn} AND {seq} = 0 AND {prefix}operation = '{UPDATE}'"
            for column in shape.made_at(lsn):
                self._fill(column, went_on, signature)
        for column in shape.added:
            self._fill(column, spanning(column.since_lsn, begins, ends, ends_seq), signature)

    def _fill(self, column: LakeColumn, where: str, signature: Signature) -> None:
        value, text = missing_value(column)
        stored = value_of_text(value) if column.is_variant else value
        values = {column.name: stored, RAW: with_text(column, text)}
        self.checked.ensure(self.session, self.path)
        with signed(self.session, signature, None):
            where = f"({where}) AND {lacks(column, value, text)}"
            run(self.session, update(self.path, values, where))

    def _split(self, where: str, shape: HistoryShape, prefix: str, signature: Signature) -> None:
        """Replace versions that were current when a column was re-created by two versions each."""
        found = self.rows().where(where)
        if found.isEmpty():
            return
        versions = with_missing(stored(found, shape, prefix), shape)
        rows = parsed(versions.select(as_history(shape, prefix)), shape.variants)
        writer = rows.write.format("delta")
        with settings(self.session, _UNCHECKED), signed(self.session, signature, None):
            writer.mode("overwrite").option("replaceWhere", where).save(self.path)

    def _add(self, kinds: Mapping[str, str]) -> None:
        self._prepare_for(kinds)
        run(self.session, add_columns(self.path, kinds))

    def _prepare_for(self, kinds: Mapping[str, str]) -> None:
        """Set the properties that the history needs for these columns."""
        properties = missing_properties(kinds, self.column_types())
        if properties:
            run(self.session, set_properties(self.path, properties))


def clash(shape: HistoryShape, names: Sequence[str]) -> str | None:
    """Return a source column with the name of a history's own; None without one."""
    if prefix_of(names):
        return None
    return next((n for n in shape.columns if n.lower() in ADDED), None)
