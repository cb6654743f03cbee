"""The state of a polled server, as far as a role without special privileges can see it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import AsyncConnection
from psycopg.rows import class_row

from ingestd.model.errors import OperatorError
from ingestd.postgres.connection.answer_size import LimitedConnection
from ingestd.postgres.connection.pooler import pooled, shares_sessions
from ingestd.postgres.connection.session import parameters_of

POLLING = "polling"
OLDEST_VERSION = 140000
"""PostgreSQL 14: the first with TID range scans, which splits need, and the oldest tested."""

# A standby's control file has the timeline that it has replayed, as of its last restart point or
# flush. The walsender has it at once, but needs the REPLICATION privilege. Neither ever decreases.
_SERVER = """
SELECT current_setting('server_version_num')::int AS version,
       current_setting('server_version') AS version_text,
       pg_is_in_recovery() AS in_recovery,
       current_database()::text AS database, current_user::text AS role,
       (SELECT system_identifier::text FROM pg_control_system()) AS system_identifier,
       CASE WHEN pg_is_in_recovery()
            THEN greatest((SELECT timeline_id FROM pg_control_checkpoint()),
                          (SELECT min_recovery_end_timeline FROM pg_control_recovery()),
                          (SELECT received_tli FROM pg_stat_wal_receiver))
            ELSE ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int
        END AS timeline,
       current_setting('hot_standby_feedback')::bool AS feedback,
       current_setting('max_standby_streaming_delay') AS streaming_delay,
       clock_timestamp() AS clock
"""


def claim_of_polling(source: str) -> str:
    """Return the name of the claim on a polled source."""
    return f"polling/{source}"


@dataclass(frozen=True, slots=True)
class PolledServer:
    """The server as this role sees it.

    `in_recovery`: it is a standby. `feedback`: it reports to the primary which old rows it needs.
    `streaming_delay`: how long its replay waits for queries, as text. `clock`: its time (aware).
    """

    version: int
    version_text: str
    in_recovery: bool
    database: str
    role: str
    system_identifier: str
    timeline: int
    feedback: bool
    streaming_delay: str
    clock: datetime

    @property
    def server_id(self) -> str:
        """The server's identity as the lake records it: LSNs are comparable only within it.

        It includes the kind of capture: another kind relies on what it kept in the source, and
        knows nothing of polls.
        """
        return f"{self.system_identifier}/{self.timeline}/{POLLING}"

    def faults(self) -> list[OperatorError]:
        """Return everything that makes capture impossible here."""
        if self.version >= OLDEST_VERSION:
            return []
        return [
            OperatorError(
                f"PostgreSQL {self.version_text} is too old",
                remedy="ingestd needs PostgreSQL 14 or newer",
            )
        ]


async def inspect_polled_server(connection: AsyncConnection[Any]) -> PolledServer:
    """Return the server's state. Raises psycopg.Error."""
    async with connection.cursor(row_factory=class_row(PolledServer)) as cursor:
        await cursor.execute(_SERVER)
        server = await cursor.fetchone()
    assert server is not None
    return server


async def detect_transaction_pooler(dsn: str) -> None:
    """Raise OperatorError if a pooler shares server sessions between clients.

    Changes no setting. Raises psycopg.Error.
    """
    parameters = {**parameters_of(dsn), "options": ""}
    parameters.pop("replication", None)
    first = await LimitedConnection.connect(**parameters, autocommit=True, prepare_threshold=None)
    try:
        if await shares_sessions(first, parameters):
            raise pooled()
    finally:
        await first.close()
