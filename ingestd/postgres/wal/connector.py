"""The connector of kind `wal`, and its factory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from psycopg import AsyncConnection
from pydantic import BaseModel

from ingestd.model.check import CheckLine
from ingestd.model.lake_state import RegisteredTable
from ingestd.model.schema import TableId
from ingestd.ports import ChangeCapture, ChangeLog, Connector, Coverage, ServerDemand
from ingestd.postgres.connector import PostgresConnector
from ingestd.postgres.rewrites.stream_evidence import StreamEvidence
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.capture import WalCapture
from ingestd.postgres.wal.discovery import SourceTables
from ingestd.postgres.wal.drain.drain import DrainPolicy
from ingestd.postgres.wal.preflight import demand_for, preflight
from ingestd.postgres.wal.server import inspect_server
from ingestd.postgres.wal.slots.decode_gap import SlotDecodeGap
from ingestd.postgres.wal.spool import SpoolPolicy


class WalConnector(PostgresConnector):
    """A Postgres database captured by logical replication."""

    def __init__(
        self, source: str, settings: WalSettings, *, memory_bytes: int, drain_policy: DrainPolicy
    ) -> None:
        super().__init__(source, settings.dsn.get_secret_value(), memory_bytes)
        self._settings = settings
        self._drain_policy = drain_policy
        self._spool = SpoolPolicy(settings.open_transaction_spool)
        self._evidence = StreamEvidence()
        self._decode_gap = SlotDecodeGap()

    async def _read_coverage(
        self, connection: AsyncConnection[Any], known: Mapping[TableId, RegisteredTable]
    ) -> Coverage:
        server = await inspect_server(connection, self._dsn)
        found = await SourceTables(self._settings).discover(connection, server, known)
        return Coverage(found.tables, found.refused, tuple(server.faults()))

    def capture(self, log: ChangeLog | None = None) -> ChangeCapture:
        """Return a capture; it uses no log of earlier changes."""
        del log
        return WalCapture(
            self._source,
            self._settings,
            memory_bytes=self._memory_bytes,
            drain_policy=self._drain_policy,
            spool=self._spool,
            evidence=self._evidence,
            decode_gap=self._decode_gap,
        )

    async def check(self) -> Sequence[CheckLine]:
        """Return the findings of `preflight`."""
        return await preflight(self._source, self._settings)

    async def _demand(self, connection: AsyncConnection[Any]) -> ServerDemand:
        return await demand_for(connection, self._settings)


class WalFactory:
    """Kind `wal`: logical replication with pgoutput.

    `catch_up_above_bytes`: overrides the setting `catch_up_above`.
    """

    name = "wal"
    config_model: type[BaseModel] = WalSettings

    def __init__(self, *, catch_up_above_bytes: int | None = None) -> None:
        self._catch_up_above_bytes = catch_up_above_bytes

    def create(self, source: str, config: BaseModel, *, memory_bytes: int) -> Connector:
        """Return a connector for this source."""
        if not isinstance(config, WalSettings):
            msg = f"kind wal can't take {type(config).__name__}"
            raise TypeError(msg)
        above_bytes = self._catch_up_above_bytes
        drain_policy = DrainPolicy(
            config.catch_up_above if above_bytes is None else above_bytes,
            slots=config.catch_up_slots,
            part_bytes=config.catch_up_part,
            messages=config.logs_ddl,
        )
        return WalConnector(source, config, memory_bytes=memory_bytes, drain_policy=drain_policy)
