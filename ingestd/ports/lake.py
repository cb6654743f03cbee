"""The port of a kind of lake: builds everything that ingestd needs of one."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ingestd.config import MaintenanceSettings
    from ingestd.model.catalog_table import CatalogListing
    from ingestd.model.check import CheckLine
    from ingestd.model.schema import TableId
    from ingestd.ports.pause import PauseMark
    from ingestd.ports.reference import ReferenceSink, ReferenceTableSource
    from ingestd.ports.sink import LakeMaintenance, Sink
    from ingestd.ports.verify import VerifiedLake


@dataclass(frozen=True, slots=True)
class StorageWait:
    """A call to the lake's storage that has not returned for this many seconds."""

    path: str
    seconds: float

    def __str__(self) -> str:
        return f"the lake's storage has not answered for {self.seconds:.0f} s: {self.path}"

    @property
    def remedy(self) -> str:
        """What to do."""
        what = "check whether it answers from another host"
        if "://" not in self.path:
            what = f"check whether it answers: timeout 10 stat {shlex.quote(self.path)}"
        return f"{what}; nothing is lost, and ingestd continues as soon as it does"


class LakeFactory(Protocol):
    """The lake of a config, one per process; `ingestd.app.lakes` finds it by `LakeSettings.kind`.

    `memory_bytes`: the source's share of `limits.memory`. What a method builds does no I/O until it
    is used. Only `check`, `last_epochs`, `last_changes`, `catalog_listing` and
    `tables` block.
    """

    def check(self) -> Sequence[CheckLine]:
        """Return whether a run could write here; leaves nothing behind."""
        ...

    async def check_writer(self, source: str, claim: str) -> CheckLine | None:
        """Return a warning if a writer that may still run, with another claim, wrote last."""
        ...

    def place(self, source: str, table: TableId | None = None) -> str:
        """Return where the source, or its table, is. Raise TableError if the table can't be."""
        ...

    def sink(self, source: str, claim: str | None = None, *, memory_bytes: int = 0) -> Sink:
        """Build the source's lake. `claim`: that which the caller holds; None: only to be read.

        Sinks that are built in turn with the same claim are one writer (I5).
        """
        ...

    def reference_table(
        self, source: str, table: TableId, *, is_claimed: bool = True, memory_bytes: int = 0
    ) -> ReferenceSink:
        """Build a table in `_ref`. `is_claimed`: False: only to be read."""
        ...

    def reference_source(
        self, source: str, table: TableId, memory_bytes: int, position: int | None
    ) -> ReferenceTableSource:
        """Build a source of the current rows in the raw table, after `position` if there is one."""
        ...

    def pause_mark(self, source: str) -> PauseMark:
        """Build the pause mark of the source."""
        ...

    def maintenance(
        self, source: str, settings: MaintenanceSettings, references: Collection[TableId]
    ) -> LakeMaintenance:
        """Build the maintenance. `references`: tables in `_ref`, recorded as such or not."""
        ...

    def verified(self, source: str) -> VerifiedLake:
        """Build what `ingestd verify` reads."""
        ...

    def last_epochs(self, source: str, limit: int) -> Sequence[Mapping[str, Any]]:
        """Return the last rows of `_epochs`, newest first. Raise OperatorError, TransientError."""
        ...

    def last_changes(
        self, source: str, table: TableId, limit: int
    ) -> Sequence[Mapping[str, Any]] | None:
        """Return the last rows of the raw table, newest first; None without one.

        Raise TableError, OperatorError, TransientError.
        """
        ...

    def tables(self, source: str) -> Sequence[TableId]:
        """Return the tables that have a raw table."""
        ...

    def catalog_listing(self, source: str) -> CatalogListing:
        """Return what a catalog should have of the source's tables.

        Raise OperatorError, TransientError.
        """
        ...

    def waiting(self, source: str, patience_s: float | None = None) -> StorageWait | None:
        """Return the oldest call to the storage without an answer for `patience_s`, if any.

        None: the usual patience. Callable from any thread.
        """
        ...

    def forget(self, source: str) -> None:
        """Forget the source's writer and calls: it was removed from the config."""
        ...
