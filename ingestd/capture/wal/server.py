"""What the server is, and what the role may do there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psycopg import AsyncConnection
from psycopg.rows import class_row

from ingestd.errors import OperatorError

OLDEST_VERSION = 140000
"""PostgreSQL 14: TID range scans for splits, and the pgoutput that is tested."""

# Managed services grant replication by membership of a role instead of the attribute.
_SERVER = """
SELECT current_setting('server_version_num')::int AS version,
       current_setting('server_version') AS version_text,
       current_setting('wal_level') AS wal_level,
       pg_is_in_recovery() AS in_recovery,
       current_database() AS database, current_user::text AS role,
       (SELECT rolsuper OR rolreplication FROM pg_roles WHERE rolname = current_user)
         OR EXISTS (SELECT FROM pg_roles
                     WHERE rolname = 'rds_replication'
                       AND pg_has_role(current_user, oid, 'member')) AS may_replicate,
       has_database_privilege(current_database(), 'CREATE') AS may_create,
       (SELECT system_identifier::text FROM pg_control_system()) AS system_identifier,
       (SELECT timeline_id FROM pg_control_checkpoint()) AS timeline,
       current_setting('max_replication_slots')::int AS max_slots,
       (SELECT count(*)::int FROM pg_replication_slots) AS used_slots,
       current_setting('max_wal_senders')::int AS max_senders,
       (SELECT extract(epoch FROM setting::int * interval '1 ms')::float8 FROM pg_settings
         WHERE name = 'wal_sender_timeout') AS sender_timeout_s
"""


@dataclass(frozen=True, slots=True)
class Server:
    """The server as this role sees it; `sender_timeout_s` 0 means never."""

    version: int
    version_text: str
    wal_level: str
    in_recovery: bool
    database: str
    role: str
    may_replicate: bool
    may_create: bool
    system_identifier: str
    timeline: int
    max_slots: int
    used_slots: int
    max_senders: int
    sender_timeout_s: float

    @property
    def origin(self) -> str:
        """What the lake remembers of the server: LSNs mean the same only there."""
        return f"{self.system_identifier}/{self.timeline}"

    def faults(self) -> list[OperatorError]:
        """Give everything that makes capture impossible here."""
        found = []
        if self.version < OLDEST_VERSION:
            found.append(
                OperatorError(
                    f"PostgreSQL {self.version_text} is too old",
                    remedy="ingestd needs PostgreSQL 14 or newer",
                )
            )
        if self.in_recovery:
            found.append(
                OperatorError(
                    "the server is a standby",
                    remedy="give the dsn of the primary",
                )
            )
        if self.wal_level != "logical":
            found.append(
                OperatorError(
                    f"wal_level is {self.wal_level!r}, logical replication needs 'logical'",
                    remedy="ALTER SYSTEM SET wal_level = 'logical'; then restart the server",
                )
            )
        if not self.may_replicate:
            found.append(
                OperatorError(
                    f"role {self.role!r} has no REPLICATION attribute",
                    remedy=f'ALTER ROLE "{self.role}" REPLICATION;  (as a superuser)',
                )
            )
        return found


async def inspect_server(connection: AsyncConnection[Any]) -> Server:
    """Ask the server what it is."""
    async with connection.cursor(row_factory=class_row(Server)) as cursor:
        await cursor.execute(_SERVER)
        server = await cursor.fetchone()
    assert server is not None
    return server
