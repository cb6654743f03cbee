"""Dropped or renamed tables of the lake, whose changes the stream may still contain.

The stream lags behind the catalog: by hours after the daemon was down, by moments while it runs.
Changes before a DROP belong to the table's log like any others. The RELATION message lists the
columns; the rest, which the catalog no longer has, comes from the lake's registry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
from psycopg import AsyncConnection

from ingestd.decode.type_mapping import Types, override_type
from ingestd.model.lake_state import RegisteredColumn, RegisteredTable, TableState
from ingestd.model.schema import Column, ReplicaIdentity, Table, TableId
from ingestd.postgres.catalog.tables import TableRow

DroppedTables = Mapping[tuple[int, TableId], RegisteredTable]
"""By OID and the name under which it was captured."""

_PRESENT = """
SELECT c.oid::int8, n.nspname::text, c.relname::text FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = ANY(%s::oid[])
"""
_ARRAY = re.compile(r"array<(.*)>", re.ASCII)


async def find_dropped(
    connection: AsyncConnection[Any],
    known: Iterable[RegisteredTable],
    is_selected: Callable[[TableId], bool],
) -> dict[tuple[int, TableId], RegisteredTable]:
    """Return the lake's tables that the catalog no longer has under their names.

    Stopped tables are omitted: their changes were not captured. Raises psycopg.Error.
    """
    found = {
        (entry.oid, entry.table): entry
        for last in known
        for entry in (*last.earlier, last)
        if entry.oid and entry.state is not TableState.STOPPED and is_selected(entry.table)
    }
    if not found:
        return {}
    cursor = await connection.execute(_PRESENT, ([oid for oid, _ in found],))
    present = {(oid, TableId(schema, name)) for oid, schema, name in await cursor.fetchall()}
    return {where: entry for where, entry in found.items() if where not in present}


def row_of(entry: RegisteredTable, identity: ReplicaIdentity) -> TableRow:
    """Return its catalog row, without its key (see `as_registered`)."""
    return TableRow(
        oid=entry.oid,
        schema=entry.table.schema,
        name=entry.table.name,
        persistence="p",
        replica_identity=identity,
        reachable=True,
        readable=True,
        unreadable=(),
        owned=False,
        owner=0,
        owner_name="",
        numbered=0,
        primary_key=None,
        identity_key=None,
    )


def as_registered(table: Table, entry: RegisteredTable) -> Table:
    """Return the table, described by a RELATION message, with its key in the lake."""
    key = tuple(c.source_name for c in entry.columns if c.key)
    names = {c.name for c in table.columns}
    return replace(table, key=key if names.issuperset(key) else ())


def with_dropped_types(
    columns: Iterable[Column], known: Iterable[RegisteredColumn], types: Types
) -> tuple[Column, ...]:
    """Return the columns. A type that is missing in `types` is replaced by the lake's."""
    then = {(c.source_name, c.type_oid): c for c in known}
    return tuple(
        c
        if c.type_oid in types or (entry := then.get((c.name, c.type_oid))) is None
        else replace(c, type=_lake_type(entry, c))
        for c in columns
    )


def _lake_type(entry: RegisteredColumn, column: Column) -> pa.DataType:
    """Return the Arrow type of a lake column; text for a struct, as its attributes are unknown."""
    text, depth = entry.lake_type, 0
    while (array := _ARRAY.fullmatch(text)) is not None:
        text, depth = array[1], depth + 1
    try:
        found = override_type(text, column.type_oid, column.typmod, {})
    except ValueError:
        return column.type
    for _ in range(depth):
        found = pa.list_(pa.field("element", found))
    return found
