"""A kind of lake in memory, which makes the other fakes available to the registry of lakes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any, ClassVar

from ingestd.config import LakeSettings, MaintenanceSettings
from ingestd.model.catalog_table import CatalogListing
from ingestd.model.check import CheckLine
from ingestd.model.schema import TableId
from ingestd.ports import (
    MaintainedTable,
    PauseMark,
    ReferenceSink,
    ReferenceTableSource,
    Sink,
    StorageWait,
)
from ingestd.ports.verify import VerifiedLake
from ingestd.testing.fakes.pause import FakePauseMark
from ingestd.testing.fakes.reference import FakeReferenceLake, FakeReferenceSink
from ingestd.testing.fakes.sink import MemoryDisk, MemoryLake


class MemoryLakeSettings(LakeSettings):
    """`[lake]` of a lake in memory."""

    kind: ClassVar[str] = "memory"


class NoMaintenance:
    """ports.LakeMaintenance where nothing needs any."""

    async def run(
        self, *, joins: bool, cleans: bool, only: Collection[str] | None = None
    ) -> AsyncGenerator[MaintainedTable, None]:
        """Yield nothing."""
        del joins, cleans, only
        nothing: Sequence[MaintainedTable] = ()
        for table in nothing:
            yield table


class MemoryLakeFactory:
    """See `ingestd.ports.LakeFactory`. Its content lives as long as it does, by source.

    It folds nothing: there is no source for reference tables and no verification.
    """

    def __init__(self) -> None:
        self.disks: defaultdict[str, MemoryDisk] = defaultdict(MemoryDisk)
        self.marks: defaultdict[str, FakePauseMark] = defaultdict(FakePauseMark)
        self.references: defaultdict[tuple[str, TableId], FakeReferenceLake] = defaultdict(
            FakeReferenceLake
        )

    def check(self) -> Sequence[CheckLine]:
        """Find no fault."""
        return [CheckLine("", "lake", "ok", "in memory")]

    async def check_writer(self, source: str, claim: str) -> CheckLine | None:
        """Find no other writer: there is no other process."""
        del source, claim
        return None

    def place(self, source: str, table: TableId | None = None) -> str:
        """Return the names."""
        return source if table is None else f"{source}/{table}"

    def sink(self, source: str, claim: str | None = None, *, memory_bytes: int = 0) -> Sink:
        """Build a sink on the source's disk."""
        del claim, memory_bytes
        return MemoryLake(self.disks[source])

    def reference_table(
        self, source: str, table: TableId, *, is_claimed: bool = True, memory_bytes: int = 0
    ) -> ReferenceSink:
        """Build a table of current rows."""
        del is_claimed, memory_bytes
        return FakeReferenceSink(self.references[source, table])

    def reference_source(
        self, source: str, table: TableId, memory_bytes: int, position: int | None
    ) -> ReferenceTableSource:
        """Raise NotImplementedError: references are copied from the source only."""
        msg = "the lake in memory builds no reference table from raw rows"
        raise NotImplementedError(msg)

    def pause_mark(self, source: str) -> PauseMark:
        """Return the source's pause mark."""
        return self.marks[source]

    def maintenance(
        self, source: str, settings: MaintenanceSettings, references: Collection[TableId]
    ) -> NoMaintenance:
        """Build one that does nothing."""
        del source, settings, references
        return NoMaintenance()

    def verified(self, source: str) -> VerifiedLake:
        """Raise NotImplementedError: a test compares the disk itself."""
        msg = "the lake in memory can't be verified"
        raise NotImplementedError(msg)

    def last_epochs(self, source: str, limit: int) -> Sequence[Mapping[str, Any]]:
        """Return numbers and positions."""
        found = reversed(self.disks[source].epochs[-limit:])
        return [
            {
                "epoch": e.epoch,
                "first_lsn": e.summary.first_lsn,
                "end_lsn": e.summary.end_lsn,
                "committed_at": e.committed_at,
            }
            for e in found
        ]

    def last_changes(
        self, source: str, table: TableId, limit: int
    ) -> Sequence[Mapping[str, Any]] | None:
        """Sort the rows."""
        held = self.disks[source].tables.get(table)
        if held is None:
            return None
        order = [("_cdc_lsn", "descending"), ("_cdc_seq", "descending")]
        rows: list[dict[str, Any]] = held.rows().sort_by(order).slice(0, limit).to_pylist()
        return rows

    def tables(self, source: str) -> Sequence[TableId]:
        """Return the tables on the disk."""
        return list(self.disks[source].tables)

    def catalog_listing(self, source: str) -> CatalogListing:
        """Return nothing: no catalog can name a table in memory."""
        del source
        return CatalogListing()

    def waiting(self, source: str, patience_s: float | None = None) -> StorageWait | None:
        """Return None: memory answers."""
        del source, patience_s
        return None

    def forget(self, source: str) -> None:
        """Keep everything."""
        del source
