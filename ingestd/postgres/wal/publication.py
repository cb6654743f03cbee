"""Making the publication send the captured tables, whether or not this role owns it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.model.errors import OperatorError, TransientError
from ingestd.model.schema import Table, TableId
from ingestd.postgres.catalog.publication import find_publication
from ingestd.postgres.connection.quoting import printed
from ingestd.postgres.connection.server_messages import loggable_message
from ingestd.postgres.connection.session import connect
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.publication_sql import (
    ColumnLists,
    check_publication,
    column_lists,
    create_statement,
    keep_each,
    keep_publication,
    owners_statement,
    partitioned_of,
    refused_by_trigger,
)

LOCK_TIMEOUT_S = 1.0
"""How long a change of all tables waits for one table's lock, before they are changed one by one.

Meanwhile the other tables are locked: not against reads and writes, but against DDL, and reads and
writes then queue behind the DDL."""


async def prepare_publication(
    control: AsyncConnection[Any],
    settings: WalSettings,
    tables: Sequence[Table],
    *,
    is_live: bool,
    where: str,
) -> dict[TableId, psycopg.Error]:
    """Create, alter or check the publication; return the tables that the server refuses, and why.

    They are locked, or dropped, or refused permanently (`publication_sql.kept_out`). `is_live`: the
    stream is running. `where` begins an error's text. Raises psycopg.Error, OperatorError,
    TransientError (``publication_lost``).
    """
    name = settings.publication
    names = [t.id for t in tables]
    lists = column_lists(tables, settings, control.info.server_version)
    found = await find_publication(control, name)
    if found is None and is_live:
        # Re-created, it would be unknown to the WAL that is still to be decoded: `continuity` must
        # see that it is missing.
        raise TransientError(
            f"{where}: publication {name!r} was dropped",
            reason="publication_lost",
        )
    if not settings.manage or not (found is None or found.owned):
        partitioned = await partitioned_of(control, names)
        fault = check_publication(name, found, names, lists, partitioned)
        if fault is not None:
            raise OperatorError(f"{where}: {fault.what}", remedy=fault.remedy)
        return {}
    try:
        # Not on the connection that serves the decoder: waiting for a lock may take a while.
        dsn = settings.dsn.get_secret_value()
        async with await connect(
            dsn, lock_timeout_s=LOCK_TIMEOUT_S, reads_names=True
        ) as connection:
            return await _keep(connection, name, names, lists)
    except psycopg.errors.ReadOnlySqlTransaction as error:
        statement = printed(create_statement(name, names, lists))
        raise OperatorError(
            f"{where}: publication {name!r} does not exist, and a standby can't create it",
            remedy=f"{statement};  -- on the primary",
        ) from error
    except psycopg.errors.InsufficientPrivilege as error:
        statement = await owners_statement(control, name, names, lists)
        raise OperatorError(
            f"{where}: no privilege to create or alter publication {name!r}: "
            f"{loggable_message(error)}",
            remedy=f"{statement}  -- as the tables' owner; then set manage = false",
        ) from error
    except psycopg.Error as error:
        disable = await refused_by_trigger(control, error)
        if disable is None:
            raise
        raise OperatorError(
            f"{where}: an event trigger refuses publication {name!r}: {loggable_message(error)}",
            remedy=disable,
        ) from error


async def _keep(
    connection: AsyncConnection[Any], name: str, names: Sequence[TableId], lists: ColumnLists
) -> dict[TableId, psycopg.Error]:
    """Publish all tables at once, or one by one if the server refuses that for any reason (I8)."""
    try:
        await keep_publication(connection, name, names, lists)
    except psycopg.Error:
        if connection.closed:
            raise
        return await keep_each(connection, name, names, lists)
    return {}
