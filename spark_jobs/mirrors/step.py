"""One step of one mirror: what every way of making it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from spark_jobs.mirrors.table import DELETED_AT, MirrorTable

if TYPE_CHECKING:
    from spark_jobs.engine.table_mover import Step
    from spark_jobs.lake.source_lake import SourceLake
    from spark_jobs.lake.tables import LakeColumn


@dataclass(frozen=True, slots=True)
class MirrorStep:
    """One step of one table, which is read from `lake` and put into `mirror`."""

    lake: SourceLake
    step: Step
    mirror: MirrorTable

    @property
    def columns(self) -> Sequence[LakeColumn]:
        """The source's columns."""
        return self.step.definition.columns

    @property
    def key(self) -> Sequence[LakeColumn]:
        """Those of the key, empty without one."""
        names = self.step.definition.key
        return [c for c in self.columns if c.name in names]

    @property
    def added(self) -> Sequence[LakeColumn]:
        """The columns that some rows were written before."""
        return [c for c in self.columns if c.since_lsn]

    def ensure_same_kind(self) -> None:
        """Raise TableError if the mirror is not one that this step can go on with."""
        there = self.mirror.columns()
        if not {k.name for k in self.key}.issubset(there):
            raise self.fault(
                "its key has another type now, in a column of its own",
                f"`ingestd snapshot {self.lake.source} {self.step.table}`; the mirror is then made"
                " of that",
            )
        marks = DELETED_AT in there
        if marks != (self.mirror.soft_deletes and bool(self.key)):
            made = "with" if marks else "without"
            raise self.fault(
                f"{self.step.path} was made {made} --soft-deletes",
                f"--rebuild {self.step.table} makes it anew; or go on {made} it",
            )

    def fault(self, what: str, remedy: str) -> TableError:
        """Return what stops this table."""
        return TableError(TableId.parse(self.step.table), what, remedy=remedy)

    def ensure_same_key(self, changed_from: int | None) -> None:
        """Raise TableError if some of the changes may name their rows by another key."""
        since = self.step.definition.key_since_lsn
        if changed_from is not None and changed_from < since:
            raise self.fault(
                f"its replica identity changed at {since}, and earlier changes name rows by the"
                " other one",
                f"`ingestd snapshot {self.lake.source} {self.step.table}`; the mirror is then made"
                " of that",
            )

    def evolve(self) -> None:
        """Bring the mirror's columns to what they are now. Raises as `ensure_same_kind`."""
        self.ensure_same_kind()
        if self.step.schema_version == self.step.definition.schema_version:
            return
        # Signed as not there yet: a run that is killed in between is repeated.
        signature = replace(self.step.signature, epoch=self.step.above, schema_version=0)
        self.mirror.evolve(self.columns, signature)
