"""Which tables are captured as things stand, asked without any of the rights that capture needs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import psycopg

from ingestd.capture.session import classify, connect
from ingestd.capture.settings import WalSettings
from ingestd.capture.wal.discovery import SourceTables
from ingestd.capture.wal.server import inspect_server
from ingestd.errors import TransientError
from ingestd.ports import Coverage
from ingestd.recorded import RegisteredTable
from ingestd.schema import TableId


async def coverage_of(
    source: str,
    settings: WalSettings,
    known: Mapping[TableId, RegisteredTable],
    *,
    timeout_s: float,
) -> Coverage:
    """See `ingestd.ports.Connector.coverage`."""
    where = f"source {source}, coverage"
    dsn = settings.dsn.get_secret_value()
    # Whether rows were rewritten is not asked: that may take a look through a table.
    known = {name: replace(table, storage="") for name, table in known.items()}
    try:
        async with (
            asyncio.timeout(timeout_s),
            await connect(dsn, statement_timeout_s=timeout_s) as connection,
        ):
            server = await inspect_server(connection, dsn)
            found = await SourceTables(settings).discover(connection, server, known)
    except TimeoutError as error:
        raise TransientError(
            f"{where}: no answer within {timeout_s:g} s", reason="timeout"
        ) from error
    except psycopg.Error as error:
        raise classify(error, where, dsn) from error
    return Coverage(found.tables, found.refused, tuple(server.faults()))
