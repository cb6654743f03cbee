"""Compares one table: the source at L, rolled forward to the mirror's position, and the mirror."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from ingestd.lake.definitions import Definition, Registry
from ingestd.model.errors import FolderError, TableChangedError, TableError
from ingestd.model.lake_state import TableState
from ingestd.model.schema import Table
from spark_jobs.lake.source_lake import SourceLake
from spark_jobs.lake.targets import table_path
from spark_jobs.lake.types import spark_type
from spark_jobs.lake.variants import as_texts, stored_variants
from spark_jobs.reconciling.differences import (
    DIFFERENT,
    EXTRA,
    MISSING,
    differences,
    differing_ranges,
    sums_by_range,
    total_rows,
)
from spark_jobs.reconciling.mirror_position import (
    EpochsAround,
    MirrorRow,
    MirrorVersion,
    mirror_rows,
    newest_version,
)
from spark_jobs.reconciling.report import (
    Example,
    ReconcileState,
    Reconciliation,
    TableResult,
    append_differences,
)
from spark_jobs.reconciling.roll_forward import roll_forward
from spark_jobs.reconciling.row_hashes import RAW, ComparedTable, hashed, named
from spark_jobs.reconciling.source_point import SourcePoint
from spark_jobs.source.split_frame import snapshot_frame, task_fault


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of comparisons. `shown`: the number of differences to show per table."""

    target: str
    report: str | None = None
    ranges: int = 1024
    split_bytes: int = 64_000_000
    with_values: bool = False
    shown: int = 10


class TableComparison:
    """Compares tables of one source at one point. `row`: of `_mirror`, at or above the point."""

    def __init__(
        self,
        lake: SourceLake,
        point: SourcePoint,
        *,
        around: EpochsAround,
        row: MirrorRow,
        settings: Settings,
        run: Reconciliation,
    ) -> None:
        self._lake = lake
        self._session: SparkSession = lake.session
        self._point = point
        self._around = around
        self._row = row
        self._settings = settings
        self._run = run
        self._registry: Registry = lake.registry()

    def compare(self, table: Table) -> TableResult:
        """Return the comparison of a table, or the fault that prevents it."""
        try:
            return self._compare(table)
        except TableError as error:
            return TableResult(str(table.id), ReconcileState.NOT_COMPARED, fault=error)
        except FolderError as error:
            fault = TableError(table.id, error.what, remedy=error.remedy)
            return TableResult(str(table.id), ReconcileState.NOT_COMPARED, fault=fault)

    def _compare(self, table: Table) -> TableResult:
        definition = self._definition(table)
        comparison, note = self._columns(table, definition)
        found, rows = self._mirror(table, comparison)
        variants = stored_variants(rows)
        mirror = hashed(_conformed(table, as_texts(rows), comparison), comparison)
        source = snapshot_frame(self._session, self._point.rows(table, self._settings.split_bytes))
        source = as_texts(source, variants)
        changes = None if found is None else self._changes(str(table.id), found.epoch)
        changes = None if changes is None else as_texts(changes, variants)
        try:
            result = self._compare_rows(table, comparison, source, changes, mirror)
        except Exception as error:
            fault = task_fault(error)
            if fault is None:
                raise
            raise fault from error
        self._point.ensure_unreplaced(table)
        if result.state is not ReconcileState.EQUAL:
            self._ensure_still_complete(table)
        epoch, version = (None, None) if found is None else (found.epoch, found.version)
        return replace(result, epoch=epoch, mirror_version=version, note=note)

    # --- what is compared --------------------------------------------------------------------

    def _definition(self, table: Table) -> Definition:
        name = str(table.id)
        definition = self._registry.at(name, self._row.end_lsn)
        # The mirror may already have new columns of a table that has not changed since.
        brought_to, now = self._row.schemas.get(name), self._registry.at(name)
        if now is not None and now.schema_version == brought_to:
            definition = now
        if definition is None or not definition.is_complete:
            state = None if definition is None else definition.state
            if definition is not None and state is TableState.STOPPED:
                raise TableError(
                    table.id,
                    f"is stopped: {definition.reason}",
                    remedy="run `ingestd check`, which shows the remedy",
                )
            raise TableChangedError(
                table.id, "is being read by the daemon", remedy="compare it when it is live"
            )
        if brought_to is not None and definition.schema_version > brought_to:
            raise TableChangedError(
                table.id,
                "has columns that its mirror does not have yet",
                remedy="compare it again after the mirror's next batch",
            )
        lake_names = {c.name: c.lake_name for c in table.columns}
        identifying = {lake_names[name] for name in table.identifying}
        if identifying != set(definition.key):
            raise TableChangedError(
                table.id,
                "has a key or replica identity that the lake does not have yet",
                remedy="compare it again",
            )
        return definition

    def _columns(self, table: Table, definition: Definition) -> tuple[ComparedTable, str | None]:
        known = {c.name for c in definition.columns}
        compared = tuple(
            (c.lake_name, spark_type(c.type)) for c in table.columns if c.lake_name in known
        )
        new = [c.name for c in table.columns if c.lake_name not in known]
        note = None
        if new:
            note = f"not compared, because the lake does not have them yet: {', '.join(new)}"
        settings = self._settings
        return ComparedTable(compared, definition.key, settings.ranges, settings.with_values), note

    def _mirror(
        self, table: Table, comparison: ComparedTable
    ) -> tuple[MirrorVersion | None, DataFrame]:
        """Return the newest version of the mirror, and its rows; no rows without a mirror."""
        recorded = self._row.versions.get(str(table.id))
        if recorded is None:
            return None, snapshot_schema(self._session, comparison)
        path = table_path(self._settings.target, str(table.id))
        try:
            found = newest_version(self._lake, path, recorded, self._row.epoch)
            rows = mirror_rows(self._lake, path, found.version)
        except AnalysisException as error:
            raise TableError(
                table.id,
                f"its mirror {path} can't be read",
                remedy="remove the table's folder, and let the mirror job re-create it",
            ) from error
        return found, rows

    def _changes(self, table: str, epoch: int) -> DataFrame | None:
        if epoch <= self._around.below:
            return None
        try:
            rows = self._lake.changes(table, above=self._around.below, through=epoch)
        except AnalysisException:  # an empty table that never changed has no raw table
            return None
        return rows.where(f.col("_cdc_lsn") >= int(self._point.lsn))

    # --- comparing ----------------------------------------------------------------------------

    def _compare_rows(
        self,
        table: Table,
        comparison: ComparedTable,
        source: DataFrame,
        changes: DataFrame | None,
        mirror: DataFrame,
    ) -> TableResult:
        expected = roll_forward(source, changes, comparison)
        try:
            ours, theirs = sums_by_range(expected.rows), sums_by_range(mirror)
            result = TableResult(
                str(table.id),
                ReconcileState.EQUAL,
                source_rows=total_rows(ours),
                mirror_rows=total_rows(theirs),
                changes=expected.changes,
            )
            ranges = differing_ranges(ours, theirs)
            if not ranges:
                return result
            found = differences(expected.rows, mirror, ranges, comparison).persist()
            try:
                return self._with_differences(result, found)
            finally:
                found.unpersist()
        finally:
            expected.close()

    def _with_differences(self, result: TableResult, differences: DataFrame) -> TableResult:
        counts = {r[0]: r[1] for r in differences.groupBy("kind").agg(f.sum("count")).collect()}
        if self._settings.report is not None:
            append_differences(self._settings.report, self._run, result.table, differences)
        shown = differences.orderBy("kind", "key", "row").limit(self._settings.shown)
        return replace(
            result,
            state=ReconcileState.DIFFERENT,
            missing=counts.get(MISSING, 0),
            extra=counts.get(EXTRA, 0),
            different=counts.get(DIFFERENT, 0),
            examples=tuple(map(Example.from_row, shown.collect())),
        )

    def _ensure_still_complete(self, table: Table) -> None:
        """Raise TableChangedError if the daemon is about to fix a difference by a re-read."""
        now = self._lake.registry().at(str(table.id))
        if now is None or not now.is_complete:
            raise TableChangedError(
                table.id, "is being re-read by the daemon", remedy="compare it when it is live"
            )


def snapshot_schema(session: SparkSession, comparison: ComparedTable) -> DataFrame:
    """Return an empty DataFrame with the compared columns and `_cdc_raw`."""
    nothing = session.range(0)
    columns = [f.lit(None).cast(kind).alias(name) for name, kind in comparison.columns]
    return nothing.select(*columns, f.lit(None).cast("map<string,string>").alias(RAW))


def _conformed(table: Table, rows: DataFrame, comparison: ComparedTable) -> DataFrame:
    """Return the compared columns of a mirror; one that it lacks is null."""
    types = {field.name: field.dataType for field in rows.schema.fields}
    columns = []
    for name, kind in comparison.columns:
        if name not in types:
            columns.append(f.lit(None).cast(kind).alias(name))
            continue
        if types[name].simpleString() != kind.simpleString():
            raise TableError(
                table.id,
                f"column {name!r} of its mirror is {types[name].simpleString()}, in the lake"
                f" {kind.simpleString()}",
                remedy="remove the table's folder, and let the mirror job re-create it",
            )
        columns.append(named(name))
    raw = named(RAW) if RAW in types else f.lit(None).cast("map<string,string>")
    return rows.select(*columns, raw.alias(RAW))
