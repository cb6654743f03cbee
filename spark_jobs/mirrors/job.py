"""A table's step in the mirror job: moves one mirror from one epoch to another.

The first line that applies decides (limits: `policy.py`):

======================================  ==========================================================
the step                                action
======================================  ==========================================================
no mirror yet                           created by the driver (`update.py`) up to `driver_rows`,
                                        else by Spark from the fold of all rows above the newest
                                        `t`
a table without a key                   copies of equal rows added or removed (`keyless.py`)
at most `few_rows`                      folded in the driver, by Spark if the driver can't; merged
                                        by the driver (`accelerator/`) if the mirror's files
                                        that may have the keys are small enough, else by Spark
at most `driver_rows`, changes only,    folded and merged by the driver (`update.py`)
and a mirror that is small enough
any other                               folded and merged by Spark
======================================  ==========================================================

Spark merges by one MERGE; a small mirror, or one that mostly changed, by a join and a plain write
of all rows (`table.py`).

If a step with a mirror has a `t`, which is known once the rows have been read, the mirror is
created again from the fold of all rows above it: rows below a `t` are void, whenever they came. Of
the `r` rows of a snapshot in progress, those whose keys changed since are omitted: they may come
after later changes, which the mirror already has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import structlog
from pyspark.errors import AnalysisException
from pyspark.sql import functions as f

from ingestd.lake.fold.outcomes import DELETED, fold_row_by_row
from ingestd.lake.fold.vectorized import fold_to_outcomes
from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from spark_jobs.delta_log.statements import literal
from spark_jobs.fold.kept_values import fill_kept
from spark_jobs.fold.spark_sql import (
    Survey,
    fold_in_spark,
    linked_changes,
    snapshot_outcomes_in_spark,
    survey,
    with_keys,
)
from spark_jobs.lake.columns import col, later, named, same_key, selected
from spark_jobs.lake.exchange import from_arrow, to_arrow
from spark_jobs.lake.missing_values import with_missing
from spark_jobs.lake.variants import as_texts, kept_texts_in, log_kept_texts, with_variants
from spark_jobs.mirrors.keyless import apply_keyless, keyless_outcomes
from spark_jobs.mirrors.policy import DEFAULT_POLICY, MirrorPolicy
from spark_jobs.mirrors.table import DELETED_AT, MirrorTable, Outcomes
from spark_jobs.mirrors.update import DriverUpdate, MirrorUpdate

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from ingestd.lake.definitions import LakeColumn
    from spark_jobs.engine.table_mover import TableStep
    from spark_jobs.lake.source_lake import SourceLake

_MAX_NAMED = 2_000
"""The greatest number of keys that are listed in the condition of a MERGE."""


class _RowsMissingError(Exception):
    """The raw table has fewer rows of some epochs than `_epochs` says."""


@dataclass(frozen=True, slots=True)
class MirrorJob:
    """The `spark_jobs.engine.table_mover.TableJob` that keeps mirrors.

    `variant`: jsonb is stored as VARIANT. `mirror_type`: the class that changes a mirror.
    """

    soft_deletes: bool = False
    variant: bool = False
    name: str = "mirror"
    policy: MirrorPolicy = DEFAULT_POLICY
    mirror_type: type[MirrorTable] = MirrorTable

    def advance(self, lake: SourceLake, step: TableStep) -> None:
        """See `spark_jobs.engine.table_mover.TableJob`."""
        mirror = self.mirror_type(
            lake.session,
            step.path,
            step.app_id,
            self.soft_deletes,
            lake.accelerator,
            lake.checked,
            self.policy,
            self.variant,
        )
        if self.variant:
            step = replace(step, definition=with_variants(step.definition))
        try:
            _SizedUpdate(lake, step, mirror).run()
        except AnalysisException as error:
            if lake.checked.state(lake.session, lake.raw_path(step.table)) is None:
                raise self._raw_missing(lake, step, "the Delta table does not exist") from error
            raise

    @staticmethod
    def _raw_missing(lake: SourceLake, step: TableStep, what: str) -> TableError:
        return TableError(
            TableId.parse(step.table),
            f"raw table {lake.raw_path(step.table)}: {what}",
            remedy=f"`ingestd snapshot {lake.source} {step.table}` re-reads it, then the"
            " mirror is re-created; if ingestd has stopped the table, do what `ingestd status`"
            " says",
        )


@dataclass(frozen=True, slots=True)
class _SizedUpdate(MirrorUpdate):
    """Applies a step: chooses by its size whether the driver or Spark folds it."""

    @property
    def _driver_step(self) -> DriverUpdate:
        return DriverUpdate(self.lake, self.step, self.mirror)

    def run(self) -> None:
        policy = self.mirror.policy
        if self.step.above == 0:
            if not self._driver_step.create():
                self._create()
            return
        try:
            if not self.key:
                self._advance_keyless()
            elif self.step.rows <= policy.few_rows and self.step.nbytes <= policy.few_bytes:
                self._advance_folded_in_driver()
            elif not self._driver_step.advance():
                self._advance_folded_in_spark()
        except _RowsMissingError as error:
            structlog.get_logger("ingestd").warning(
                "mirror.rebuilding", table=self.step.table, reason=str(error)
            )
            self._create()

    # --- reading ------------------------------------------------------------------------------

    def _changes(self, above: int | None = None, through: int | None = None) -> DataFrame:
        step = self.step
        changes = self.lake.changes(
            step.table,
            above=step.above if above is None else above,
            through=step.through.number if through is None else through,
        )
        return as_texts(changes, self.variants)

    def _survey(self, changes: DataFrame) -> Survey:
        """Return the figures of the step's changes, and log what VARIANT can't hold of them."""
        figures = survey(changes, self.key, self.variants)
        log_kept_texts(self.step.table, figures.kept_texts)
        return figures

    def _without_overtaken(self, changes: DataFrame, read_from: int) -> DataFrame:
        """Leave out the `r` rows whose keys changed later, which the mirror already has."""
        step = self.step
        lost = self.lake.epochs_lacking_rows(step.table, step.above, read_from, found=0)
        if lost:
            raise _RowsMissingError(f"rows of epoch {min(lost)} are missing from the raw table")
        earlier = self._changes(0, self.step.above).where(col("_cdc_lsn") >= read_from)
        figures = survey(earlier, self.key)
        known = fold_in_spark(
            self._shaped(earlier.where("_cdc_op <> 't'")), self.columns, self.key, figures
        )
        lsn, seq = figures.truncated or (-1, 0)
        is_read = col("_cdc_op", "c") == "r"
        is_void = (col("_cdc_lsn") < lsn) | ((col("_cdc_lsn") == lsn) & (col("_cdc_seq") < seq))
        kept = changes.where((col("_cdc_op") != "r") | ~is_void)
        condition = f.expr(f"{same_key(self.key, 'c', 'k')} AND {later('k', 'c')}") & is_read
        return kept.alias("c").join(known.alias("k"), condition, "left_anti")

    def _shaped(self, changes: DataFrame) -> DataFrame:
        """Return rows with all present columns, and the source's values in earlier rows."""
        cdc = [col(name) for name in changes.columns if name.startswith("_cdc_")]
        shaped = with_keys(changes.select(*selected(changes, self.columns), *cdc), self.key)
        return with_missing(shaped, self.added)

    def _ensure_all(self, found: int) -> None:
        if found < self.step.rows:
            raise _RowsMissingError(
                f"{self.step.rows - found} rows of epochs {self.step.above + 1} to"
                f" {self.step.through.number} are missing from the raw table"
            )

    # --- creating -----------------------------------------------------------------------------

    def _create(self) -> None:
        """Create the mirror from the fold of all rows above the newest `t`."""
        every = self._changes(above=0)
        figures = self._survey(every)
        self._ensure_rebuildable(figures)
        rows = self._shaped(every.where("_cdc_op <> 't'"))
        if figures.truncated is not None:
            lsn, seq = figures.truncated
            rows = rows.where(
                (col("_cdc_lsn") > lsn) | ((col("_cdc_lsn") == lsn) & (col("_cdc_seq") > seq))
            )
        is_one_snapshot = figures.others == 0 and figures.read_from == figures.read_to
        if is_one_snapshot:
            outcomes = snapshot_outcomes_in_spark(rows, self.columns)
        elif not self.key:
            above = survey(rows, ()) if figures.truncated is not None else figures
            self.ensure_same_key(above.changed_from)
            outcomes = keyless_outcomes(rows, self.columns, self.added)
        else:
            if figures.truncated is not None:
                figures = survey(rows, self.key)
            outcomes = self._fold_in_spark(rows, figures, None)
        self.mirror.replace(
            self._with_deleted(outcomes), self.columns, self.key, self.step.signature
        )

    def _ensure_rebuildable(self, figures: Survey) -> None:
        """Raise TableError if rows that count are missing from the raw table."""
        if self.step.above == 0 and figures.rows >= self.step.rows:
            return
        through, table = self.step.through.number, self.step.table
        void_below = -1 if figures.truncated is None else figures.truncated[0]
        lost = self.lake.epochs_lacking_rows(table, through, void_below, found=figures.rows)
        if lost:
            raise MirrorJob._raw_missing(  # noqa: SLF001 - the same module
                self.lake, self.step, f"rows of epoch {min(lost)} are missing"
            )

    def _with_deleted(self, outcomes: DataFrame) -> DataFrame:
        """With soft deletes, add the earlier rows that no longer exist."""
        if not self.mirror.soft_deletes:
            return outcomes
        new = outcomes.withColumn(DELETED_AT, f.lit(None).cast("timestamp"))
        if not self.key:
            return outcomes
        if not self.mirror.exists:
            return new
        old = as_texts(self.mirror.rows(), self.variants)
        if not {DELETED_AT, *(k.name for k in self.key)}.issubset(old.columns):
            return new
        living = outcomes.where(~col(DELETED))
        deleted = (
            old.alias("t")
            .join(living.alias("s"), f.expr(same_key(self.key, "t", "s")), "left_anti")
            .withColumn(
                DELETED_AT, f.coalesce(col(DELETED_AT), f.lit(self.step.through.last_commit_ts))
            )
        )
        names = [c for c in old.columns if c in new.columns]
        deleted = deleted.select(*[col(name) for name in names])
        return new.unionByName(deleted, allowMissingColumns=True).withColumn(
            DELETED,
            f.coalesce(col(DELETED), f.lit(False)),  # noqa: FBT003
        )

    # --- moving -------------------------------------------------------------------------------

    def _advance_folded_in_driver(self) -> None:
        """Fold the changes in the driver, then merge them, by Spark if the driver can't."""
        changes = self._driver_step.changes()
        if changes is None:
            changes = to_arrow(self._shaped(self._changes()))
        self._ensure_all(changes.num_rows)
        log_kept_texts(self.step.table, kept_texts_in(changes, self.variants))
        ops = set(pc.unique(changes["_cdc_op"]).to_pylist())
        if "t" in ops:
            self._create()
            return
        lsn = changes["_cdc_lsn"]
        is_read = pc.equal(changes["_cdc_op"], "r")
        self.ensure_same_key(pc.min(pc.filter(lsn, pc.invert(is_read))).as_py())
        if "r" in ops:
            read_from = pc.min(pc.filter(lsn, is_read)).as_py()
            local = from_arrow(self.mirror.session, changes)
            changes = to_arrow(self._without_overtaken(local, read_from))
        self.evolve()
        if changes.num_rows:
            self._merge_local(changes)

    def _merge_local(self, changes: pa.Table) -> None:
        names, key = [c.name for c in self.columns], [k.name for k in self.key]
        folded = fold_to_outcomes(changes, names, key)
        if folded is None:
            self._advance_folded_in_spark()
            return
        outcomes = fill_kept(folded, self.mirror.rows, self.key)
        in_driver = self.in_driver(self.step.above)
        if in_driver is not None and in_driver.apply(outcomes, key, self.step.signature):
            return
        kept = pc.unique(pc.list_flatten(outcomes["_cdc_kept"])).to_pylist()
        self.mirror.apply(
            Outcomes(
                from_arrow(self.mirror.session, outcomes),
                self.columns,
                self.key,
                unsent=kept,
                near=_near(outcomes, self.key[0]),
                nbytes=self.step.nbytes,
            ),
            self.step.signature,
        )

    def _advance_folded_in_spark(self) -> None:
        """Fold and merge the changes by Spark."""
        changes = self._changes()
        figures = self._survey(changes)
        self._ensure_all(figures.rows)
        if figures.truncated is not None:
            self._create()
            return
        self.evolve()
        shaped = self._shaped(changes)
        if figures.read_from is not None:
            shaped = self._without_overtaken(shaped, figures.read_from)
        outcomes = self._fold_in_spark(shaped, figures, self.mirror.rows)
        self.mirror.apply(
            Outcomes(
                outcomes, self.columns, self.key, unsent=figures.unsent, nbytes=self.step.nbytes
            ),
            self.step.signature,
        )

    def _fold_in_spark(
        self, changes: DataFrame, figures: Survey, before: Callable[[], DataFrame] | None
    ) -> DataFrame:
        """Fold by Spark; rows that keep values under an old key are folded in the driver.

        `before` returns the rows before the changes; None if there were none.
        """
        self.ensure_same_key(figures.changed_from)
        outcomes = fold_in_spark(changes, self.columns, self.key, figures)
        if not figures.links:
            return outcomes
        linked, keys = linked_changes(changes, self.key)
        names, key = [c.name for c in self.columns], [k.name for k in self.key]
        folded = fold_row_by_row(linked, names, key)
        local = from_arrow(
            self.mirror.session,
            fill_kept(folded, before or (lambda: outcomes.limit(0)), self.key),
        )
        same = f.expr(same_key(self.key, "s", "k"))
        chosen = local.alias("s").join(f.broadcast(keys.alias("k")), same, "left_semi")
        others = outcomes.alias("s").join(f.broadcast(keys.alias("k")), same, "left_anti")
        return others.unionByName(chosen.select(*[col(n) for n in others.columns]))

    def _advance_keyless(self) -> None:
        """Add and remove copies of rows that are identified by all their values."""
        changes = self._changes()
        figures = self._survey(changes)
        self._ensure_all(figures.rows)
        if figures.truncated is not None:
            self._create()
            return
        self.ensure_same_key(figures.changed_from)
        self.evolve()
        if figures.rows:
            shaped = self._shaped(changes)
            apply_keyless(self.mirror, shaped, self.columns, self.added, self.step)


def _near(outcomes: pa.Table, column: LakeColumn) -> str:
    """Return a condition on one column, as SQL, that all affected mirror rows ("t") meet.

    Spark uses it to prune files, and to filter what it reads.
    """
    if column.delta_type not in _BOUNDED or outcomes[column.name].null_count:
        return "true"
    values = pc.unique(outcomes[column.name])
    name = named(column.name, "t")
    if 0 < len(values) <= _MAX_NAMED:
        return f"{name} IN ({', '.join(map(literal, values.to_pylist()))})"
    bounds = pc.min_max(values).as_py()
    return f"{name} BETWEEN {literal(bounds['min'])} AND {literal(bounds['max'])}"


_BOUNDED = frozenset({"byte", "short", "integer", "long", "date", "string"})
