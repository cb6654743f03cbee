"""A step of one mirror: the part that the driver and Spark share."""

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
    """A step of one table, from `lake` into `mirror`."""

    lake: SourceLake
    step: Step
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

    def ensure_same_kind(self) -> None:
        """Raise TableError if this step can't continue the mirror."""
        there = self.mirror.columns()
        if not {k.name for k in self.key}.issubset(there):
            raise self.fault(
                "its key has another type now, in a separate column",
                f"`ingestd snapshot {self.lake.source} {self.step.table}`; the mirror is then made"
                " from it",
            )
        marks = DELETED_AT in there
        if marks != (self.mirror.soft_deletes and bool(self.key)):
            made = "with" if marks else "without"
            raise self.fault(
                f"{self.step.path} was made {made} --soft-deletes",
                f"--rebuild {self.step.table} re-creates it; or continue {made} it",
            )

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
                f"`ingestd snapshot {self.lake.source} {self.step.table}`; the mirror is then made"
                " from it",
            )

    def evolve(self) -> None:
        """Bring the mirror's columns up to date. Raises as `ensure_same_kind`."""
        self.ensure_same_kind()
        if self.step.schema_version == self.step.definition.schema_version:
            return
        # Signed with the earlier epoch: a run that is killed in between is repeated.
        signature = replace(self.step.signature, epoch=self.step.above, schema_version=0)
        self.mirror.evolve(self.columns, signature)
