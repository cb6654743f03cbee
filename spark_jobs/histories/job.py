"""The history job: moves one history from one epoch to another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException
from pyspark.sql import Window as Over
from pyspark.sql import functions as f

from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from spark_jobs.histories.keyed import keyed_versions, keys_of
from spark_jobs.histories.keyless import keyless_versions, rows_of
from spark_jobs.histories.shape import HistoryShape
from spark_jobs.histories.table import GOES, HistoryTable, clash
from spark_jobs.histories.version_columns import VERSION
from spark_jobs.histories.window import RowsGoneError, Window, empty_window, raw_rows, read_window
from spark_jobs.lake.columns import col
from spark_jobs.lake.types import named_type
from spark_jobs.lake.variants import ensure_same_types, log_kept_texts, with_variants

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from spark_jobs.engine.table_mover import TableStep
    from spark_jobs.lake.source_lake import SourceLake


@dataclass(frozen=True, slots=True)
class HistoryJob:
    """The history job, for `spark_jobs.engine.epoch_run.EpochRun`.

    `variant`: jsonb is stored as VARIANT.
    """

    variant: bool = False
    name: str = "history"

    def advance(self, lake: SourceLake, step: TableStep) -> None:
        """Bring a table's history to the end of `step.through`. See `TableJob`."""
        if self.variant:
            step = replace(step, definition=with_variants(step.definition))
        shape = shape_of(lake, step)
        table = HistoryTable(lake.session, step.path, step.app_id, lake.checked)
        if step.above:
            types, variants = table.column_types(), shape.variants
            ensure_same_types(step.table, types, shape.columns, variants, is_wanted=self.variant)
            named = clash(shape, list(types))
            if named is not None:
                raise TableError(
                    TableId.parse(step.table),
                    f"its new column {named} has the name of a column that the history adds",
                    remedy=f"--rebuild {step.table} renames the history's own to _cdc_{named}, ...",
                )
            if step.schema_version != step.definition.schema_version:
                # Signed with the earlier epoch: a run that is killed in between is repeated.
                earlier = replace(step.signature, epoch=step.above, schema_version=0)
                table.evolve(shape, earlier)
        try:
            window = read_window(
                lake,
                step.table,
                shape,
                above=step.above,
                above_lsn=step.above_lsn,
                through=step.through.number,
                rows=step.rows,
                key_since=step.definition.key_since_lsn,
            )
        except RowsGoneError as error:
            raise TableError(
                TableId.parse(step.table),
                f"{lake.raw_path(step.table)}: {error}",
                remedy=f"`ingestd snapshot {lake.source} {step.table}`, then"
                f" --rebuild {step.table}: its history starts over with that snapshot",
            ) from error
        if window is not None:
            _ensure_same_key(window, lake, step)
            log_kept_texts(step.table, window.kept_texts)
        if not step.above:
            _begin(table, window, shape, lake, step)
        elif window is not None:
            _advance(table, window, shape, step)


def shape_of(lake: SourceLake, step: TableStep) -> HistoryShape:
    """Return the shape of a step's table. Raises TableError if the raw table does not exist."""
    try:
        schema = lake.changes(step.table, above=step.above, through=step.through.number).schema
    except AnalysisException as error:
        raise TableError(
            TableId.parse(step.table),
            f"the raw table {lake.raw_path(step.table)} does not exist",
            remedy="`ingestd snapshot` re-reads the table into the lake",
        ) from error
    for column in step.definition.columns:  # a new one is missing before its first row
        if column.name not in schema.names:
            schema = schema.add(column.name, named_type(column.delta_type))
    return HistoryShape.from_schema(schema, step.definition)


def _ensure_same_key(window: Window, lake: SourceLake, step: TableStep) -> None:
    """Raise TableError if any of the changes may identify their rows by another key."""
    since = step.definition.key_since_lsn
    if window.named_from is not None and window.named_from < since:
        window.close()
        raise TableError(
            TableId.parse(step.table),
            f"its replica identity changed at {since}, and earlier changes identify rows by the"
            " previous one",
            remedy=f"`ingestd snapshot {lake.source} {step.table}`, then"
            f" --rebuild {step.table}: its history starts over with that snapshot",
        )


def _begin(
    table: HistoryTable,
    window: Window | None,
    shape: HistoryShape,
    lake: SourceLake,
    step: TableStep,
) -> None:
    if window is None:
        window = empty_window(raw_rows(lake, step.table, shape, above=0, through=0))
    try:
        made = keyed_versions if shape.is_keyed else keyless_versions
        table.replace(made(window, None, shape), shape, step.signature)
    finally:
        window.close()


def _advance(table: HistoryTable, window: Window, shape: HistoryShape, step: TableStep) -> None:
    before = again = None
    try:
        made, touched = keyed_versions, keys_of
        if not shape.is_keyed:
            made, touched = keyless_versions, rows_of
        keys = None if window.marks else touched(window, shape)
        before = table.before(window, shape, keys)
        if window.is_late:
            before = before.persist()
            again = before.where("_cdc_again").drop("_cdc_again")
            before = before.where("NOT _cdc_again")
        versions = made(window, before.drop("_cdc_again"), shape)
        table.merge(_changed(versions, again, shape), window, shape, step.signature)
    finally:
        if again is not None and before is not None:
            before.unpersist()
        window.close()


def _changed(versions: DataFrame, again: DataFrame | None, shape: HistoryShape) -> DataFrame:
    """Return the versions to insert and, with `_cdc_goes`, those to remove.

    In a table without a key, equal rows that begin and end together are removed together; those
    that stay are inserted again. `again`: stored versions that `versions` re-creates.
    """
    columns = [*shape.columns, *VERSION, *shape.part_names]
    is_old = f.col("_cdc_is_old")
    versions = versions.withColumn(
        "_cdc_differs", is_old & ~f.col("_cdc_to").eqNullSafe(f.col("_cdc_had"))
    )
    goes = is_old
    if not shape.is_keyed:
        alike = Over.partitionBy(*shape.part_names, "_cdc_lsn", "_cdc_seq", "_cdc_had", is_old)
        versions = versions.withColumns(
            {
                "_cdc_differs": f.max("_cdc_differs").over(alike),
                "_cdc_number": f.row_number().over(alike.orderBy("_cdc_to")),
            }
        )
        goes = is_old & (f.col("_cdc_number") == 1)
    both = f.when(goes, f.array(f.expr("true"), f.expr("false")))
    changed = versions.where(~is_old | f.col("_cdc_differs")).select(
        *map(col, columns), f.explode(both.otherwise(f.array(f.expr("false")))).alias(GOES)
    )
    if again is None:
        return changed
    if not shape.is_keyed:
        again = again.dropDuplicates([*shape.part_names, "_cdc_lsn", "_cdc_seq", "_cdc_had"])
    return changed.unionByName(again.select(*map(col, columns)).withColumn(GOES, f.expr("true")))
