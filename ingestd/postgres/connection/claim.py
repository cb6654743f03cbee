"""The claim on a source as a server session: its holder, and when the server ends it.

States of a holder; only `claimed` may move an LSN::

    free --announce--> claimed --silent for LEASE_S, or its session ended--> lost
                         |  ^                                                 |
                         +--+ a heartbeat every BEAT_S                        +--> a new attempt

A daemon announces itself with an advisory lock whose first half identifies the source and whose
second half is random, then checks for other holders of a lock on the source. So no other session
can take a daemon's lock first, and another holder counts only if its role could run the source. If
two daemons announce at once, at least one sees the other.

The server ends a claim's session that is silent (`idle_session_timeout`), even if the client's
kernel still acknowledges packets: a frozen process, a hung event loop, a half-open connection. The
heartbeat runs on the event loop that delivers changes. A holder that gets no answer for that long
gives up, too.

The holder's other sessions that keep the slot hold a separate lock (`member_lock`). The next holder
ends them, because a walsender would keep the slot until wal_sender_timeout.

Source: PostgreSQL documentation, "Advisory Locks", the view pg_locks, "Client Connection Defaults".
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import AsyncConnection, sql

from ingestd.postgres.connection.claim_names import claim_key
from ingestd.postgres.connection.pinned_settings import pinning

LEASE_S = 10.0
"""The server ends the claim's session if its holder is silent for this long."""
BEAT_S = 2.5
"""The interval of heartbeats."""
GIVES_UP_S = LEASE_S - BEAT_S
"""How long a heartbeat may go unanswered. After that another daemon may get the claim."""
END_WITHIN_S = 3.0
"""How long the last holder's sessions may take to end."""

_LEASE_MS = str(round(LEASE_S * 1000))
LEASE = {
    "idle_session_timeout": _LEASE_MS,
    "idle_in_transaction_session_timeout": _LEASE_MS,
    # A session with an unread result is not idle. On systems without the option the server logs it.
    "tcp_user_timeout": _LEASE_MS,
    "tcp_keepalives_idle": "3",
    "tcp_keepalives_interval": "3",
    "tcp_keepalives_count": "2",
}

# Our role, roles that may act as it (including superusers), and roles that may use slots. A session
# of any other role can't be a daemon of this source.
_PEERS = """
  FROM pg_catalog.pg_locks l
  JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
  JOIN pg_catalog.pg_roles r ON r.oid = a.usesysid
 WHERE l.locktype = 'advisory' AND l.granted AND l.pid <> pg_catalog.pg_backend_pid()
   AND l.database = (SELECT oid FROM pg_catalog.pg_database
                      WHERE datname = pg_catalog.current_database())
   AND (pg_catalog.pg_has_role(r.oid, session_user, 'MEMBER') OR r.rolreplication
        OR EXISTS (SELECT FROM pg_catalog.pg_roles g WHERE g.rolname = 'rds_replication'
                      AND pg_catalog.pg_has_role(r.oid, g.oid, 'MEMBER')))
"""
# The second form is the only one that older versions use.
_HOLDERS = sql.SQL(
    "SELECT DISTINCT l.pid, r.rolname::pg_catalog.text,"
    " coalesce(pg_catalog.host(a.client_addr), ''),"
    " coalesce(a.application_name, '')"
    + _PEERS
    + " AND ((l.objsubid = 2 AND l.classid = {named}::pg_catalog.oid)"
    " OR (l.objsubid = 1 AND l.classid = {high}::pg_catalog.oid"
    " AND l.objid = {low}::pg_catalog.oid))"
)
_ANNOUNCE = sql.SQL(
    "SELECT pg_catalog.pg_try_advisory_lock({name}, {own}), pg_catalog.pg_try_advisory_lock({key})"
    " WHERE NOT EXISTS ({holders})"
)
_MEMBERS = sql.SQL(
    "SELECT DISTINCT l.pid" + _PEERS + " AND l.objsubid = 2 AND l.classid = {}::pg_catalog.oid"
)
_END = "SELECT pg_catalog.pg_terminate_backend(%s, %s)"
_UNLOCK = "SELECT pg_catalog.pg_advisory_unlock_all()"


@dataclass(frozen=True, slots=True)
class ClaimHolder:
    """A session that holds the claim. `address`: empty for a unix socket, or if not visible."""

    pid: int
    role: str
    address: str
    application: str

    def __str__(self) -> str:
        where = f", from {self.address}" if self.address else ""
        name = f", application_name {self.application!r}" if self.application else ""
        return f"pid {self.pid}, role {self.role}{where}{name}"


@dataclass(frozen=True, slots=True)
class ClaimStatus:
    """The other holders of the claim, empty if it is ours; and sessions its last holder left."""

    holders: tuple[ClaimHolder, ...]
    left: tuple[int, ...]


async def take_claim(connection: AsyncConnection[Any], name: str) -> ClaimStatus:
    """Acquire the claim of that name for the session, if it is free. Raises psycopg.Error.

    From then on the session must send something every `LEASE_S`. Takes one round trip, and another
    if the holder releases it just then: the claim is held only if the lock is.
    """
    while True:
        is_announced, found = await _try_claim(connection, name)
        if is_announced and found.holders:
            await release_claim(connection)
        if is_announced or found.holders:
            return found


async def _try_claim(connection: AsyncConnection[Any], name: str) -> tuple[bool, ClaimStatus]:
    """Return whether the session has the claim's lock, and the other holders."""
    holders = _holders(name)
    announce = _ANNOUNCE.format(
        name=_half("claim", name), own=secrets.randbits(31), key=claim_key(name), holders=holders
    )
    members = _MEMBERS.format(_half("session", name) & 0xFFFFFFFF)
    batch = [pinning(LEASE) + sql.SQL("0"), announce, holders, members]
    cursor = await connection.execute(sql.SQL("; ").join(batch))
    results: list[Sequence[Any]] = []
    while True:
        results.append(await cursor.fetchall())
        if not cursor.nextset():
            break
    _, announced, found, left = results
    is_announced = bool(announced) and announced[0][0]
    claimed = ClaimStatus(tuple(ClaimHolder(*row) for row in found), tuple(pid for (pid,) in left))
    return is_announced, claimed


async def claim_holder(connection: AsyncConnection[Any], name: str) -> ClaimHolder | None:
    """Return the holder of the claim of that name; None if it is free. Raises psycopg.Error."""
    row = await (await connection.execute(_holders(name))).fetchone()
    return None if row is None else ClaimHolder(*row)


async def release_claim(connection: AsyncConnection[Any]) -> None:
    """Release the session's claim. Raises psycopg.Error."""
    await connection.execute(_UNLOCK)


async def end_session(connection: AsyncConnection[Any], pid: int) -> None:
    """End a session of the claim's last holder. Raises psycopg.Error."""
    await connection.execute(_END, (pid, round(END_WITHIN_S * 1000)))


def _holders(name: str) -> sql.Composed:
    key = claim_key(name)
    return _HOLDERS.format(
        named=_half("claim", name) & 0xFFFFFFFF, high=(key >> 32) & 0xFFFFFFFF, low=key & 0xFFFFFFFF
    )


def member_lock(name: str) -> sql.Composed:
    """Return the lock that marks a session as belonging to the holder of the claim `name`."""
    lock = sql.SQL("pg_catalog.pg_try_advisory_lock({}, {})")
    return lock.format(_half("session", name), secrets.randbits(31))


def _half(kind: str, name: str) -> int:
    """Return a signed 32-bit number derived from a name."""
    digest = hashlib.sha256(f"ingestd/{kind}/{name}".encode()).digest()
    return int.from_bytes(digest[:4], "big", signed=True)
