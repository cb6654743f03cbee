"""A step of one mirror in the driver, without Spark jobs except for borrowed values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DataType

from spark_jobs.fold.arrow import above_truncate, fold, unfolded
from spark_jobs.fold.arrow_merge import shaped
from spark_jobs.fold.carried_values import borrow
from spark_jobs.lake.raw_files import has_unsent, read_newest
from spark_jobs.mirrors.step import MirrorStep


@dataclass(frozen=True, slots=True)
class DriverStep(MirrorStep):
    """A step in the driver. Its methods return False or None if Spark must do the work."""

    def make(self) -> bool:
        """Create a mirror that does not exist yet."""
        return self._within_limits(self._make)

    def advance(self) -> bool:
        """Move a mirror by changes only, without `t` or `r` rows."""
        return self._within_limits(self._advance_by_rows)

    def newest(self) -> pa.Table | None:
        """Return the raw rows of the step, with the present columns."""
        step = self.step
        read = read_newest(
            self.lake, step.table, above=step.above, through=step.through.number, rows=step.rows
        )
        if read is None or has_unsent(read, [k.name for k in self.key]):
            return None
        since = max((c.since_lsn or 0 for c in self.added), default=0)
        if read.num_rows and pc.min(read["_cdc_lsn"]).as_py() < since:
            return None  # they need the source's value of a later column
        kinds = [(c.name, DataType.fromDDL(c.delta_type)) for c in self.columns]
        own = [pa.field(name, to_arrow_type(kind, timezone="UTC")) for name, kind in kinds]
        cdc = [field for field in read.schema if field.name.startswith("_cdc_")]
        try:
            return shaped(read, pa.schema([*own, *cdc]))
        except pa.ArrowException:
            return None

    def _within_limits(self, way: Callable[[], bool]) -> bool:
        """Run `way`, for large steps one at a time; return False if the driver can't."""
        policy = self.mirror.policy
        if self.step.rows > policy.driver_rows or self.step.nbytes > policy.driver_bytes:
            return False
        with self.mirror.files.room_for(self.step.nbytes):
            return way()

    def _make(self) -> bool:
        in_driver = self.mirror.in_driver(0)
        if in_driver is None or self.mirror.is_there:
            return False
        changes = self.newest()
        outcomes = None if changes is None else self._made_of(above_truncate(changes))
        if outcomes is None or not self.mirror.create(self.columns, self.key, self.step.signature):
            return False
        return in_driver.apply(outcomes, [k.name for k in self.key], self.step.signature)

    def _made_of(self, changes: pa.Table) -> pa.Table | None:
        """Return the outcomes of changes to an empty table."""
        names = [c.name for c in self.columns]
        is_read = pc.equal(changes["_cdc_op"], "r")
        if pc.all(is_read).as_py() and pc.count_distinct(changes["_cdc_lsn"]).as_py() <= 1:
            return unfolded(changes, names)
        folded = fold(changes, names, [k.name for k in self.key]) if self.key else None
        if folded is None or folded.borrowed:
            return None
        changed_from = pc.min(pc.filter(changes["_cdc_lsn"], pc.invert(is_read))).as_py()
        self.ensure_same_key(changed_from)
        return folded.outcomes

    def _advance_by_rows(self) -> bool:
        in_driver = self.mirror.in_driver(self.step.above)
        if in_driver is None or not in_driver.is_likely:
            return False
        changes = self.newest()
        if changes is None or not {"r", "t"}.isdisjoint(pc.unique(changes["_cdc_op"]).to_pylist()):
            return False
        self.ensure_same_key(pc.min(changes["_cdc_lsn"]).as_py())
        key = [k.name for k in self.key]
        folded = fold(changes, [c.name for c in self.columns], key)
        if folded is None:
            return False
        self.evolve()
        outcomes = borrow(folded, self.mirror.rows, self.key)
        return in_driver.apply(outcomes, key, self.step.signature)
