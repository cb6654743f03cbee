"""The connector of kind `wal`, and its factory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psycopg import AsyncConnection
from pydantic import BaseModel

from ingestd.capture.coverage import coverage_of
from ingestd.capture.key_splits import KeySplits
from ingestd.capture.metadata import DEFAULT_TIMEOUT_S, PostgresMetadata
from ingestd.capture.page_source import CopyPageSource
from ingestd.capture.settings import WalSettings
from ingestd.capture.splits import CtidSplits
from ingestd.capture.wal.capture import WalCapture
from ingestd.capture.wal.catch_up import CATCH_UP_ABOVE_BYTES, CatchUpPolicy
from ingestd.capture.wal.discovery import SourceTables
from ingestd.capture.wal.preflight import preflight
from ingestd.capture.wal.server import inspect_server
from ingestd.checks import CheckLine
from ingestd.ports import (
    ChangeCapture,
    ChangeLog,
    Connector,
    Coverage,
    Metadata,
    PageSource,
    Split,
    SplitManager,
)
from ingestd.predicates import Predicate
from ingestd.recorded import RegisteredTable
from ingestd.schema import TableId


class WalConnector:
    """A Postgres database captured by logical replication."""

    def __init__(
        self, source: str, settings: WalSettings, *, memory_bytes: int, catch_up: CatchUpPolicy
    ) -> None:
        self._source = source
        self._settings = settings
        self._dsn = settings.dsn.get_secret_value()
        self._memory_bytes = memory_bytes
        self._catch_up = catch_up

    def metadata(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> Metadata:
        """Ask the catalog."""
        return PostgresMetadata(self._dsn, timeout_s=timeout_s)

    async def coverage(
        self, known: Mapping[TableId, RegisteredTable], timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Coverage:
        """Ask the catalog, and hold it against the config."""
        return await coverage_of(self._source, self._dsn, known, self._look, timeout_s=timeout_s)

    async def _look(
        self, connection: AsyncConnection[Any], known: Mapping[TableId, RegisteredTable]
    ) -> Coverage:
        server = await inspect_server(connection, self._dsn)
        found = await SourceTables(self._settings).discover(connection, server, known)
        return Coverage(found.tables, found.refused, tuple(server.faults()))

    def capture(self, log: ChangeLog | None = None) -> ChangeCapture:
        """Make a capture, which looks back at nothing."""
        del log
        return WalCapture(
            self._source,
            self._settings,
            memory_bytes=self._memory_bytes,
            catch_up=self._catch_up,
        )

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
        return CopyPageSource(self._dsn, split, columns, predicates)

    async def check(self) -> Sequence[CheckLine]:
        """Look for what would fail."""
        return await preflight(self._source, self._settings)

    async def close(self) -> None:
        """Nothing is shared: whatever it gave closes itself."""


class WalFactory:
    """Kind `wal`: logical replication with pgoutput.

    `catch_up_above_bytes`: with more WAL than this to read, a backlog is drained first.
    """

    name = "wal"
    config_model: type[BaseModel] = WalSettings

    def __init__(self, *, catch_up_above_bytes: int = CATCH_UP_ABOVE_BYTES) -> None:
        self._catch_up_above_bytes = catch_up_above_bytes

    def create(self, source: str, config: BaseModel, *, memory_bytes: int) -> Connector:
        """Make a connector for this source."""
        if not isinstance(config, WalSettings):
            msg = f"kind wal can't take {type(config).__name__}"
            raise TypeError(msg)
        catch_up = CatchUpPolicy(self._catch_up_above_bytes)
        return WalConnector(source, config, memory_bytes=memory_bytes, catch_up=catch_up)
