"""The connector of kind `polling`, and its factory."""

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
from ingestd.postgres.polling.capture import PollingCapture
from ingestd.postgres.polling.discovery import PolledTables
from ingestd.postgres.polling.preflight import preflight
from ingestd.postgres.polling.server import claim_of_polling, inspect_polled_server
from ingestd.postgres.server_capacity import demand_of
from ingestd.postgres.settings import PollingSettings


class PollingConnector(PostgresConnector):
    """A Postgres database captured by ordinary queries."""

    def __init__(self, source: str, settings: PollingSettings, *, memory_bytes: int) -> None:
        super().__init__(source, settings.dsn.get_secret_value(), memory_bytes)
        self._settings = settings

    async def _read_coverage(
        self, connection: AsyncConnection[Any], known: Mapping[TableId, RegisteredTable]
    ) -> Coverage:
        server = await inspect_polled_server(connection)
        found = await PolledTables(self._settings).discover(connection, known)
        return Coverage(found.tables, found.refused, tuple(server.faults()))

    def capture(self, log: ChangeLog | None = None) -> ChangeCapture:
        """Return a capture, which reads the lake's keys from `log`."""
        return PollingCapture(
            self._source, self._settings, memory_bytes=self._memory_bytes, log=log
        )

    async def check(self) -> Sequence[CheckLine]:
        """Return the findings of `preflight`."""
        return await preflight(self._source, self._settings)

    async def _demand(self, connection: AsyncConnection[Any]) -> ServerDemand:
        return await demand_of(connection, claim_of_polling(self._source), {})


class PollingFactory:
    """Kind `polling`: ordinary queries, no replication privilege."""

    name = "polling"
    config_model: type[BaseModel] = PollingSettings

    def create(self, source: str, config: BaseModel, *, memory_bytes: int) -> Connector:
        """Return a connector for this source."""
        if not isinstance(config, PollingSettings):
            msg = f"kind polling can't take {type(config).__name__}"
            raise TypeError(msg)
        return PollingConnector(source, config, memory_bytes=memory_bytes)
