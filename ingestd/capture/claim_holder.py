"""Which session holds the claim on a source, as the server shows it to any role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psycopg import AsyncConnection
from psycopg.rows import class_row

from ingestd.capture.advisory import claim_key

# A lock on a 64-bit key is shown in two halves, with objsubid 1. Source: PostgreSQL documentation,
# "pg_locks".
_HOLDER = """
SELECT l.pid::int AS pid, a.usename::text AS role, a.application_name AS application,
       a.client_addr::text AS address
  FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
 WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
   AND l.classid = %(high)s::oid AND l.objid = %(low)s::oid
   AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d
                      WHERE d.datname = pg_catalog.current_database())
"""
_HALF = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class ClaimHolder:
    """A session that holds a claim. What this role may not see of it is None."""

    pid: int
    role: str | None
    application: str | None
    address: str | None

    def __str__(self) -> str:
        """Write it for people."""
        named = {"role": self.role, "application": self.application, "address": self.address}
        return ", ".join([f"pid {self.pid}", *(f"{k} {v}" for k, v in named.items() if v)])


async def claim_holder(connection: AsyncConnection[Any], name: str) -> ClaimHolder | None:
    """Return who holds the claim of that name; None if nobody does. Raises psycopg.Error."""
    key = claim_key(name)
    halves = {"high": (key >> 32) & _HALF, "low": key & _HALF}
    async with connection.cursor(row_factory=class_row(ClaimHolder)) as cursor:
        await cursor.execute(_HOLDER, halves)
        return await cursor.fetchone()
