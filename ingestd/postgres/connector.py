"""The common base of Postgres connectors, independent of how changes are captured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.model.lake_state import RegisteredTable
from ingestd.model.predicates import Predicate
from ingestd.model.row_checks import row_limit_bytes
from ingestd.model.schema import TableId
from ingestd.ports import Coverage, Metadata, PageSource, ServerDemand, Split, SplitManager
from ingestd.postgres.captured.coverage import coverage_of
from ingestd.postgres.catalog.metadata import DEFAULT_TIMEOUT_S, PostgresMetadata
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.session import connect
from ingestd.postgres.snapshot.ctid_splits import CtidSplits
from ingestd.postgres.snapshot.external_reader import CopyPageSource
from ingestd.postgres.snapshot.key_splits import KeySplits


class PostgresConnector(ABC):
    """See `ingestd.ports.Connector`. A subclass adds `capture`, `check` and its catalog poll."""

    def __init__(self, source: str, dsn: str, memory_bytes: int) -> None:
        self._source = source
        self._dsn = dsn
        self._memory_bytes = memory_bytes

    def metadata(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> Metadata:
        """Return the metadata from the catalog."""
        return PostgresMetadata(self._dsn, timeout_s=timeout_s)

    async def coverage(
        self, known: Mapping[TableId, RegisteredTable], timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Coverage:
        """Compare the catalog with the config."""
        return await coverage_of(
            self._source, self._dsn, known, self._read_coverage, timeout_s=timeout_s
        )

    @abstractmethod
    async def _read_coverage(
        self, connection: AsyncConnection[Any], known: Mapping[TableId, RegisteredTable]
    ) -> Coverage:
        """Return the tables that are captured. Raises psycopg.Error, IngestdError."""

    async def demand(self) -> ServerDemand:
        """Return the resources that a run needs, and what the server has."""
        try:
            async with await connect(self._dsn, reads_names=True) as connection:
                return await self._demand(connection)
        except psycopg.Error as error:
            raise classify(error, f"source {self._source}, check", self._dsn) from error

    @abstractmethod
    async def _demand(self, connection: AsyncConnection[Any]) -> ServerDemand:
        """Return the server resources that a run needs. Raises psycopg.Error."""

    def splits(self, *, resumable: bool = False) -> SplitManager:
        """Return a split manager: by physical blocks (compact); `resumable`: by key ranges."""
        return KeySplits(self._dsn) if resumable else CtidSplits(self._dsn)

    def page_source(
        self,
        split: Split,
        columns: Sequence[str] | None = None,
        predicates: Sequence[Predicate] = (),
    ) -> PageSource:
        """Return a page source that reads a split by COPY."""
        limit_bytes = row_limit_bytes(self._memory_bytes)
        return CopyPageSource(self._dsn, split, columns, predicates, row_limit_bytes=limit_bytes)

    async def close(self) -> None:  # noqa: B027 - a no-op default
        """Do nothing: no resources are shared, and all returned objects close themselves."""
