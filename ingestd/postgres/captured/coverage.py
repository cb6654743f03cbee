"""The tables that are captured now, queried without the privileges that capture needs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.model.errors import TransientError
from ingestd.model.lake_state import RegisteredTable
from ingestd.model.schema import TableId
from ingestd.ports import Coverage
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.session import connect

Known = Mapping[TableId, RegisteredTable]


async def coverage_of(
    source: str,
    dsn: str,
    known: Known,
    poll: Callable[[AsyncConnection[Any], Known], Awaitable[Coverage]],
    *,
    timeout_s: float,
) -> Coverage:
    """Return the coverage, by a kind's `poll` of it; see `ingestd.ports.Connector.coverage`."""
    where = f"source {source}, coverage"
    # Rewrites are not checked: that might scan a table.
    known = {name: replace(table, fingerprint="") for name, table in known.items()}
    try:
        async with (
            asyncio.timeout(timeout_s),
            await connect(dsn, statement_timeout_s=timeout_s, reads_names=True) as connection,
        ):
            return await poll(connection, known)
    except TimeoutError as error:
        raise TransientError(
            f"{where}: no answer within {timeout_s:g} s", reason="timeout"
        ) from error
    except psycopg.Error as error:
        raise classify(error, where, dsn) from error
