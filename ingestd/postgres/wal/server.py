"""The server: version, settings, timeline, the privileges of the role, and the end of its WAL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, LiteralString

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import class_row

from ingestd.model.errors import OperatorError, ProtocolError, TransientError
from ingestd.model.lake_state import Notice
from ingestd.model.lsn import ZERO, Lsn
from ingestd.postgres.connection.errors import identifier
from ingestd.postgres.connection.session import connect, parameters_of, stream_name
from ingestd.postgres.connection.wal_position import current_position
from ingestd.postgres.wal.synchronous_standby import synchronous_notices

OLDEST_VERSION = 140000
"""PostgreSQL 14: the first with TID range scans, which splits need, and with a tested pgoutput."""
FIRST_DECODING_STANDBY = 160000
"""Since PostgreSQL 16 a logical slot survives recovery: a standby has its own slots, and they
continue after promotion. A slot whose catalog rows were removed is invalidated, never wrong."""

# The control file has the server's timeline only after the next checkpoint; for a standby, the
# walsender reports it.
_TIMELINE: LiteralString = """
CASE WHEN pg_is_in_recovery() THEN 0
     ELSE ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int END
"""
_QUERIED_ID: LiteralString = f"""
SELECT (SELECT system_identifier::text FROM pg_control_system()) || '/' || {_TIMELINE}
"""  # noqa: S608 - a constant
# Managed services grant replication by membership of a role instead of the attribute.
_SERVER: LiteralString = f"""
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
       {_TIMELINE} AS timeline,
       current_setting('max_replication_slots')::int AS max_slots,
       (SELECT count(*)::int FROM pg_replication_slots) AS used_slots,
       current_setting('max_wal_senders')::int AS max_senders,
       (SELECT extract(epoch FROM setting::int * interval '1 ms')::float8 FROM pg_settings
         WHERE name = 'wal_sender_timeout') AS sender_timeout_s,
       current_setting('hot_standby_feedback')::bool AS feedback,
       current_setting('synchronous_standby_names') AS synchronous_names,
       current_setting('server_encoding') AS encoding
"""  # noqa: S608 - a constant


@dataclass(frozen=True, slots=True)
class WalServer:
    """The server as this role sees it; `sender_timeout_s` 0 means never.

    `in_recovery`: it is a standby. `feedback`: it reports to the primary which old rows it needs.
    `encoding`: of the database.
    """

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
    feedback: bool = True
    synchronous_names: str = ""
    encoding: str = "UTF8"

    @property
    def server_id(self) -> str:
        """The server's identity as the lake records it: LSNs are comparable only within it."""
        return f"{self.system_identifier}/{self.timeline}"

    @property
    def queried_id(self) -> str:
        """The id that any session can query: without a standby's timeline. See `refuse_other`."""
        return f"{self.system_identifier}/{0 if self.in_recovery else self.timeline}"

    def faults(self) -> list[OperatorError]:
        """Return everything that makes capture impossible here."""
        found = []
        if self.version < OLDEST_VERSION:
            found.append(
                OperatorError(
                    f"PostgreSQL {self.version_text} is too old",
                    remedy="ingestd needs PostgreSQL 14 or newer",
                )
            )
        if self.in_recovery and self.version < FIRST_DECODING_STANDBY:
            found.append(
                OperatorError(
                    f"the server is a standby, and PostgreSQL {self.version_text} can't decode WAL "
                    "there",
                    remedy="set the dsn of the primary (since PostgreSQL 16 a standby works, too)",
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
                    remedy=f"ALTER ROLE {identifier(self.role)} REPLICATION;  (as a superuser)",
                )
            )
        return found


def _encoding_notices(encoding: str) -> tuple[Notice, ...]:
    """Return a notice if values are in an encoding that only the server can convert."""
    if encoding != "EUC_TW":
        return ()
    return (
        Notice(
            "source.encoding",
            "the database's encoding is EUC_TW, which only the server can convert: the stream "
            "stops at a value with a character that UTF-8 lacks",
            "correct such a value before it is changed again; or move to a database in UTF-8: "
            "pg_dump -E UTF8 fails at such values",
        ),
    )


def server_notices(server: WalServer, dsn: str) -> tuple[Notice, ...]:
    """Return notices about the server for an operator. No commit waits for a standby's stream."""
    found = _encoding_notices(server.encoding)
    if server.in_recovery:
        return found
    application = stream_name(parameters_of(dsn)["application_name"])
    return (*found, *synchronous_notices(server.synchronous_names, application))


async def inspect_server(connection: AsyncConnection[Any], dsn: str) -> WalServer:
    """Return the server's state; for a standby that decodes WAL, also query its walsender."""
    async with connection.cursor(row_factory=class_row(WalServer)) as cursor:
        await cursor.execute(_SERVER)
        server = await cursor.fetchone()
    assert server is not None
    if server.in_recovery and not server.faults():
        async with await connect(dsn, replication=True) as walsender:
            row = await (await walsender.execute("IDENTIFY_SYSTEM")).fetchone()
        assert row is not None
        return replace(server, timeline=int(row[1]))
    return server


async def query_server_id(connection: AsyncConnection[Any]) -> str:
    """Return the `WalServer.queried_id` of the connected server. Raises psycopg.Error."""
    row = await (await connection.execute(_QUERIED_ID)).fetchone()
    assert row is not None
    return str(row[0])


async def refuse_other(connection: AsyncConnection[Any], queried_id: str) -> None:
    """Raise TransientError if the connection leads to a server with another `queried_id`.

    A DSN may name several servers, or an address that moves to a promoted one. `continuity` must
    judge such a server. Mistaken for the first one, it would lack the changes between the promotion
    and the position to which the first one was read. Raises psycopg.Error.
    """
    found = await query_server_id(connection)
    if found != queried_id:
        raise TransientError(
            "the connection leads to another server than before, or the server was promoted "
            f"(system identifier and timeline {found}, before {queried_id})",
            reason="other_server",
            remedy="nothing to do: the source restarts, and reports missing changes, if any",
        )


async def switch_points(dsn: str, timeline: int) -> dict[int, Lsn]:
    """Return the timelines that this one descends from, and where each of them was left.

    Empty if the server no longer has that history. Source: PostgreSQL documentation, "Streaming
    Replication Protocol", TIMELINE_HISTORY. Raises psycopg.Error.
    """
    async with await connect(dsn, replication=True) as walsender:
        try:
            cursor = await walsender.execute(f"TIMELINE_HISTORY {timeline:d}".encode())
        except psycopg.errors.UndefinedFile:
            return {}
        row = await cursor.fetchone()
    assert row is not None
    return parse_history(_text(row[1]))


def _text(content: bytes | str) -> str:
    """Return a column that the walsender declares as bytea and sends as is."""
    return content.decode() if isinstance(content, bytes) else content


def parse_history(content: str) -> dict[int, Lsn]:
    """Return the switch point of each parent in a timeline history file.

    Each line has a parent, a switch point and a reason. Source: PostgreSQL,
    src/backend/access/transam/timeline.c (readTimeLineHistory).
    """
    found = {}
    for line in content.splitlines():
        fields = line.split("#", 1)[0].split(None, 2)
        if len(fields) > 1:
            found[int(fields[0])] = Lsn.parse(fields[1])
    return found


AskPosition = Callable[[str], Awaitable[Lsn]]
"""Asks the server of a `WalServer.queried_id` for the end of its WAL."""


class ServerPosition:
    """The end of the server's WAL, as far as it is known: changes beyond it are refused.

    A delivered position becomes the lake's and the slot's. A position that the server has not
    reached would make the slot skip everything up to it. So each position of the stream is compared
    with what the server reports on request. A stream sends only flushed WAL, so a later answer is
    never lower: neither on a standby, which decodes what it has replayed, nor after a promotion. If
    another server answers, its id shows that.
    """

    def __init__(self, ask: AskPosition, where: str) -> None:
        self._ask = ask
        self._where = where
        self._known = ZERO

    def mark_uncertain(self) -> None:
        """Forget the known end: from here on it may be another server."""
        self._known = ZERO

    async def query_end(self, queried_id: str) -> Lsn:
        """Return the end as the server reports it now."""
        self._known = max(self._known, await self._ask(queried_id))
        return self._known

    async def ensure_reached(self, position: Lsn, queried_id: str) -> None:
        """Raise ProtocolError if the server has not reached this position of its stream."""
        if position <= self._known:
            return
        await self.query_end(queried_id)
        if position > self._known:
            msg = f"the server sent position {position}, beyond the end of its WAL ({self._known})"
            raise ProtocolError(msg, where=self._where)


async def position_of(connection: AsyncConnection[Any], queried_id: str) -> Lsn:
    """Return the end of the WAL of the server with this `WalServer.queried_id`.

    Raises psycopg.Error; TransientError if the connection leads to another server.
    """
    found = await current_position(connection)
    await refuse_other(connection, queried_id)
    return found
