"""A role that may connect, and nothing else, keeps no daemon from its source (I5)."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from ingestd.model.errors import TransientError
from ingestd.postgres.connection.claim import _half
from ingestd.postgres.connection.claim_names import claim_key
from ingestd.postgres.connection.control_connection import ControlConnection
from tests.harness.config import polling_config, wal_config
from tests.harness.databases import fresh_database
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("user")
LIMIT_S = 60.0
MANY = 50


def signed(number: int, bits: int) -> int:
    return number - (1 << bits) if number >> (bits - 1) else number


def keys_of(name: str) -> Iterator[tuple[int, ...]]:
    """Every key computed from a claim's name, in either form, and many others."""
    key = claim_key(name)
    yield (key,)
    yield signed(key >> 32 & 0xFFFFFFFF, 32), signed(key & 0xFFFFFFFF, 32)
    for kind in ("claim", "session"):
        half = _half(kind, name)
        yield (half,)
        yield from ((half, n) for n in range(-MANY, MANY))
        yield from (((half << 32) + n,) for n in range(MANY))


class Attacker:
    """Sessions of the role in each database, that pretend to be a daemon's."""

    def __init__(self, stack: ExitStack, dsns: list[str]) -> None:
        self.sessions = [
            stack.enter_context(
                closing(
                    psycopg.connect(make_conninfo(dsn, application_name="ingestd"), autocommit=True)
                )
            )
            for dsn in dsns
        ]

    def seen(self) -> set[tuple[int, ...]]:
        """The keys of all locks that are shown to it, of whatever database."""
        rows = self.sessions[0].execute(
            "SELECT classid::int8, objid::int8, objsubid FROM pg_locks"
            " WHERE locktype = 'advisory' AND pid <> pg_backend_pid()"
        )
        return {
            (signed(high << 32 | low, 64),) if kind == 1 else (signed(high, 32), signed(low, 32))
            for high, low, kind in rows
        }

    def take(self, keys: set[tuple[int, ...]]) -> None:
        """Lock all of them everywhere, or as far as they are free, and wait for the rest."""
        for session in self.sessions:
            for function in ("pg_try_advisory_lock", "pg_try_advisory_lock_shared"):
                singles = [key for key in keys if len(key) == 1]
                pairs = [key for key in keys if len(key) == 2]
                session.execute(
                    f"SELECT count({function}(k)) FROM unnest(%s::int8[]) k".encode(),
                    [[key for (key,) in singles]],
                )
                session.execute(
                    f"SELECT count({function}(a, b))"
                    " FROM unnest(%s::int[], %s::int[]) k(a, b)".encode(),
                    [[a for a, _ in pairs], [b for _, b in pairs]],
                )

    def end(self) -> None:
        """Try to end or cancel every session of another role."""
        session = self.sessions[0]
        for function in ("pg_terminate_backend", "pg_cancel_backend"):
            pids = session.execute(
                "SELECT pid FROM pg_stat_activity WHERE usename <> current_user"
            ).fetchall()
            assert pids
            for (pid,) in pids:
                try:
                    done = session.execute(f"SELECT {function}({pid})".encode()).fetchone()
                except psycopg.errors.InsufficientPrivilege:
                    continue
                assert done == (False,)  # it has ended meanwhile


@pytest.fixture
def attacker(database: Database, stranger: str) -> Iterator[Attacker]:
    with fresh_database(database.server) as other, ExitStack() as stack:
        names = (database.name, database.name, other.name, "postgres")
        dsns = [database.server.dsn(name, user=stranger) for name in names]
        yield Attacker(stack, dsns)


@pytest.mark.parametrize("name", ["ingestd_shop", "shop"])
async def test_one_writer_no_lock_of_a_stranger_counts(
    database: Database, attacker: Attacker, name: str
) -> None:
    first, second = (
        ControlConnection("source a", database.dsn),
        ControlConnection("source a", database.dsn),
    )
    try:
        attacker.take(set(keys_of(name)))  # before there is a daemon
        await first.claim(name, taken="taken", remedy="wait")
        attacker.take({*keys_of(name), *attacker.seen()})  # and beside it
        attacker.end()
        await first.health()
        with pytest.raises(TransientError, match=rf"pid .*, role {database.user or 'postgres'}"):
            await second.claim(name, taken="taken", remedy="wait")
        await first.close()
        attacker.take(attacker.seen())
        await second.claim(name, taken="taken", remedy="wait")  # after it
        await second.health()
    finally:
        await first.close()
        await second.close()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["wal", "polling"])
def test_one_writer_starts_whatever_a_stranger_locks(
    database: Database, attacker: Attacker, lake: Path, make_daemon: MakeDaemon, kind: str
) -> None:
    slot = f"ingestd_{database.name}"
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    names = f'slot = "{slot}"\npublication = "{slot}"'
    config = (
        wal_config(lake=lake, dsn=database.dsn, source_extra=names)
        if kind == "wal"
        else polling_config(lake=lake, dsn=database.dsn)
    )
    for name in (slot, "shop"):
        attacker.take(set(keys_of(name)))
    first, second = make_daemon(config, "first"), make_daemon(config, "second")
    first.start_ready()
    attacker.take(attacker.seen())
    attacker.end()
    second.start()

    def reason() -> str:
        status = second.status()
        return "" if status is None else status["sources"]["shop"]["reason"] or ""

    await_until(lambda: "pid " in reason(), LIMIT_S, second.tail)
    for part in ("role postgres", "from 127.0.0.1", "application_name 'ingestd"):
        assert part in reason()
    first.sigkill()
    second.await_ready()
    assert second.sigterm() == 0
