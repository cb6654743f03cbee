"""A source that changes, in memory and on a server, and captures of it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, cast

import psycopg
from psycopg import sql

from ingestd.model.errors import TransientError
from ingestd.model.lsn import Lsn
from ingestd.postgres.polling.connector import PollingFactory
from ingestd.postgres.settings import PollingSettings, WalSettings
from ingestd.postgres.wal.connector import WalFactory
from ingestd.testing.fakes.capture import FakeChange, FakeDatabase
from ingestd.testing.fakes.connector import FakeFactory, FakeSettings
from tests.unit.pipeline.fixtures import A, B, table

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from pydantic import BaseModel

    from ingestd.model.schema import Table
    from ingestd.ports import ChangeCapture, Connector, ConnectorFactory
    from ingestd.postgres.polling.capture import PollingCapture
    from tests.harness.databases import Database

LIMIT_S = 20.0
SENDER_TIMEOUT_S = 2
MEMORY_BYTES = 8 << 20
"""Less than a large transaction: it comes in several chunks."""
LARGE_ROWS = 40_000

NEW1 = table("new1")
TABLES = {"a": A, "b": B, "new1": NEW1}


class ChangeWorld(Protocol):
    """Two tables, a and b (id bigint primary key, note text), and one slot where there are slots.

    So `many` rows with notes of 100 characters are read in several chunks.
    """

    many: int

    async def insert(self, *ids: int, table: str = "a", note: str = "") -> None:
        """Insert these in one transaction."""

    async def update(self, *ids: int, note: str) -> None:
        """Change these rows of a in one transaction."""

    async def delete(self, *ids: int) -> None:
        """Delete these rows of a in one transaction."""

    async def rewrite(self) -> None:
        """Put the rows of a into another file, as VACUUM FULL does."""

    def unseen(self, key: int) -> AbstractAsyncContextManager[None]:
        """Insert a row into a whose transaction is in the WAL, and seen by none before the end."""

    async def write_elsewhere(self) -> None:
        """Write WAL that has nothing captured."""

    async def add_table(self) -> None:
        """Make the table new1, like a and b, which the captures' config asks for."""

    async def current(self) -> Lsn:
        """A position up to which captures have to come to have given all that was committed."""

    async def begin(self, capture: ChangeCapture, tables: Sequence[Table]) -> None:
        """Read these tables, if nothing is given of them before."""

    async def rows(self, table: str = "a") -> list[int]: ...

    async def contents(self) -> dict[int, str]:
        """The rows of a: note by id."""

    async def confirmed(self) -> Lsn | None:
        """The slot's position, None without one; or the last position that the capture reported."""

    async def lose_slot(self) -> None: ...

    async def kill_claim(self) -> None:
        """Cut what holds the claim."""

    async def outlast_patience(self) -> None:
        """Wait until the source has waited longer for a reader than it would for a dead one."""

    async def state(self) -> object:
        """Whatever a capture could change in the source."""

    async def leftovers(self) -> Sequence[object]:
        """Connections, claims and temporary things that captures hold."""

    def capture(self) -> ChangeCapture: ...

    def factory(self) -> ConnectorFactory: ...

    def config(self) -> BaseModel: ...

    async def close(self) -> None: ...


async def until(condition: Callable[[], Any]) -> Any:
    """Await a condition, an async function, that the source brings about; return what it gave."""
    async with asyncio.timeout(LIMIT_S):
        while not (found := await condition()):  # noqa: ASYNC110 - servers set no events
            await asyncio.sleep(0.02)
        return found


async def claim(capture: ChangeCapture) -> None:
    """Claim after another's close, which a server takes a moment to notice."""

    async def claimed() -> bool:
        try:
            await capture.claim()
        except TransientError:
            return False
        return True

    await until(claimed)


class FakeChangeWorld:
    many = 200

    def __init__(self) -> None:
        self.database = FakeDatabase([A, B])
        self.database.conditions["id < 10"] = lambda row: cast("int", row["id"]) < 10
        self._connector: Connector = self.factory().create(
            "shop", self.config(), memory_bytes=MEMORY_BYTES
        )

    async def insert(self, *ids: int, table: str = "a", note: str = "") -> None:
        name = TABLES[table].id
        self.database.commit(*(FakeChange(name, "c", {"id": i, "note": note}) for i in ids))
        await asyncio.sleep(0)

    async def update(self, *ids: int, note: str) -> None:
        self.database.commit(*(FakeChange(A.id, "u", {"id": i, "note": note}) for i in ids))
        await asyncio.sleep(0)

    async def delete(self, *ids: int) -> None:
        self.database.commit(*(FakeChange(A.id, "d", {"id": i}) for i in ids))
        await asyncio.sleep(0)

    async def rewrite(self) -> None:
        self.database.rewrite(A.id)

    @asynccontextmanager
    async def unseen(self, key: int) -> AsyncGenerator[None, None]:
        xid = self.database.begin_transaction()
        self.database.write_commit(xid, FakeChange(A.id, "c", {"id": key, "note": ""}))
        yield
        self.database.end_transaction(xid)

    async def write_elsewhere(self) -> None:
        self.database.write_elsewhere(1000)

    async def add_table(self) -> None:
        self.database.tables.append(NEW1)
        await self.write_elsewhere()

    async def current(self) -> Lsn:
        return self.database.current

    async def begin(self, capture: ChangeCapture, tables: Sequence[Table]) -> None:
        """The stream brings everything."""

    async def rows(self, table: str = "a") -> list[int]:
        found: list[Any] = [r["id"] for r in self.database.rows(TABLES[table])]
        return sorted(found)

    async def contents(self) -> dict[int, str]:
        rows: list[Any] = self.database.rows(A)
        return {row["id"]: row["note"] for row in rows}

    async def confirmed(self) -> Lsn | None:
        return self.database.slot

    async def lose_slot(self) -> None:
        self.database.slot = None

    async def kill_claim(self) -> None:
        self.database.holder = None

    async def outlast_patience(self) -> None:
        """Memory is patient."""

    async def state(self) -> object:
        return self.database.slot

    async def leftovers(self) -> Sequence[object]:
        return [self.database.holder] if self.database.holder else []

    def capture(self) -> ChangeCapture:
        return self._connector.capture()

    def factory(self) -> ConnectorFactory:
        return FakeFactory(self.database)

    def config(self) -> BaseModel:
        return FakeSettings(chunk_blocks=16, workers=2)

    async def close(self) -> None:
        await self._connector.close()


class ServerWorld:
    """What is the same on any server, however its changes are found."""

    many = 8_000

    def __init__(self, database: Database, factory: ConnectorFactory) -> None:
        self._database = database
        self._factory = factory
        for name in ("a", "b"):
            database.execute(f"CREATE TABLE {name} (id bigint PRIMARY KEY, note text)")
        database.execute("CREATE TABLE elsewhere (id int)")
        self._connector = self.factory().create("shop", self.config(), memory_bytes=MEMORY_BYTES)
        self._captures: list[ChangeCapture] = []

    async def insert(self, *ids: int, table: str = "a", note: str = "") -> None:
        await self._execute(f"INSERT INTO {table} SELECT unnest(%s::int8[]), %s", list(ids), note)

    async def update(self, *ids: int, note: str) -> None:
        await self._execute("UPDATE a SET note = %s WHERE id = ANY (%s::int8[])", note, list(ids))

    async def delete(self, *ids: int) -> None:
        await self._execute("DELETE FROM a WHERE id = ANY (%s::int8[])", list(ids))

    async def rewrite(self) -> None:
        await self._execute("VACUUM FULL a")

    @asynccontextmanager
    async def unseen(self, key: int) -> AsyncGenerator[None, None]:
        """As while a synchronous standby is away."""
        waits = """SELECT count(*) > 0 FROM pg_stat_activity
                    WHERE wait_event = 'SyncRep' AND datname = current_database()"""

        async def is_waiting() -> bool:
            return bool(await self._value(waits))

        await self._await_standby("nobody")
        writing = asyncio.create_task(self.insert(key))
        try:
            await until(is_waiting)
            yield
        finally:
            await self._await_standby("")
            await writing

    async def _await_standby(self, names: str) -> None:
        async with await self._connect() as connection:
            await connection.execute("SET synchronous_commit = local")
            literal = sql.Literal(names)
            setting = sql.SQL("ALTER SYSTEM SET synchronous_standby_names = {}").format(literal)
            await connection.execute(setting)
            await connection.execute("SELECT pg_reload_conf()")

        async def is_set() -> bool:
            return bool(await self._value("SHOW synchronous_standby_names") == names)

        await until(is_set)

    async def add_table(self) -> None:
        await self._execute("CREATE TABLE new1 (id bigint PRIMARY KEY, note text)")

    async def write_elsewhere(self) -> None:
        await self._execute("INSERT INTO elsewhere SELECT generate_series(1, 1000)")

    async def current(self) -> Lsn:
        return Lsn.parse(await self._value("SELECT pg_current_wal_lsn()::text"))

    async def begin(self, capture: ChangeCapture, tables: Sequence[Table]) -> None:
        """The stream brings everything."""

    async def rows(self, table: str = "a") -> list[int]:
        found: list[int] = await self._value(f"SELECT array_agg(id ORDER BY id) FROM {table}")
        return found or []

    async def contents(self) -> dict[int, str]:
        found = await self._value("SELECT json_object_agg(id, note) FROM a")
        return {int(key): note for key, note in found.items()}

    async def kill_claim(self) -> None:
        query = """SELECT count(pg_terminate_backend(pid)) FROM pg_locks
                    WHERE locktype = 'advisory' AND objsubid = 1 AND database =
                      (SELECT oid FROM pg_database WHERE datname = current_database())"""
        assert await self._value(query) == 1

    async def leftovers(self) -> Sequence[object]:
        query = """SELECT array_agg(application_name || ': ' || query) FROM pg_stat_activity
                    WHERE datname = current_database()
                      AND pg_catalog.starts_with(application_name, 'ingestd')"""
        slots = "SELECT array_agg(slot_name) FROM pg_replication_slots WHERE temporary"
        return [*(await self._value(query) or ()), *(await self._value(slots) or ())]

    def capture(self) -> ChangeCapture:
        made = self._connector.capture()
        self._captures.append(made)
        return made

    def factory(self) -> ConnectorFactory:
        return self._factory

    def config(self) -> BaseModel:
        raise NotImplementedError

    async def close(self) -> None:
        for capture in self._captures:
            await capture.close()
        await self._connector.close()

    async def _execute(self, statement: str, *values: object) -> None:
        async with await self._connect() as connection:
            await connection.execute(statement.encode(), values)

    async def _value(self, query: str, *values: object) -> Any:
        async with await self._connect() as connection:
            with suppress(psycopg.errors.AdminShutdown):  # a test may have cut this one too
                row = await (await connection.execute(query.encode(), values)).fetchone()
        return row[0] if row else None

    async def _connect(self) -> psycopg.AsyncConnection[tuple[Any, ...]]:
        return await psycopg.AsyncConnection.connect(self._database.dsn, autocommit=True)


class WalChangeWorld(ServerWorld):
    def __init__(self, database: Database, *, catches_up: bool) -> None:
        self._slot = database.name
        factory = WalFactory(catch_up_above_bytes=-1) if catches_up else WalFactory()
        super().__init__(database, factory)

    async def confirmed(self) -> Lsn | None:
        query = (
            "SELECT max(confirmed_flush_lsn)::text FROM pg_replication_slots WHERE slot_name = %s"
        )
        text = await self._value(query, self._slot)
        return None if text is None else Lsn.parse(text)

    async def lose_slot(self) -> None:
        await self._execute("SELECT pg_drop_replication_slot(%s)", self._slot)

    async def outlast_patience(self) -> None:
        async def outlasted() -> bool:
            # No stream is open while a backlog is drained: no server times out there.
            query = """SELECT count(*) = 0 FROM pg_stat_replication r JOIN pg_replication_slots s
                          ON s.active_pid = r.pid WHERE s.slot_name = %s
                         AND clock_timestamp() - backend_start <= %s * interval '2.5 s'"""
            return bool(await self._value(query, self._slot, SENDER_TIMEOUT_S))

        await until(outlasted)

    async def state(self) -> object:
        return await self._value(
            """SELECT (SELECT json_agg(json_build_array(slot_name, temporary, confirmed_flush_lsn))
                         FROM pg_replication_slots WHERE database = current_database())::text
                   || (SELECT json_agg(p) FROM pg_publication_tables p)::text"""
        ), await self._value("SELECT count(*) FROM pg_publication")

    def config(self) -> BaseModel:
        options = f" options='-c wal_sender_timeout={SENDER_TIMEOUT_S}s'"
        return WalSettings.model_validate(
            {
                "kind": "wal",
                "dsn": self._database.dsn + options,
                "tables": ["public.a", "public.b", "public.new*"],
                "slot": self._slot,
                "publication": self._slot,
                "discover_interval": "100ms",
                "snapshot_chunk": "256kB",
            }
        )


class PollingChangeWorld(ServerWorld):
    """Table a by its id, b by xmin alone."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, PollingFactory())

    async def current(self) -> Lsn:
        """A poll takes its snapshot, then its position: all in between must have finished.

        And not every poll reads all tables; the next one does.
        """
        for capture in self._captures:
            cast("PollingCapture", capture).polls.poll_now()
        between = """SELECT count(*) = 0 FROM pg_stat_activity
                      WHERE datname = current_database() AND application_name = 'ingestd'
                        AND state <> 'idle' AND query ~ 'pg_current_snapshot|_wal_.*lsn'"""

        async def none_between() -> bool:
            return bool(await self._value(between))

        await until(none_between)
        await self.write_elsewhere()
        return await super().current()

    async def begin(self, capture: ChangeCapture, tables: Sequence[Table]) -> None:
        snapshot = await capture.snapshot(tables)
        assert [item async for item in snapshot.items()]
        await snapshot.close()

    async def confirmed(self) -> Lsn | None:
        return (await self._captures[-1].lag()).confirmed_lsn if self._captures else None

    async def lose_slot(self) -> None:
        """There is none."""

    async def outlast_patience(self) -> None:
        """No client waits for an answer."""

    async def state(self) -> object:
        return await self._value(
            """SELECT (SELECT count(*) FROM pg_class) || '/' || (SELECT count(*) FROM pg_proc)
                   || '/' || (SELECT count(*) FROM pg_publication)
                   || '/' || (SELECT count(*) FROM pg_replication_slots
                               WHERE database = current_database())"""
        )

    def config(self) -> BaseModel:
        return PollingSettings.model_validate(
            {
                "kind": "polling",
                "dsn": self._database.dsn,
                "tables": ["public.a", "public.b", "public.new*"],
                "interval": "50ms",
                "discover_interval": "100ms",
                "snapshot_chunk": "256kB",
                "table": {"public.a": {"cursor": "id"}},
            }
        )
