"""The memory in which a server session may buffer transactions while it decodes."""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection, sql

DECODING_MEMORY = "256MB"
"""Memory of the server: with the default of 64 MB larger transactions spill to its disk.

It is used only while a transaction that needs it is decoded. A larger value that is already set,
for the role say, is kept.
"""
_RAISE = sql.SQL(
    "SELECT pg_catalog.set_config(name, {memory}, false) FROM pg_catalog.pg_settings"
    " WHERE name = 'logical_decoding_work_mem'"
    " AND setting::bigint * 1024 < pg_catalog.pg_size_bytes({memory})"
)
"""Formatted on the client: a walsender takes no parameters."""


async def raise_decoding_memory(
    connection: AsyncConnection[Any], memory: str = DECODING_MEMORY
) -> None:
    """Let this session decode with at least so much memory. Raises psycopg.Error."""
    await connection.execute(_RAISE.format(memory=sql.Literal(memory)))
