"""Which column of a polled table can say where to look for changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

from ingestd.postgres.captured.definition import read_catalog
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
    """A table's column that seems to grow with every write; `index`: the SQL of what it lacks."""

    table: TableId
    column: str
    index: str | None


async def proposed_cursors(
    settings: PostgresSettings, tables: Collection[TableId]
) -> Sequence[ProposedCursor]:
    """Return those of these tables that have one, by name and type; an indexed one first.

    One that does not grow costs time and loses nothing (docs/polling.md). Raises what `classify`
    makes of a fault.
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
