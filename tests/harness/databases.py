"""Fresh databases on a shared server, and nothing left of them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from ingestd.postgres.connection.session import connect
from ingestd.postgres.wal.server import inspect_server
from ingestd.testing.embedded.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from ingestd.testing.embedded.postgres import PostgresServer

Connection = "psycopg.Connection[tuple[Any, ...]]"
_LIMIT_S = 15


async def lineage_of(dsn: str) -> str:
    """What connections to the same server are told by (`refuse_other`)."""
    async with await connect(dsn) as connection:
        return (await inspect_server(connection, dsn)).lineage


@dataclass(frozen=True)
class Database:
    """A database of its own on `server`. Its name also serves for slot and publication names."""

    server: PostgresServer
    name: str
    user: str | None = None
    """Who `dsn` is of; None for the superuser that the tests are."""

    @property
    def dsn(self) -> str:
        dsn = self.server.dsn(self.name)
        return dsn if self.user is None else make_conninfo(dsn, user=self.user)

    @property
    def socket_dsn(self) -> str:
        return self.server.dsn(self.name, socket=True)

    def connect(self, *, autocommit: bool = True) -> psycopg.Connection[tuple[Any, ...]]:
        return self.server.connect(self.name, autocommit=autocommit)

    def execute(self, *statements: str) -> None:
        """Run each statement in a transaction of its own.

        A role that it lets log in has the server's password, as `dsn` expects.
        """
        with self.connect() as connection:
            for statement in statements:
                connection.execute(statement.encode())
        if any(" LOGIN" in statement for statement in statements):
            self.server.share_password()

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self.connect() as connection:
            return connection.execute(query.encode(), values or None).fetchall()

    def value(self, query: str, *values: object) -> Any:
        """The first column of the only row."""
        [[value]] = self.rows(query, *values)
        return value

    def slots(self) -> list[str]:
        found = self.rows(
            "SELECT slot_name::text FROM pg_replication_slots WHERE database = %s", self.name
        )
        return [row[0] for row in found]


@contextmanager
def fresh_database(server: PostgresServer, template: str = "template1") -> Iterator[Database]:
    """Make a database; at the end drop its sessions, slots and itself."""
    database = Database(server, f"t_{uuid4().hex[:12]}")
    name = sql.Identifier(database.name)
    create = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(name, sql.Identifier(template))
    with server.connect() as connection:
        connection.execute(create)
    try:
        yield database
    finally:
        if not server.is_running:
            server.start()  # a test may have killed it
        with server.connect() as connection:
            _drop_slots(connection, database.name)
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(name))


def _drop_slots(connection: psycopg.Connection[tuple[Any, ...]], dbname: str) -> None:
    connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [dbname]
    )

    def gone() -> bool:
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE database = %s AND NOT active",
            [dbname],
        )
        row = connection.execute(
            "SELECT count(*) = 0 FROM pg_replication_slots WHERE database = %s", [dbname]
        ).fetchone()
        return row is not None and bool(row[0])

    await_until(gone, _LIMIT_S, f"the slots of {dbname} to be dropped")


def skip_without_lists(database: Database) -> None:
    """Skip a test of column lists, row filters or schemas in a publication where there are none."""
    if database.server.major < 15:
        pytest.skip("PostgreSQL 14 publishes no columns, rows or schemas by themselves")
