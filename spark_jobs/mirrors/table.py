"""A mirror: a Delta table with the current rows of a source table.

Its columns are the raw table's source columns, `_cdc_raw`, and the position of each row's last
change, `_cdc_lsn` and `_cdc_seq`: a change applies only to a row with a lower position.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from delta.tables import DeltaTable
from pyspark.errors import AnalysisException
from pyspark.sql import functions as f

from ingestd.lake.fold.outcomes import DELETED, KEPT
from spark_jobs.delta_log.acceleration import SparkAlone
from spark_jobs.delta_log.checked_tables import CheckedTables
from spark_jobs.delta_log.commits import (
    TABLE_PROPERTIES,
    settings,
    signed,
    size_bytes,
    table_property,
)
from spark_jobs.lake.columns import (
    RAW,
    RAW_TYPE,
    col,
    later,
    needs_column_mapping,
    quoted,
    same_key,
)
from spark_jobs.lake.missing_values import lacks, missing_value, with_text
from spark_jobs.mirrors.policy import DEFAULT_POLICY, MirrorPolicy

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
    condition that all affected mirror rows ("t") meet; the fewer rows meet it, the less is read.
    `nbytes`: their approximate size, as the source sent them.
    """

    rows: DataFrame
    columns: Sequence[LakeColumn]
    key: Sequence[LakeColumn]
    unsent: Collection[str] = ()
    near: Column | None = None
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class MirrorTable:
    """A mirror at `path`, changed in `session`."""

    session: SparkSession
    path: str
    app_id: str
    soft_deletes: bool = False
    accelerator: Accelerator = field(default_factory=SparkAlone)
    checked: CheckedTables = field(default_factory=CheckedTables)
    policy: MirrorPolicy = DEFAULT_POLICY

    @property
    def exists(self) -> bool:
        """Return whether the Delta table exists."""
        return DeltaTable.isDeltaTable(self.session, self.path)

    def rows(self) -> DataFrame:
        """Return the mirror's rows."""
        return self.checked.rows(self.session, self.path)

    def columns(self) -> list[str]:
        """Return the names of the mirror's columns."""
        return self.checked.columns(self.session, self.path)

    def for_change(self) -> DeltaTable:
        """Return the mirror, to be changed by Spark now."""
        return self.checked.for_change(self.session, self.path)

    def create(
        self, columns: Sequence[LakeColumn], key: Sequence[LakeColumn], signature: Signature
    ) -> bool:
        """Create an empty mirror; return False if it exists or can't be a plain one.

        It is signed with epoch 0: a run that is killed after this re-creates it.
        """
        names = _names(columns)
        if needs_column_mapping(names):
            return False
        kinds = {c.name: c.delta_type for c in columns} | {RAW: RAW_TYPE}
        made = ", ".join(f"{quoted(name)} {kinds.get(name, 'long')}" for name in names)
        clustering = ", ".join(_clustering(columns, key))
        table = f"delta.{quoted(self.path)} ({made}) USING delta"
        by = f"CLUSTER BY ({clustering})" if clustering else ""
        properties = ", ".join(
            [
                *(f"'{k}' = '{v}'" for k, v in TABLE_PROPERTIES.items()),
                _chosen(_with_stats(columns, key)),
            ]
        )
        with signed(self.session, replace(signature, epoch=0, schema_version=0), None):
            try:
                self.session.sql(f"CREATE TABLE {table} {by} TBLPROPERTIES ({properties})")
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

        With soft deletes the outcomes have the column DELETED_AT. Only the last commit is signed as
        the mirror's: a run that was killed before it is repeated.
        """
        names = [col(name) for name in _names(columns)]
        if self.soft_deletes and key:
            names.append(col(DELETED_AT))
        rows = outcomes.where(~col(DELETED)).select(*names)
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
        written = replace(signature, epoch=0, schema_version=0) if clustering else signature
        with self._choosing(stats_columns), signed(self.session, written, None):
            writer.save(self.path)
        self._cluster(clustering, signature)

    def _cluster(self, by: Sequence[str], signature: Signature) -> None:
        """Cluster by these columns (quoted), which a plain write undoes: one commit, or none.

        (Delta ignores a writer's `clusterBy` unless the table is in a catalog.)
        """
        if by:
            with signed(self.session, signature, None):
                table = f"delta.{quoted(self.path)}"
                self.session.sql(f"ALTER TABLE {table} CLUSTER BY ({', '.join(by)})")

    @contextmanager
    def _choosing(self, stats_columns: str) -> Iterator[None]:
        """Change the columns that have statistics; inside, an existing mirror may lose columns.

        (Options of a write set them for a new table only.)
        """
        session, path = self.session, self.path
        before = table_property(session, path, _STATS_COLUMNS) if self.exists else stats_columns
        table = f"delta.{quoted(path)}"
        if before not in {None, stats_columns}:
            session.sql(f"ALTER TABLE {table} UNSET TBLPROPERTIES ('{_STATS_COLUMNS}')")
        yield
        if before != stats_columns:
            session.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ({_chosen(stats_columns)})")

    def apply(self, outcomes: Outcomes, signature: Signature) -> None:
        """Change the rows of these outcomes: one commit, which is skipped if it already exists."""
        size = size_bytes(self.session, self.path)
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
        columns, unsent = outcomes.columns, outcomes.unsent
        same = same_key(outcomes.key, "t", "s")
        merge = (
            self.for_change()
            .alias("t")
            .merge(
                outcomes.rows.alias("s"), same if outcomes.near is None else same & outcomes.near
            )
        )
        is_later, is_deleted = later("s", "t"), col(DELETED, "s")
        if self.soft_deletes:
            marked = {n: col(n, "s") for n in POSITION} | {DELETED_AT: col("_cdc_ts", "s")}
            merge = merge.whenMatchedUpdate(is_later & is_deleted, _quoted(marked))
        else:
            merge = merge.whenMatchedDelete(is_later & is_deleted)
        new = {name: col(name, "s") for name in _names(columns)}
        if self.soft_deletes:
            new[DELETED_AT] = f.lit(None).cast("timestamp")
        # A column that the source dropped, or replaced by another, has no value any more.
        past = set(self.columns()) - new.keys()
        dropped = {name: f.lit(None) for name in past}
        changed = new | dropped | {name: _unless_kept(name) for name in unsent if name in new}
        if unsent:
            changed[RAW] = _kept_texts()
        with signed(self.session, signature, self.app_id):
            merge.whenMatchedUpdate(is_later, _quoted(changed)).whenNotMatchedInsert(
                ~is_deleted, _quoted(new)
            ).execute()

    def _rewrite(self, outcomes: Outcomes, signature: Signature, *, is_small: bool) -> None:
        """Do the same as `_merge` by one join and a plain write of all rows; no soft deletes.

        A run that is killed right after the write leaves the mirror without clustering until it is
        next rewritten. Its rows are correct.

        This is faster if most files change anyway: MERGE needs another join to find them.
        """
        old, unsent = self.rows(), outcomes.unsent
        same = same_key(outcomes.key, "t", "s")
        both = old.alias("t").join(outcomes.rows.alias("s"), same, "full_outer")
        is_there, is_new = col("_cdc_lsn", "t").isNotNull(), col("_cdc_lsn", "s").isNotNull()
        wins = is_new & (~is_there | later("s", "t"))
        names = set(_names(outcomes.columns))
        values = {name: col(name, "s") if name in names else f.lit(None) for name in old.columns}
        values |= {name: _unless_kept(name) for name in unsent if name in names}
        if unsent:
            values[RAW] = _kept_texts()
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
        table = f"delta.{quoted(self.path)}"
        properties = []
        if needs_column_mapping([c.name for c in columns]):
            properties.append("'delta.columnMapping.mode' = 'name'")
        if any("timestamp_ntz" in c.delta_type for c in columns):
            properties.append("'delta.feature.timestampNtz' = 'supported'")
        if properties:
            self.session.sql(f"ALTER TABLE {table} SET TBLPROPERTIES ({', '.join(properties)})")
        added = ", ".join(f"{quoted(c.name)} {c.delta_type}" for c in columns)
        self.session.sql(f"ALTER TABLE {table} ADD COLUMNS ({added})")

    def _fill(self, columns: Sequence[LakeColumn]) -> None:
        for column in columns:
            value, text = missing_value(column)
            values = {column.name: value, RAW: with_text(column, text)}
            self.for_change().update(
                (col("_cdc_lsn") < column.since_lsn) & lacks(column, value, text), _quoted(values)
            )


def _names(columns: Sequence[LakeColumn]) -> list[str]:
    return [*(c.name for c in columns), RAW, *POSITION]


def _quoted(values: dict[str, Column]) -> dict[str, str | Column]:
    return {quoted(name): value for name, value in values.items()}


def _is_kept(name: Column | str) -> Column:
    kept = f.coalesce(col(KEPT, "s"), f.array().cast("array<string>"))
    return f.array_contains(kept, name)


def _unless_kept(name: str) -> Column:
    return f.when(_is_kept(name), col(name, "t")).otherwise(col(name, "s"))


def _kept_texts() -> Column:
    nothing = f.create_map().cast(RAW_TYPE)
    own = f.coalesce(col(RAW, "s"), nothing)
    kept = f.map_filter(f.coalesce(col(RAW, "t"), nothing), lambda name, _: _is_kept(name))
    every = f.map_concat(own, kept)
    return f.when(f.size(every) > 0, every)


def _chosen(stats_columns: str) -> str:
    """Return the property that lists these columns, as SQL."""
    text = stats_columns.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{_STATS_COLUMNS}' = '{text}'"


def _with_stats(columns: Sequence[LakeColumn], key: Sequence[LakeColumn]) -> str:
    """Return the columns with statistics: those by which files can be skipped."""
    clustering = _clustering(columns, key)
    ranged = [quoted(c.name) for c in columns if c.delta_type in _RANGED]
    indexed = [*clustering, *ranged[: _INDEXED - len(clustering)], "_cdc_lsn"]
    return ",".join(dict.fromkeys(indexed))


def _clustering(columns: Sequence[LakeColumn], key: Sequence[LakeColumn]) -> list[str]:
    indexed = {c.name for c in columns[:_INDEXED]}
    chosen = [quoted(k.name) for k in key if k.name in indexed and k.delta_type in _CLUSTERED]
    return chosen[:_MAX_CLUSTERING]
