"""Proposals of cursor columns for polled tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from ingestd.postgres.captured.catalog import read_catalog
from ingestd.postgres.catalog.tables import qualified
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.quoting import printed
from ingestd.postgres.polling.cursors import is_indexed, likely_cursors

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ingestd.model.schema import TableId
    from ingestd.postgres.settings import PostgresSettings


@dataclass(frozen=True, slots=True)
class ProposedCursor:
    """A column that seems to increase with every write; `index`: SQL to create a missing index."""

    table: TableId
    column: str
    index: str | None


async def proposed_cursors(
    settings: PostgresSettings, tables: Collection[TableId]
) -> Sequence[ProposedCursor]:
    """Return a cursor for each table with a likely column, by name and type; indexed ones first.

    A wrong cursor costs time but loses nothing (docs/polling.md). Raises the errors of `classify`.
    """
    try:
        catalog = await read_catalog(settings)
    except psycopg.Error as error:
        raise classify(error, "catalog", settings.dsn.get_secret_value()) from error
    found = []
    for row in catalog.rows:
        indexes = catalog.indexes.get(row.oid, ())
        likely = likely_cursors(catalog.columns.get(row.oid, ()))
        if row.id not in tables or not likely:
            continue
        column = next((c for c in likely if is_indexed(indexes, c.number)), None)
        lacking = None
        if column is None:
            column = likely[0]
            name = printed(sql.Identifier(column.name))
            lacking = f"CREATE INDEX ON {qualified(row.id)} ({name});"
        found.append(ProposedCursor(row.id, column.name, lacking))
    return found
