"""SQL for a role with the least privileges that ingestd needs.

Equivalent to `deploy/role.sql`, but written for one source without psql's variables, so any client
can run it. `tests/integration/test_cli_init.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, LiteralString

import psycopg
from psycopg import AsyncConnection, sql

from ingestd.model.schema import TableId
from ingestd.postgres.catalog.publication import find_publication, published
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.quoting import printed
from ingestd.postgres.connection.session import connect
from ingestd.postgres.settings import PostgresSettings, WalSettings
from ingestd.postgres.wal.publication.statements import add_statement, create_statement
from ingestd.postgres.wal.slots.slot import PLUGIN

_FOR_CLIENTS = "NOSUPERUSER NOCREATEDB NOCREATEROLE NOBYPASSRLS"


async def least_privilege(
    settings: PostgresSettings, role: str, tables: Sequence[TableId], where: str
) -> list[str]:
    """Return the statements, in order, that let `role` capture these tables of a source.

    For a source of kind `wal` they also create publication and slot, for `manage = false`. Existing
    objects are skipped. Raises the error that `classify` returns; `where` begins its text.
    """
    dsn = settings.dsn.get_secret_value()
    try:
        async with await connect(dsn, reads_names=True) as connection:
            return await _statements(connection, settings, role, tables)
    except psycopg.Error as error:
        raise classify(error, where, dsn) from error


async def _statements(
    connection: AsyncConnection[Any],
    settings: PostgresSettings,
    role: str,
    tables: Sequence[TableId],
) -> list[str]:
    named, streams = sql.Identifier(role), isinstance(settings, WalSettings)
    attributes = sql.SQL("LOGIN REPLICATION " if streams else "LOGIN ") + sql.SQL(_FOR_CLIENTS)
    if not await _is_there(connection, "SELECT FROM pg_roles WHERE rolname = %s", role):
        found = [sql.SQL("CREATE ROLE {} {}").format(named, attributes)]
    else:
        found = [sql.SQL("ALTER ROLE {} REPLICATION").format(named)] if streams else []
    database = sql.Identifier(connection.info.dbname)
    found.append(sql.SQL("GRANT CONNECT ON DATABASE {} TO {}").format(database, named))
    schemas = [sql.Identifier(name) for name in sorted({t.schema for t in tables})]
    if tables:
        listed = sql.SQL(", ").join(schemas)
        found.append(sql.SQL("GRANT USAGE ON SCHEMA {} TO {}").format(listed, named))
        listed = sql.SQL(", ").join(sql.Identifier(t.schema, t.name) for t in sorted(tables))
        found.append(sql.SQL("GRANT SELECT ON TABLE {} TO {}").format(listed, named))
    if isinstance(settings, WalSettings):
        found += await _capturing(connection, settings, tables)
    return [printed(statement) + ";" for statement in found]


async def _capturing(
    connection: AsyncConnection[Any], settings: WalSettings, tables: Sequence[TableId]
) -> list[sql.Composed]:
    """Return the statements that create publication and slot."""
    name, found = settings.publication, []
    if await find_publication(connection, name) is None:
        found.append(create_statement(name, tables))
    else:
        sent = await published(connection, name, connection.info.server_version)
        if missing := set(tables) - sent.keys():
            found.append(add_statement(name, missing))
    query = "SELECT FROM pg_replication_slots WHERE slot_name = %s"
    if not await _is_there(connection, query, settings.slot):
        make = sql.SQL("SELECT pg_catalog.pg_create_logical_replication_slot({}, {})")
        found.append(make.format(settings.slot, PLUGIN))
    return found


async def _is_there(connection: AsyncConnection[Any], query: LiteralString, name: str) -> bool:
    cursor = await connection.execute(query, (name,))
    return await cursor.fetchone() is not None
