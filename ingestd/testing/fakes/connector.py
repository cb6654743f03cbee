"""An in-memory connector and its factory, which make the other fakes available as a kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ingestd.model.check import CheckLine
from ingestd.model.lake_state import RegisteredTable
from ingestd.model.predicates import Predicate
from ingestd.model.schema import TableId
from ingestd.ports import (
    ChangeCapture,
    ChangeLog,
    Connector,
    Coverage,
    Metadata,
    PageSource,
    ServerDemand,
    Split,
    SplitManager,
)
from ingestd.testing.fakes.capture import FakeCapture, FakeDatabase
from ingestd.testing.fakes.snapshot import Reach
from ingestd.testing.fakes.tables import FakeMetadata, FakePageSource, FakeSplitManager, FakeTables


class FakeSettings(BaseModel):
    """`kind = "fake"`. `chunk_blocks`, `workers`: as in `ingestd.testing.fakes.snapshot.Reach`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["fake"] = "fake"
    chunk_blocks: int = 1000
    workers: int = 1


class FakeConnector:
    """One `FakeDatabase` with its `FakeTables`; see `ingestd.ports.Connector`."""

    def __init__(
        self, source: str, settings: FakeSettings, database: FakeDatabase, tables: FakeTables
    ) -> None:
        self._source = source
        self._reach = Reach(settings.chunk_blocks, settings.workers)
        self._database = database
        self._tables = tables
        self._captures: list[FakeCapture] = []

    def metadata(self, timeout_s: float = 10.0) -> Metadata:
        """Return an empty catalog."""
        return FakeMetadata([], timeout_s=timeout_s)

    async def coverage(
        self, known: Mapping[TableId, RegisteredTable], timeout_s: float = 10.0
    ) -> Coverage:
        """Return the database's tables."""
        del known, timeout_s
        return Coverage(tuple(self._database.tables), tuple(self._database.refused))

    def capture(self, log: ChangeLog | None = None) -> ChangeCapture:
        """Return a capture; it ignores the change log."""
        del log
        made = FakeCapture(self._database, reach=self._reach)
        self._captures.append(made)
        return made

    def splits(self, *, resumable: bool = False) -> SplitManager:
        """Return a manager that cuts by numbers of rows, resumable or not."""
        del resumable
        return FakeSplitManager(self._tables)

    def page_source(
        self,
        split: Split,
        columns: Sequence[str] | None = None,
        predicates: Sequence[Predicate] = (),
    ) -> PageSource:
        """Return a reader of a split."""
        return FakePageSource(self._tables, split, columns, predicates)

    async def check(self) -> Sequence[CheckLine]:
        """Report only refused tables as faults."""
        found = [CheckLine(self._source, "connection", "ok", "in memory")]
        for refused in self._database.refused:
            subject, error = f"table {refused.table.id}", refused.error
            found.append(CheckLine(self._source, subject, "fail", error.reason, error.remedy))
        return found

    async def demand(self) -> ServerDemand:
        """Return an empty demand."""
        return ServerDemand("in memory")

    async def close(self) -> None:
        """Close the captures that were created."""
        for capture in self._captures:
            await capture.close()


class FakeFactory:
    """The factory of kind `fake`; all its connectors share the same database."""

    name = "fake"
    config_model: type[BaseModel] = FakeSettings

    def __init__(self, database: FakeDatabase, tables: FakeTables | None = None) -> None:
        self._database = database
        self._tables = tables or FakeTables()

    def create(self, source: str, config: BaseModel, *, memory_bytes: int) -> Connector:
        """Return a connector; it buffers nothing."""
        del memory_bytes
        if not isinstance(config, FakeSettings):
            msg = f"kind fake can't take {type(config).__name__}"
            raise TypeError(msg)
        return FakeConnector(source, config, self._database, self._tables)
