"""Makes the publication send the captured tables, whether or not this role owns it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.model.errors import OperatorError, TableError, TransientError
from ingestd.model.schema import Table, TableId
from ingestd.postgres.catalog.publication import Publication, find_publication
from ingestd.postgres.catalog.tables import TableRow
from ingestd.postgres.connection.quoting import printed
from ingestd.postgres.connection.server_messages import loggable_message
from ingestd.postgres.connection.session import connect
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.publication.alteration import (
    keep_each,
    keep_publication,
    refused_by_trigger,
    why_refused,
)
from ingestd.postgres.wal.publication.replacement import must_be_replaced, replace_publication
from ingestd.postgres.wal.publication.statements import (
    ColumnLists,
    add_statement,
    column_lists,
    create_statement,
)
from ingestd.postgres.wal.publication.unmanaged import (
    check_publication,
    owners_statement,
    partitioned_of,
)

TRY_AGAIN_S = 60.0
"""How often to retry a table that the server refused to publish; stopped sources wait as long."""
LOCK_TIMEOUT_S = 1.0
"""How long a change of all tables waits for one table's lock, before they are changed one by one.

Meanwhile the other tables are locked: not against reads and writes, but against DDL, and reads and
writes then queue behind the DDL."""


@dataclass(frozen=True, slots=True)
class PublicationChange:
    """The tables that the server refused to publish; whether the publication is a new one."""

    refused: Mapping[TableId, psycopg.Error]
    is_replaced: bool = False


async def prepare_publication(
    control: AsyncConnection[Any],
    settings: WalSettings,
    tables: Sequence[Table],
    *,
    is_live: bool,
    only_these: bool = False,
    where: str,
) -> PublicationChange:
    """Create, alter or check the publication. Return the tables that the server refuses, and why.

    They are locked, or dropped, or refused permanently (`why_refused`). `is_live`: the stream is
    running. `only_these`: no other table may stay in it, even if it is locked. `where` begins an
    error's text. Raises psycopg.Error, OperatorError, TransientError (``publication_lost``).
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
        return PublicationChange({})
    try:
        # Not on the connection that serves the decoder: waiting for a lock may take a while.
        dsn = settings.dsn.get_secret_value()
        async with await connect(
            dsn, lock_timeout_s=LOCK_TIMEOUT_S, reads_names=True
        ) as connection:
            return await _keep(connection, name, names, lists, only_these=only_these)
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
    connection: AsyncConnection[Any],
    name: str,
    names: Sequence[TableId],
    lists: ColumnLists,
    *,
    only_these: bool,
) -> PublicationChange:
    """Publish all tables at once, or one by one if the server refuses that for any reason (I8)."""
    try:
        await keep_publication(connection, name, names, lists)
    except psycopg.Error:
        if connection.closed:
            raise
        if only_these and await must_be_replaced(connection, name, names):
            try:
                refused = await replace_publication(connection, name, names, lists)
                return PublicationChange(refused, is_replaced=True)
            except psycopg.Error:  # also no privilege, or an event trigger: the tables stay in it
                if connection.closed:
                    raise
        return PublicationChange(await keep_each(connection, name, names, lists))
    return PublicationChange({})


def unpublishable(
    settings: WalSettings, row: TableRow, publication: Publication | None
) -> TableError | None:
    """Return why a table that the publication lacks can't be added to it, None if it can."""
    statement = printed(add_statement(settings.publication, [row.id]))
    absent = f"not in publication {settings.publication!r}"
    if not settings.manage:
        if publication is None:  # reported once for all tables: `check_publication`
            return None
        return TableError(row.id, f"{absent}, and manage = false", remedy=f"{statement};")
    if publication is not None and publication.on_standby:
        return TableError(
            row.id,
            f"{absent}, and a standby can't add it",
            remedy=f"{statement};  -- on the primary",
        )
    if publication is None or publication.owned:
        if row.owned:
            return None
        whose = "the table"
    else:
        whose = "the publication"
    return TableError(
        row.id,
        f"{absent}, and only the owner of {whose} can add it",
        remedy=f"{statement};  -- as the owner of both",
    )


class PublicationRefusals:
    """The tables that the server refused to publish; `reasons`: why it still does."""

    def __init__(self, settings: WalSettings) -> None:
        self._settings = settings
        self._suspected: set[TableId] = set()
        self._tried_at_s = 0.0
        self.reasons: dict[TableId, TableError] = {}

    def suspect(self, tables: Iterable[TableId]) -> None:
        """Record that the server refused to publish these: the next discovery finds the reason."""
        self._suspected.update(tables)

    @property
    def are_due(self) -> bool:
        """Return whether to try again to publish tables that the server still refuses."""
        return bool(self.reasons) and time.monotonic() - self._tried_at_s >= TRY_AGAIN_S

    async def try_again(
        self, rows: Iterable[TableRow], describe: Callable[[TableRow], Table]
    ) -> None:
        """Find which of the tables refused earlier the server still refuses to publish."""
        tables = [row for row in rows if row.id in self._suspected]
        self._suspected.clear()
        self.reasons.clear()
        if not tables:
            return
        described = []
        for row in tables:
            with contextlib.suppress(TableError):  # it is refused for that reason
                described.append(describe(row))
        dsn = self._settings.dsn.get_secret_value()
        async with await connect(dsn, reads_names=True) as connection:
            self.reasons = await why_refused(
                connection,
                self._settings.publication,
                [t.id for t in described],
                column_lists(described, self._settings, connection.info.server_version),
            )
        self._suspected.update(self.reasons)
        self._tried_at_s = time.monotonic()
