"""Has the publication send the captured tables, whoever it belongs to."""

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
"""How long a change of all tables waits for one's lock, before they are taken one by one.

The others are locked meanwhile: not against reading and writing, but against DDL, behind which
those wait."""


async def prepare_publication(
    control: AsyncConnection[Any],
    settings: WalSettings,
    tables: Sequence[Table],
    *,
    is_live: bool,
    where: str,
) -> dict[TableId, psycopg.Error]:
    """Make, alter or check it; return the tables that the server refuses, and why.

    They are locked, or dropped, or refused for good (`publication.kept_out`). `is_live`: the stream
    runs. `where` begins an error's text. Raises psycopg.Error, OperatorError, TransientError
    (``publication_lost``).
    """
    name = settings.publication
    names = [t.id for t in tables]
    lists = column_lists(tables, settings, control.info.server_version)
    found = await find_publication(control, name)
    if found is None and is_live:
        # Made again it would be unknown to the WAL that is still to be decoded: `continuity`
        # has to see that it is gone.
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
        # Not on the connection that answers the decoder: a lock may take its time.
        dsn = settings.dsn.get_secret_value()
        async with await connect(
            dsn, lock_timeout_s=LOCK_TIMEOUT_S, reads_names=True
        ) as connection:
            return await _keep(connection, name, names, lists)
    except psycopg.errors.ReadOnlySqlTransaction as error:
        statement = printed(create_statement(name, names, lists))
        raise OperatorError(
            f"{where}: publication {name!r} does not exist, and a standby can't make it",
            remedy=f"{statement};  -- on the primary",
        ) from error
    except psycopg.errors.InsufficientPrivilege as error:
        statement = await owners_statement(control, name, names, lists)
        raise OperatorError(
            f"{where}: no right to keep publication {name!r}: {loggable_message(error)}",
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
    """Publish all at once, or one by one where the server refuses that: whatever for (I8)."""
    try:
        await keep_publication(connection, name, names, lists)
    except psycopg.Error:
        if connection.closed:
            raise
        return await keep_each(connection, name, names, lists)
    return {}
