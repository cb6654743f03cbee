"""New databases on a shared server, dropped with all that belongs to them."""

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


async def query_server_id(dsn: str) -> str:
    """Return the id by which connections recognize the same server (`refuse_other`)."""
    async with await connect(dsn) as connection:
        return (await inspect_server(connection, dsn)).queried_id


@dataclass(frozen=True)
class Database:
    """A separate database on `server`. Its name is also used for slots and publications."""

    server: PostgresServer
    name: str
    user: str | None = None
    """The user in `dsn`; None for the superuser of the tests."""

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
        """Run each statement in a separate transaction.

        A role that is created with LOGIN gets the server's password, which `dsn` uses.
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
        """Return the first column of the only row."""
        [[value]] = self.rows(query, *values)
        return value

    def slots(self) -> list[str]:
        found = self.rows(
            "SELECT slot_name::text FROM pg_replication_slots WHERE database = %s", self.name
        )
        return [row[0] for row in found]


@contextmanager
def fresh_database(server: PostgresServer, template: str = "template1") -> Iterator[Database]:
    """Create a database; at the end, drop its sessions, its slots and itself."""
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
    """Skip a test of column lists, row filters or schemas of publications before PostgreSQL 15."""
    if database.server.major < 15:
        pytest.skip("PostgreSQL 14 has no column lists, row filters or schemas in publications")
