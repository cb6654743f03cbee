"""Check that all sources of a config fit on their servers: slots, walsenders, connections.

Sources that fit one at a time may not fit together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from psycopg import AsyncConnection
from psycopg.rows import dict_row

from ingestd.model.check import CheckLine
from ingestd.ports import ServerCapacity, ServerDemand
from ingestd.postgres.check import CheckFindings
from ingestd.postgres.connection.claim import claim_holder
from ingestd.postgres.connection.errors import FREE_A_CONNECTION, FREE_A_SENDER, FREE_A_SLOT

SLOTS = "max_replication_slots"
SENDERS = "max_wal_senders"
CONNECTIONS = "max_connections"
LEAST_CONNECTIONS = 3
"""A source while it streams or polls: its claim, its lag, and the catalog or a reader."""

# Walsenders do not count towards max_connections, but towards the limits of role and database.
# Sessions of other roles are counted by the columns that every role may see.
_ROOM = """
WITH sender AS (SELECT pid FROM pg_catalog.pg_stat_get_wal_senders()),
session AS (
  SELECT a.*, EXISTS (SELECT FROM sender s WHERE s.pid = a.pid) AS is_sender
    FROM pg_catalog.pg_stat_activity a
   WHERE a.datid IS NOT NULL AND a.pid <> pg_catalog.pg_backend_pid())
SELECT (SELECT system_identifier::text FROM pg_catalog.pg_control_system())
         || '/' || extract(epoch FROM pg_catalog.pg_postmaster_start_time())::text AS server,
       current_user::text AS role, pg_catalog.current_database()::text AS database,
       pg_catalog.current_setting('max_replication_slots')::int AS slots,
       (SELECT count(*)::int FROM pg_catalog.pg_replication_slots) AS used_slots,
       pg_catalog.current_setting('max_wal_senders')::int AS senders,
       (SELECT count(*)::int FROM sender) AS used_senders,
       pg_catalog.current_setting('max_connections')::int
         - CASE WHEN r.rolsuper THEN 0 ELSE
             pg_catalog.current_setting('superuser_reserved_connections')::int
             + coalesce(pg_catalog.current_setting('reserved_connections', true)::int, 0)
           END AS connections,
       (SELECT count(*)::int FROM session WHERE NOT is_sender) AS used_connections,
       CASE WHEN r.rolsuper THEN -1 ELSE r.rolconnlimit END AS of_role,
       (SELECT count(*)::int FROM session WHERE usesysid = r.oid) AS used_of_role,
       CASE WHEN r.rolsuper THEN -1 ELSE d.datconnlimit END AS of_database,
       (SELECT count(*)::int FROM session WHERE datid = d.oid) AS used_of_database
  FROM pg_catalog.pg_roles r, pg_catalog.pg_database d
 WHERE r.rolname = current_user AND d.datname = pg_catalog.current_database()
"""


async def demand_of(
    connection: AsyncConnection[Any], claim: str, needed: Mapping[str, int]
) -> ServerDemand:
    """Return the resources a source needs beyond those in use; none if a daemon is running it.

    `needed`: slots and walsenders for a source that is not running. Raises psycopg.Error.
    """
    async with connection.cursor(row_factory=dict_row) as cursor:
        await cursor.execute(_ROOM)
        found = await cursor.fetchone()
    assert found is not None
    holder = await claim_holder(connection, claim)
    room = {
        SLOTS: ServerCapacity(found["slots"], found["used_slots"], FREE_A_SLOT),
        SENDERS: ServerCapacity(found["senders"], found["used_senders"], FREE_A_SENDER),
        CONNECTIONS: ServerCapacity(
            found["connections"], found["used_connections"], FREE_A_CONNECTION
        ),
    }
    sessions = LEAST_CONNECTIONS + needed.get(SENDERS, 0)
    every = {**needed, CONNECTIONS: LEAST_CONNECTIONS}
    for kind in ("role", "database"):
        if found[f"of_{kind}"] >= 0:
            name = f"CONNECTION LIMIT of {kind} {found[kind]}"
            room[name] = ServerCapacity(
                found[f"of_{kind}"], found[f"used_of_{kind}"], FREE_A_CONNECTION
            )
            every[name] = sessions
    claimed_by = None if holder is None else str(holder)
    return ServerDemand(found["server"], claimed_by, {} if holder else every, room)


def room_lines(demands: Mapping[str, ServerDemand]) -> list[CheckLine]:
    """Return the limits that the sources exceed together, by server: one line for each source."""
    found: list[CheckLine] = []
    for server in dict.fromkeys(demand.server for demand in demands.values()):
        there = {name: d for name, d in demands.items() if d.server == server}
        for limit in dict.fromkeys(limit for d in there.values() for limit in d.needed):
            takers = [name for name, d in there.items() if d.needed.get(limit)]
            rooms = [d.room[limit] for d in there.values() if limit in d.room]
            needed = sum(d.needed.get(limit, 0) for d in there.values())
            for name in takers:
                found += _lines(name, limit, takers, needed, min(rooms, key=lambda r: r.free))
    return found


def _lines(
    source: str, limit: str, takers: list[str], needed: int, room: ServerCapacity
) -> list[CheckLine]:
    finding = CheckFindings(source)
    together = f", by sources {', '.join(takers)}" if len(takers) > 1 else ""
    if needed > room.free:
        what = f"{room.used} of {room.total} are in use, and {needed} more needed{together}"
        finding.note(limit, "fail", what, room.remedy)
    elif limit == SLOTS and needed == room.free:
        finding.note(
            limit,
            "warn",
            f"{needed} will be created{together}, the last of {room.total}; if a table is altered "
            "meanwhile or added later, one more is needed for a moment",
            room.remedy,
        )
    return finding.lines
