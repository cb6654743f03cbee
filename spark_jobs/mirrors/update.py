"""Updates one mirror by a step: what the driver and Spark share, and the update in the driver.

The driver runs no Spark job, except to read values kept under an old key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from ingestd.lake.delta.types import arrow_type
from ingestd.lake.fold.vectorized import above_truncate, fold_to_outcomes, snapshot_outcomes
from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from spark_jobs.fold.arrow_merge import shaped
from spark_jobs.fold.kept_values import fill_kept
from spark_jobs.lake.variants import ensure_same_types, variant_names
from spark_jobs.mirrors.table import DELETED_AT, MirrorTable

if TYPE_CHECKING:
    from ingestd.lake.definitions import LakeColumn
    from spark_jobs.delta_log.acceleration import OutcomeMerge
    from spark_jobs.engine.table_mover import TableStep
    from spark_jobs.lake.source_lake import SourceLake


@dataclass(frozen=True, slots=True)
class MirrorUpdate:
    """Updates `mirror` by a step of its table, from `lake`."""

    lake: SourceLake
    step: TableStep
    mirror: MirrorTable

    @property
    def columns(self) -> Sequence[LakeColumn]:
        """The source's columns."""
        return self.step.definition.columns

    @property
    def key(self) -> Sequence[LakeColumn]:
        """The key's columns; empty without a key."""
        names = self.step.definition.key
        return [c for c in self.columns if c.name in names]

    @property
    def added(self) -> Sequence[LakeColumn]:
        """The columns that were added after some rows were written."""
        return [c for c in self.columns if c.since_lsn]

    @property
    def variants(self) -> list[str]:
        """The names of the columns that the mirror has as VARIANT."""
        return variant_names(self.columns)

    def in_driver(self, above: int) -> OutcomeMerge | None:
        """See `MirrorTable.in_driver`. The driver has no VARIANT."""
        return None if self.variants else self.mirror.in_driver(above)

    def ensure_same_kind(self) -> None:
        """Raise TableError if this step can't continue the mirror."""
        there = self.mirror.column_types()
        if not {k.name for k in self.key}.issubset(there):
            raise self.fault(
                "its key has another type now, in a separate column",
                f"`ingestd snapshot {self.lake.source} {self.step.table}`, then the mirror is"
                " re-created",
            )
        marks = DELETED_AT in there
        if marks != (self.mirror.soft_deletes and bool(self.key)):
            made = "with" if marks else "without"
            raise self.fault(
                f"{self.step.path} was made {made} --soft-deletes",
                f"--rebuild {self.step.table} re-creates it; or continue {made} it",
            )
        names, is_wanted = [c.name for c in self.columns], self.mirror.has_variants
        ensure_same_types(self.step.table, there, names, self.variants, is_wanted=is_wanted)

    def fault(self, what: str, remedy: str) -> TableError:
        """Return the error that stops this table."""
        return TableError(TableId.parse(self.step.table), what, remedy=remedy)

    def ensure_same_key(self, changed_from: int | None) -> None:
        """Raise TableError if any of the changes may identify their rows by another key."""
        since = self.step.definition.key_since_lsn
        if changed_from is not None and changed_from < since:
            raise self.fault(
                f"its replica identity changed at {since}, and earlier changes identify rows by the"
                " previous one",
                f"`ingestd snapshot {self.lake.source} {self.step.table}`, then the mirror is"
                " re-created",
            )

    def evolve(self) -> None:
        """Bring the mirror's columns up to date. Raises as `ensure_same_kind`."""
        self.ensure_same_kind()
        if self.step.schema_version == self.step.definition.schema_version:
            return
        # Signed with the earlier epoch: a run that is killed in between is repeated.
        signature = replace(self.step.signature, epoch=self.step.above, schema_version=0)
        self.mirror.evolve(self.columns, signature)


_EPOCH = "_cdc_epoch"


@dataclass(frozen=True, slots=True)
class DriverUpdate(MirrorUpdate):
    """Updates in the driver. Its methods return False or None if Spark must do the work."""

    def create(self) -> bool:
        """Create a mirror that does not exist yet."""
        return self._within_limits(self._create)

    def advance(self) -> bool:
        """Move a mirror by changes only, without `t` or `r` rows."""
        return self._within_limits(self._advance_by_rows)

    def changes(self) -> pa.Table | None:
        """Return the raw rows of the step, with the present columns; None if the driver can't."""
        read = None if self.variants else self._read_rows()
        if read is None or _has_unsent(read, [k.name for k in self.key]):
            return None
        since = max((c.since_lsn or 0 for c in self.added), default=0)
        if read.num_rows and pc.min(read["_cdc_lsn"]).as_py() < since:
            return None  # they need the source's value of a later column
        own = [pa.field(c.name, arrow_type(c.delta_type)) for c in self.columns]
        cdc = [field for field in read.schema if field.name.startswith("_cdc_")]
        try:
            return shaped(read, pa.schema([*own, *cdc]))
        except pa.ArrowException:
            return None

    def _read_rows(self) -> pa.Table | None:
        """Return the raw rows of the step, from the files that the log added last.

        None if more than a few log entries are needed, or if the number of rows is not that of
        `_epochs`: so neither the order of the entries nor a compaction can make the result wrong.
        """
        files = self.lake.accelerator.newest(self.lake.session, self.lake.raw_path(self.step.table))
        through = self.step.through.number
        found = files.rows_above(_EPOCH, self.step.above, through)
        if found is None:
            return None
        found = found.filter(pc.less_equal(found[_EPOCH], through))
        return found if found.num_rows == self.step.rows else None

    def _within_limits(self, attempt: Callable[[], bool]) -> bool:
        """Run `attempt`, for large steps one at a time; return False if the driver can't."""
        policy = self.mirror.policy
        if self.step.rows > policy.driver_rows or self.step.nbytes > policy.driver_bytes:
            return False
        with self.lake.accelerator.room_for(self.step.nbytes):
            return attempt()

    def _create(self) -> bool:
        in_driver = self.in_driver(0)
        if in_driver is None or self.mirror.exists:
            return False
        changes = self.changes()
        outcomes = (
            None if changes is None else self._outcomes_for_empty_mirror(above_truncate(changes))
        )
        if outcomes is None or not self.mirror.create(self.columns, self.key, self.step.signature):
            return False
        return in_driver.apply(outcomes, [k.name for k in self.key], self.step.signature)

    def _outcomes_for_empty_mirror(self, changes: pa.Table) -> pa.Table | None:
        """Return the outcomes of changes to an empty table."""
        names = [c.name for c in self.columns]
        is_read = pc.equal(changes["_cdc_op"], "r")
        if pc.all(is_read).as_py() and pc.count_distinct(changes["_cdc_lsn"]).as_py() <= 1:
            return snapshot_outcomes(changes, names)
        folded = fold_to_outcomes(changes, names, [k.name for k in self.key]) if self.key else None
        if folded is None or folded.kept_under_old_key:
            return None
        changed_from = pc.min(pc.filter(changes["_cdc_lsn"], pc.invert(is_read))).as_py()
        self.ensure_same_key(changed_from)
        return folded.outcomes

    def _advance_by_rows(self) -> bool:
        in_driver = self.in_driver(self.step.above)
        if in_driver is None or not in_driver.is_likely:
            return False
        changes = self.changes()
        if changes is None or not {"r", "t"}.isdisjoint(pc.unique(changes["_cdc_op"]).to_pylist()):
            return False
        self.ensure_same_key(pc.min(changes["_cdc_lsn"]).as_py())
        key = [k.name for k in self.key]
        folded = fold_to_outcomes(changes, [c.name for c in self.columns], key)
        if folded is None:
            return False
        self.evolve()
        outcomes = fill_kept(folded, self.mirror.rows, self.key)
        return in_driver.apply(outcomes, key, self.step.signature)


def _has_unsent(changes: pa.Table, names: Sequence[str]) -> bool:
    """Return whether some change did not send one of these columns."""
    unsent = pc.unique(pc.list_flatten(changes["_cdc_unchanged"]))
    return not set(names).isdisjoint(unsent.to_pylist())
