"""A feed: an append-only Delta table with the changes of a source table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.sql import functions as f

from ingestd.model.recorded import RecordError, read_json
from spark_jobs.delta_log.checked_tables import CheckedTables
from spark_jobs.delta_log.commits import CHECKPOINTS, signed
from spark_jobs.delta_log.statements import add_columns, create, run, set_properties
from spark_jobs.feeds.feed_rows import DELETED, FEED_COLUMNS, OPERATION, SEQUENCE
from spark_jobs.histories.shape import UNCHANGED, HistoryShape
from spark_jobs.histories.version_columns import no_end
from spark_jobs.lake.columns import RAW, RAW_TYPE, col, needs_column_mapping, with_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from ingestd.lake.definitions import Definition
    from spark_jobs.delta_log.commits import Signature

_NO_COMMITS = 1 << 62
"""Above all versions: only the newest version is asked for."""
_KEY = "ingestd.key"
"""Table property: the lake names of the key's columns, as JSON."""
_STATS_COLUMNS = "_cdc_sequence,_cdc_epoch,_cdc_lsn,_cdc_ts"
"""Those by which readers skip files: values of keys are spread over all files."""


@dataclass(frozen=True, slots=True)
class FeedTable:
    """The feed at `path`, appended to in `session`."""

    session: SparkSession
    path: str
    checked: CheckedTables

    @property
    def key(self) -> list[str] | None:
        """The names of the key's columns; None without a Delta table.

        None of them if another writer has changed the property.
        """
        found = self.checked.state(self.session, self.path)
        if found is None:
            return None
        try:
            return [name.text() for name in read_json(found.properties.get(_KEY, "[]")).items()]
        except RecordError:
            return []

    @property
    def version(self) -> int:
        """The newest version of the Delta table."""
        return self.checked.commits_above(self.session, self.path, _NO_COMMITS).version

    def create(self, definition: Definition, signature: Signature) -> None:
        """Create an empty feed with a table's present columns.

        It is signed with epoch 0: a run that is killed after this fills it as a new one.
        """
        kinds = {c.name: c.delta_type for c in definition.columns} | {RAW: RAW_TYPE, **FEED_COLUMNS}
        properties = {
            **CHECKPOINTS,
            "delta.appendOnly": "true",
            "delta.dataSkippingStatsColumns": _STATS_COLUMNS,
            _KEY: json.dumps(definition.key),
        }
        if needs_column_mapping(list(kinds)):
            properties["delta.columnMapping.mode"] = "name"
        with signed(self.session, replace(signature, epoch=0, schema_version=0), None):
            run(self.session, create(self.path, kinds, properties))

    def evolve(self, definition: Definition, signature: Signature) -> None:
        """Add the columns that the feed lacks. May be repeated."""
        there = {name.lower() for name in self.checked.columns(self.session, self.path)}
        new = {c.name: c.delta_type for c in definition.columns if c.name.lower() not in there}
        properties = {}
        if needs_column_mapping(list(new)):
            properties["delta.columnMapping.mode"] = "name"
        if any("timestamp_ntz" in kind for kind in new.values()):
            properties["delta.feature.timestampNtz"] = "supported"
        with signed(self.session, signature, None):
            if properties:
                run(self.session, set_properties(self.path, properties))
            if new:
                run(self.session, add_columns(self.path, new))

    def current_rows(self, shape: HistoryShape, keys: DataFrame | None = None) -> DataFrame:
        """Return the newest row of each key, as versions that are current; no deletions.

        `keys`: only rows with these parts. Reads the whole feed.
        """
        rows = self.checked.rows(self.session, self.path)
        lacking = {
            n: f.lit(None).cast(kind) for n, kind in shape.types.items() if n not in rows.columns
        }
        rows = with_columns(rows, lacking)
        rows = rows.select("*", *shape.named_parts())
        if keys is not None:
            same = f.expr("true")
            for name in shape.part_names:
                same = same & f.col(f"r.{name}").eqNullSafe(f.col(f"k.{name}"))
            rows = rows.alias("r").join(keys.alias("k"), same, "left_semi")
        whole = f.struct(*[col(name) for name in rows.columns])
        newest = rows.groupBy(*shape.part_names).agg(f.max_by(whole, SEQUENCE).alias("_cdc_newest"))
        return (
            newest.select("_cdc_newest.*")
            .where(f.col(OPERATION) != DELETED)
            .select(
                *map(col, shape.columns),
                RAW,
                f.lit(None).cast("array<string>").alias(UNCHANGED),
                "_cdc_lsn",
                "_cdc_seq",
                "_cdc_ts",
                f.col(OPERATION).alias("_cdc_op"),
                no_end().alias("_cdc_to"),
                no_end().alias("_cdc_had"),
                f.expr("true").alias("_cdc_is_old"),
                *shape.part_names,
            )
        )

    def append_rows(self, rows: DataFrame, signature: Signature, app_id: str | None) -> None:
        """Append rows of a feed: one commit, which is skipped if it already exists (`app_id`).

        A column that the feed lacks is left out: the source had dropped it before the feed began.
        """
        there = self.checked.columns(self.session, self.path)
        chosen = [col(name) for name in there if name in rows.columns]
        with signed(self.session, signature, app_id):
            rows.select(*chosen).write.format("delta").mode("append").save(self.path)


def names_of(key: Sequence[str]) -> str:
    """Return the names of a key's columns for a message."""
    return f"({', '.join(key)})"
