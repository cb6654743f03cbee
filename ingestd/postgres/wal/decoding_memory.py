"""How much of transactions a session of the server may keep in memory while it decodes."""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection, sql

DECODING_MEMORY = "256MB"
"""Of the server: with the default 64 MB larger transactions go through its disk.

It is taken only while one is decoded that needs it. Where more is set there, for the role say, that
holds.
"""
_RAISE = sql.SQL(
    "SELECT pg_catalog.set_config(name, {memory}, false) FROM pg_catalog.pg_settings"
    " WHERE name = 'logical_decoding_work_mem'"
    " AND setting::bigint * 1024 < pg_catalog.pg_size_bytes({memory})"
)
"""Completed here: a walsender takes no parameters."""


async def raise_decoding_memory(connection: AsyncConnection[Any]) -> None:
    """Let this session decode with `DECODING_MEMORY` at least. Raises psycopg.Error."""
    await connection.execute(_RAISE.format(memory=sql.Literal(DECODING_MEMORY)))
