"""What every connector of a Postgres database gives, however its changes are captured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.model.lake_state import RegisteredTable
from ingestd.model.predicates import Predicate
from ingestd.model.row_limit import row_limit_bytes
from ingestd.model.schema import TableId
from ingestd.ports import Coverage, Metadata, PageSource, ServerDemand, Split, SplitManager
from ingestd.postgres.captured.coverage import coverage_of
from ingestd.postgres.catalog.metadata import DEFAULT_TIMEOUT_S, PostgresMetadata
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.session import connect
from ingestd.postgres.snapshot.ctid_splits import CtidSplits
from ingestd.postgres.snapshot.key_splits import KeySplits
from ingestd.postgres.snapshot.page_source import CopyPageSource


class PostgresConnector(ABC):
    """See `ingestd.ports.Connector`; a kind adds `capture`, `check` and how it looks at tables."""

    def __init__(self, source: str, dsn: str, memory_bytes: int) -> None:
        self._source = source
        self._dsn = dsn
        self._memory_bytes = memory_bytes

    def metadata(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> Metadata:
        """Ask the catalog."""
        return PostgresMetadata(self._dsn, timeout_s=timeout_s)

    async def coverage(
        self, known: Mapping[TableId, RegisteredTable], timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Coverage:
        """Ask the catalog, and hold it against the config."""
        return await coverage_of(self._source, self._dsn, known, self._look, timeout_s=timeout_s)

    @abstractmethod
    async def _look(
        self, connection: AsyncConnection[Any], known: Mapping[TableId, RegisteredTable]
    ) -> Coverage:
        """Say what is captured. Raises psycopg.Error, IngestdError."""

    async def demand(self) -> ServerDemand:
        """Ask the server."""
        try:
            async with await connect(self._dsn, reads_names=True) as connection:
                return await self._demand(connection)
        except psycopg.Error as error:
            raise classify(error, f"source {self._source}, check", self._dsn) from error

    @abstractmethod
    async def _demand(self, connection: AsyncConnection[Any]) -> ServerDemand:
        """Say what a run takes of the server. Raises psycopg.Error."""

    def splits(self, *, resumable: bool = False) -> SplitManager:
        """Cut tables by blocks, which lie together and can be packed; `resumable`: by the key."""
        return KeySplits(self._dsn) if resumable else CtidSplits(self._dsn)

    def page_source(
        self,
        split: Split,
        columns: Sequence[str] | None = None,
        predicates: Sequence[Predicate] = (),
    ) -> PageSource:
        """Read a split by COPY."""
        limit_bytes = row_limit_bytes(self._memory_bytes)
        return CopyPageSource(self._dsn, split, columns, predicates, row_limit_bytes=limit_bytes)

    async def close(self) -> None:  # noqa: B027 - it is what a kind does that shares nothing
        """Nothing is shared: whatever it gave closes itself."""
