"""A mirror: a Delta table with the current rows of a source table.

Its columns are the raw table's source columns, `_cdc_raw`, and the position of each row's last
change, `_cdc_lsn` and `_cdc_seq`: a change applies only to a row with a lower position.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException
from pyspark.sql import functions as f

from ingestd.lake.fold.outcomes import DELETED, KEPT
from spark_jobs.delta_log.acceleration import SparkAlone
from spark_jobs.delta_log.checked_tables import CheckedTables
from spark_jobs.delta_log.commits import (
    CHECKPOINTS,
    TABLE_PROPERTIES,
    settings,
    signed,
)
from spark_jobs.delta_log.statements import (
    add_columns,
    cluster,
    create,
    delete_matched,
    insert_unmatched,
    merge,
    quoted,
    run,
    set_properties,
    unset_property,
    update,
    update_matched,
)
from spark_jobs.lake.columns import (
    RAW,
    RAW_TYPE,
    col,
    later,
    missing_properties,
    named,
    needs_column_mapping,
    same_key,
    with_columns,
)
from spark_jobs.lake.missing_values import lacks, missing_value, with_text
from spark_jobs.lake.variants import (
    as_texts,
    parsed,
    table_type,
    value_of_text,
    variant_names,
)
from spark_jobs.mirrors.policy import DEFAULT_POLICY, MirrorPolicy
from spark_jobs.spark_errors import condition_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import Column, DataFrame, SparkSession

    from ingestd.lake.definitions import LakeColumn
    from spark_jobs.delta_log.acceleration import Accelerator, OutcomeMerge
    from spark_jobs.delta_log.commits import Signature

DELETED_AT = "_cdc_deleted_at"
"""With soft deletes: commit time of the row's deletion, null for a row that exists."""
POSITION = ("_cdc_lsn", "_cdc_seq")

_CLUSTERED = frozenset({"byte", "short", "integer", "long", "date", "timestamp", "string"})
"""Delta types by which a mirror is clustered."""
_MAX_CLUSTERING = 4
_CREATED_OTHERWISE = "DELTA_ALTER_TABLE_CLUSTER_BY_NOT_ALLOWED"
"""Condition of the error of Delta 3.2 about a table that was created without clustering."""
_MERGE_VECTORS = "spark.databricks.delta.merge.deletionVectors.persistent"
_PARTITIONS = "spark.sql.shuffle.partitions"
_INDEXED = 32
"""Delta keeps statistics of at most this many columns, and clusters only by those."""
_STATS_COLUMNS = "delta.dataSkippingStatsColumns"
_RANGED = frozenset({"date", "timestamp", "timestamp_ntz"})
"""Delta types that get statistics, since rows written together have similar times.

Values of all other columns, except the key's, are spread over all files, and their statistics would
take a third of the time of writing.
"""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The outcomes of keys: one row each (see `ingestd.lake.fold.outcomes`).

    `columns`: the source's; `key` is among them. `unsent`: columns that may be in KEPT. `near`: a
    condition, as SQL, that all affected mirror rows ("t") meet: the fewer do, the less is read.
    `nbytes`: their approximate size, as the source sent them.
    """

    rows: DataFrame
    columns: Sequence[LakeColumn]
    key: Sequence[LakeColumn]
    unsent: Collection[str] = ()
    near: str = "true"
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class MirrorTable:
    """A mirror at `path`, changed in `session`. `has_variants`: its jsonb columns are VARIANT."""

    session: SparkSession
    path: str
    app_id: str
    soft_deletes: bool = False
    accelerator: Accelerator = field(default_factory=SparkAlone)
    checked: CheckedTables = field(default_factory=CheckedTables)
    policy: MirrorPolicy = DEFAULT_POLICY
    has_variants: bool = False

    @property
    def exists(self) -> bool:
        """Return whether the Delta table exists."""
        return self.checked.state(self.session, self.path) is not None

    def rows(self) -> DataFrame:
        """Return the mirror's rows, with texts for VARIANT (`as_texts`)."""
        return as_texts(self.checked.rows(self.session, self.path))

    def columns(self) -> list[str]:
        """Return the names of the mirror's columns."""
        return self.checked.columns(self.session, self.path)

    def column_types(self) -> dict[str, str]:
        """Return the mirror's columns, name to type."""
        return self.checked.column_types(self.session, self.path)

    def merge(self, source: DataFrame, on: str, clauses: Sequence[str]) -> None:
        """Merge rows into the mirror by Spark. See `statements.merge`."""
        self.checked.ensure(self.session, self.path)
        merge(self.session, self.path, source, on, clauses)

    def create(
        self, columns: Sequence[LakeColumn], key: Sequence[LakeColumn], signature: Signature
    ) -> bool:
        """Create an empty mirror; return False if it exists or can't be a plain one.

        It is signed with epoch 0: a run that is killed after this re-creates it.
        """
        names = _names(columns)
        if needs_column_mapping(names):
            return False
        kinds = {c.name: table_type(c) for c in columns} | {RAW: RAW_TYPE}
        statement = create(
            self.path,
            {name: kinds.get(name, "long") for name in names},
            {**TABLE_PROPERTIES, _STATS_COLUMNS: _with_stats(columns, key)},
            clustering=_clustering(columns, key),
        )
        with signed(self.session, replace(signature, epoch=0, schema_version=0), None):
            try:
                run(self.session, statement)
            except AnalysisException:  # for example, the folder has other files
                return False
        return True

    def replace(
        self,
        outcomes: DataFrame,
        columns: Sequence[LakeColumn],
        key: Sequence[LakeColumn],
        signature: Signature,
    ) -> None:
        """Replace the mirror's rows: a plain write, then a commit that clusters by key.

        A mirror that does not exist is created first: Delta 3.2 clusters no others. (A mirror with
        names that need column mapping can't be, and stays unclustered there.)
        With soft deletes the outcomes have the column DELETED_AT. Only the last commit is signed as
        the mirror's: a run that was killed before it is repeated.
        """
        names = [col(name) for name in _names(columns)]
        if self.soft_deletes and key:
            names.append(col(DELETED_AT))
        variants = variant_names(columns)
        rows = parsed(outcomes.where(~col(DELETED)).select(*names), variants)
        stats_columns = _with_stats(columns, key)
        writer = (
            rows.write.format("delta")
            .mode("overwrite")
            .option("overwriteSchema", "true")
            .options(**TABLE_PROPERTIES)
            .option(_STATS_COLUMNS, stats_columns)
        )
        if needs_column_mapping(rows.columns):
            writer = writer.option("delta.columnMapping.mode", "name")
        clustering = _clustering(columns, key)
        if clustering and not self.exists:
            self.create(columns, key, signature)
        written = replace(signature, epoch=0, schema_version=0) if clustering else signature
        if self.exists:
            self._prepare_for(dict(rows.dtypes))
        with self._choosing(stats_columns), signed(self.session, written, None):
            writer.save(self.path)
        self._cluster(clustering, signature)

    def _cluster(self, by: Sequence[str], signature: Signature) -> None:
        """Cluster by these columns, which a plain write undoes: one commit, or none.

        (Delta ignores a writer's `clusterBy` unless the table is in a catalog.) Delta 3.2 clusters
        only tables that were created so: others stay as they are, and the commit changes nothing.
        """
        if not by:
            return
        with signed(self.session, signature, None):
            try:
                run(self.session, cluster(self.path, by))
            except AnalysisException as error:
                if condition_of(error) != _CREATED_OTHERWISE:
                    raise
                run(self.session, set_properties(self.path, CHECKPOINTS))

    @contextmanager
    def _choosing(self, stats_columns: str) -> Iterator[None]:
        """Change the columns that have statistics; inside, an existing mirror may lose columns.

        (Options of a write set them for a new table only.)
        """
        session, path = self.session, self.path
        there = self.checked.state(session, path)
        before = stats_columns if there is None else there.properties.get(_STATS_COLUMNS)
        if before not in {None, stats_columns}:
            run(session, unset_property(path, _STATS_COLUMNS))
        yield
        if before != stats_columns:
            run(session, set_properties(path, {_STATS_COLUMNS: stats_columns}))

    def apply(self, outcomes: Outcomes, signature: Signature) -> None:
        """Change the rows of these outcomes: one commit, which is skipped if it already exists."""
        size = self.checked.size_bytes(self.session, self.path)
        is_small = size is not None and size < self.policy.small_bytes
        is_mostly_changed = size is not None and outcomes.nbytes * self.policy.changed_share > size
        if (is_small or is_mostly_changed) and not self.soft_deletes:
            self._rewrite(outcomes, signature, is_small=is_small)
        else:
            # (deletion vectors cost another pass, but save writing large files)
            with settings(self.session, {_MERGE_VECTORS: str(not is_small).lower()}):
                self._merge(outcomes, signature)

    def in_driver(self, above: int) -> OutcomeMerge | None:
        """Return the driver's counterpart of `apply`, for a mirror at epoch `above`.

        None if the driver can't change this mirror.
        """
        if self.soft_deletes:
            return None
        return self.accelerator.merge(self.session, self.path, self.app_id, above, self.policy)

    def _merge(self, outcomes: Outcomes, signature: Signature) -> None:
        columns = outcomes.columns
        new = {name: named(name, "s") for name in _names(columns)}
        unsent = {name: f"_cdc_keeps{n}" for n, name in enumerate(outcomes.unsent) if name in new}
        rows = parsed(outcomes.rows, variant_names(columns))
        rows = with_columns(rows, {m: _is_kept(name) for name, m in unsent.items()})
        clauses = []
        is_later = later("s", "t")
        if self.soft_deletes:
            marked = {n: named(n, "s") for n in POSITION} | {DELETED_AT: "s._cdc_ts"}
            clauses.append(update_matched(marked, f"{is_later} AND s.{DELETED}"))
            new[DELETED_AT] = "NULL"
        else:
            clauses.append(delete_matched(f"{is_later} AND s.{DELETED}"))
        # A column that the source dropped, or replaced by another, has no value any more.
        changed = new | dict.fromkeys(set(self.columns()) - new.keys(), "NULL")
        for name, mark in unsent.items():
            changed[name] = f"CASE WHEN s.{mark} THEN {named(name, 't')} ELSE {new[name]} END"
        if outcomes.unsent:
            changed[RAW] = _KEPT_TEXTS
        clauses += [update_matched(changed, is_later), insert_unmatched(new, f"NOT s.{DELETED}")]
        same = same_key(outcomes.key, "t", "s")
        with signed(self.session, signature, self.app_id):
            self.merge(rows, f"{same} AND {outcomes.near}", clauses)

    def _rewrite(self, outcomes: Outcomes, signature: Signature, *, is_small: bool) -> None:
        """Do the same as `_merge` by one join and a plain write of all rows; no soft deletes.

        A run that is killed right after the write leaves the mirror without clustering until it is
        next rewritten. Its rows are correct.

        This is faster if most files change anyway: MERGE needs another join to find them.
        """
        old, unsent = self.checked.rows(self.session, self.path), outcomes.unsent
        new = parsed(outcomes.rows, variant_names(outcomes.columns))
        same = same_key(outcomes.key, "t", "s")
        both = old.alias("t").join(new.alias("s"), f.expr(same), "full_outer")
        is_there, is_new = col("_cdc_lsn", "t").isNotNull(), col("_cdc_lsn", "s").isNotNull()
        wins = is_new & (~is_there | f.expr(later("s", "t")))
        names = set(_names(outcomes.columns))
        values = {name: col(name, "s") if name in names else f.lit(None) for name in old.columns}
        values |= {name: _unless_kept(name) for name in unsent if name in names}
        if unsent:
            values[RAW] = f.expr(_KEPT_TEXTS)
        rows = both.where(~(wins & f.coalesce(col(DELETED, "s"), f.lit(False)))).select(  # noqa: FBT003
            *[
                f.when(wins, values[field.name].cast(field.dataType))
                .otherwise(col(field.name, "t"))
                .alias(field.name)
                for field in old.schema
            ]
        )
        is_small = is_small and outcomes.nbytes < self.policy.small_bytes
        partitions = {_PARTITIONS: "1"} if is_small else {}
        with signed(self.session, signature, self.app_id), settings(self.session, partitions):
            rows.write.format("delta").mode("overwrite").save(self.path)
        # (Delta refuses to cluster by a column without statistics, if a user chose them so)
        with suppress(AnalysisException):
            self._cluster(_clustering(outcomes.columns, outcomes.key), signature)

    def evolve(self, columns: Sequence[LakeColumn], signature: Signature) -> None:
        """Add the columns that the mirror lacks; fill them in earlier rows as in the source.

        Each step may be repeated.
        """
        there = {name.lower() for name in self.columns()}
        new = [c for c in columns if c.name.lower() not in there]
        if new:
            with signed(self.session, signature, None):
                self._add(new)
        filled = [c for c in columns if c.since_lsn]
        if filled:
            with signed(self.session, signature, None):
                self._fill(filled)

    def _add(self, columns: Sequence[LakeColumn]) -> None:
        kinds = {c.name: table_type(c) for c in columns}
        self._prepare_for(kinds)
        run(self.session, add_columns(self.path, kinds))

    def _prepare_for(self, kinds: Mapping[str, str]) -> None:
        """Set the properties that the mirror needs for these columns."""
        properties = missing_properties(kinds, self.column_types())
        if properties:
            run(self.session, set_properties(self.path, properties))

    def _fill(self, columns: Sequence[LakeColumn]) -> None:
        for column in columns:
            value, text = missing_value(column)
            stored = value_of_text(value) if column.is_variant else value
            values = {column.name: stored, RAW: with_text(column, text)}
            where = f"_cdc_lsn < {column.since_lsn} AND {lacks(column, value, text)}"
            self.checked.ensure(self.session, self.path)
            run(self.session, update(self.path, values, where))


def _names(columns: Sequence[LakeColumn]) -> list[str]:
    return [*(c.name for c in columns), RAW, *POSITION]


_KEPT = f"coalesce(s.{KEPT}, CAST(array() AS array<string>))"
_NO_TEXTS = f"CAST(map() AS {RAW_TYPE})"
_ALL_TEXTS = (
    f"map_concat(coalesce(s.{RAW}, {_NO_TEXTS}), map_filter(coalesce(t.{RAW}, {_NO_TEXTS}),"
    f" (name, _text) -> array_contains({_KEPT}, name)))"
)
_KEPT_TEXTS = f"CASE WHEN size({_ALL_TEXTS}) > 0 THEN {_ALL_TEXTS} END"
"""`_cdc_raw` of an outcome ("s"), with the texts of the mirror's row ("t") that it keeps."""


def _is_kept(name: str) -> Column:
    kept = f.coalesce(col(KEPT), f.array().cast("array<string>"))
    return f.array_contains(kept, name)


def _unless_kept(name: str) -> Column:
    kept = f.array_contains(f.expr(_KEPT), name)
    return f.when(kept, col(name, "t")).otherwise(col(name, "s"))


def _with_stats(columns: Sequence[LakeColumn], key: Sequence[LakeColumn]) -> str:
    """Return the columns with statistics: those by which files can be skipped."""
    clustering = [quoted(name) for name in _clustering(columns, key)]
    ranged = [quoted(c.name) for c in columns if c.delta_type in _RANGED]
    indexed = [*clustering, *ranged[: _INDEXED - len(clustering)], "_cdc_lsn"]
    return ",".join(dict.fromkeys(indexed))


def _clustering(columns: Sequence[LakeColumn], key: Sequence[LakeColumn]) -> list[str]:
    indexed = {c.name for c in columns[:_INDEXED]}
    chosen = [k.name for k in key if k.name in indexed and k.delta_type in _CLUSTERED]
    return chosen[:_MAX_CLUSTERING]
