"""Definitions of the captured tables, combined from the catalog, the config and the lake.

The catalog describes the columns, the config selects those that are captured and how, and the lake
assigns each a lake column. If a publication sends the changes, it determines what is sent. Each
RELATION message of that stream is described in the same way, with its own columns: it may be older
than the catalog, or newer than the last catalog poll.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from psycopg import AsyncConnection

from ingestd.decode.lake_columns import allocate
from ingestd.decode.pgoutput.relation import Relation
from ingestd.decode.type_mapping import BUILT_IN, PgType, without_domains
from ingestd.model.lake_state import RegisteredColumn, RegisteredTable, registered_columns
from ingestd.model.schema import Table, TableId, with_before
from ingestd.postgres.captured.catalog import WHOLE, Catalog
from ingestd.postgres.captured.columns import as_published, controlled, refuse_shown
from ingestd.postgres.captured.dropped_tables import (
    DroppedTables,
    as_registered,
    row_of,
    with_dropped_types,
)
from ingestd.postgres.catalog.publication import Published
from ingestd.postgres.catalog.table_faults import own_fault
from ingestd.postgres.catalog.tables import ColumnRow, TableRow, list_columns, list_types, table_of
from ingestd.postgres.catalog.user_types import find_large, too_large
from ingestd.postgres.rewrites.dependent_texts import TypeUse, refuse_key
from ingestd.postgres.rewrites.fingerprint import TableFingerprint, digest
from ingestd.postgres.settings import PostgresSettings


class TableDefinitions:
    """Describes tables. Used on the event loop only."""

    def __init__(self, settings: PostgresSettings) -> None:
        self._settings = settings
        self._types: dict[int, PgType] = dict(BUILT_IN)
        self._rows: dict[int, TableRow] = {}
        self._columns: dict[int, tuple[ColumnRow, ...]] = {}
        self._published: Mapping[TableId, Published] = {}
        self._is_ours = settings.may_publish
        self._lake: dict[TableId, dict[str, RegisteredColumn]] = {}
        self._present: dict[TableId, dict[str, RegisteredColumn]] = {}
        self._hidden: dict[int, dict[int, str]] = {}
        self._partitioned: set[int] = set()
        self._uses: Mapping[int, tuple[TypeUse, ...]] = {}
        self._too_large: Mapping[int, str] = {}
        self._dropped: DroppedTables = {}

    async def use_catalog(
        self,
        connection: AsyncConnection[Any],
        catalog: Catalog,
        known: Mapping[TableId, RegisteredTable],
    ) -> Mapping[int, PgType]:
        """Describe tables by this catalog and the lake's state from now on. Return all types."""
        types = await list_types(connection, catalog.type_oids)
        # No await from here on: a RELATION message may be described in any await.
        self._types |= types
        # The stream may still contain changes of a dropped table.
        self._rows |= {row.oid: row for row in catalog.rows}
        self._columns = dict(catalog.columns)
        self._uses = catalog.uses
        self._too_large = catalog.too_large
        self._partitioned |= catalog.attach_xids.keys()
        for row in catalog.rows:
            self._note_hidden(row, known.get(row.id))
        self.take_publication(catalog)
        for name, entry in known.items():
            self._lake.setdefault(name, {}).update(entry.lake_columns)
            self._present.setdefault(name, {c.name: c for c in entry.columns})
        return self._types

    def use_dropped(self, dropped: DroppedTables) -> None:
        """Describe these, too: the stream may still contain their changes."""
        self._dropped = dropped

    def take_publication(self, catalog: Catalog) -> None:
        """Use only the publication of this catalog."""
        self._published = catalog.published
        owned = catalog.publication is None or catalog.publication.owned
        self._is_ours = self._settings.may_publish and owned

    def _note_hidden(self, row: TableRow, known: RegisteredTable | None) -> None:
        """Record by number the columns that have a hidden name, or had one at the last poll.

        Another column may get such a name at any time, with all its rows' values.
        """
        names = {digest(name): name for name in self._settings.controls(row.id).hidden}
        if not names:
            return
        then = (
            TableFingerprint.parse(known.fingerprint)
            if known is not None and known.oid == row.oid
            else None
        )
        seen = [(c.number, c.name) for c in (() if then is None else then.columns)]
        seen += [(c.number, digest(c.name)) for c in self._columns.get(row.oid, ())]
        hidden = self._hidden.setdefault(row.oid, {})
        hidden |= {number: names[name] for number, name in seen if name in names}

    async def _learn(self, connection: AsyncConnection[Any], table: TableId, of: set[int]) -> None:
        """Read the types that are not known. Raises TableError if they are too large."""
        new = of - self._types.keys()
        if new:
            for why in (await find_large(connection, {0: new})).values():
                raise too_large(table, why)
            self._types.update(await list_types(connection, new))

    def table(self, row: TableRow, columns: Sequence[ColumnRow]) -> Table:
        """Describe a table of the catalog. Raises TableError if the config can't be applied."""
        with own_fault(row.id):
            return self._of_catalog(row, columns)

    def _of_catalog(self, row: TableRow, columns: Sequence[ColumnRow]) -> Table:
        if row.oid in self._too_large:
            raise too_large(row.id, self._too_large[row.oid])
        table = table_of(row, columns, self._types)
        self._refuse_shown(table, columns)
        refuse_key(table, self._uses)
        return self._captured(with_before(table, full=self._is_full), strict=True)

    def _refuse_shown(self, table: Table, columns: Iterable[ColumnRow]) -> None:
        """Raise TableError if a column would be captured that was hidden under another name."""
        sent = None if self._is_ours else self._published.get(table.id, WHOLE).columns
        names = {c.number: c.name for c in columns if sent is None or c.name in sent}
        refuse_shown(
            table, names, self._hidden.get(table.oid, {}), self._settings.controls(table.id)
        )

    def base_type(self, oid: int) -> int:
        """Return the innermost base type of a domain; any other type itself."""
        return without_domains(oid, self._types)

    async def of_relation(
        self, connection: AsyncConnection[Any], relation: Relation, name: TableId
    ) -> Table:
        """Describe the table `name` with the columns of a RELATION message. Raises TableError."""
        with own_fault(name):
            return await self._of_relation(connection, relation, name)

    async def _of_relation(
        self, connection: AsyncConnection[Any], relation: Relation, name: TableId
    ) -> Table:
        rows = {_shape(c): c for c in self._columns.get(relation.oid, ())}
        if any(_shape(c) not in rows for c in relation.columns):
            names = {relation.oid: [c.name for c in relation.columns]}
            found = await list_columns(connection, [relation.oid], names)
            rows = {_shape(c): c for c in found.get(relation.oid, ())}
            excluded = self._settings.controls(name).exclude_columns
            captured = (c for c in relation.columns if c.name not in excluded)
            await self._learn(connection, name, {c.type_oid for c in captured})
            self._columns[relation.oid] = found.get(relation.oid, ())
        columns = [
            rows.get(_shape(c)) or _bare(relation.oid, number, c)
            for number, c in enumerate(relation.columns, start=1)
        ]
        dropped = self._dropped.get((relation.oid, name))
        if dropped is not None:
            row = row_of(dropped, relation.replica_identity)
        else:
            row = replace(self._rows[relation.oid], schema=name.schema, name=name.name)
        identity = {c.name: c.identity for c in relation.columns}
        table = table_of(row, columns, self._types)
        self._refuse_shown(table, [rows[_shape(c)] for c in relation.columns if _shape(c) in rows])
        known = self._lake.get(name, {}).values() if dropped is None else dropped.columns
        columns_ = with_dropped_types(table.columns, known, self._types)
        table = replace(
            table,
            columns=tuple(replace(c, identity=identity[c.name]) for c in columns_),
            replica_identity=relation.replica_identity,
        )
        if dropped is not None:
            table = as_registered(table, dropped)
        table = with_before(table, full=self._is_full)
        return self._captured(table, strict=False, is_present=dropped is None)

    @property
    def _is_full(self) -> bool:
        return self._settings.keeps_old_rows

    def _captured(self, table: Table, *, strict: bool, is_present: bool = True) -> Table:
        """Apply the config and the publication, and choose the lake's columns.

        `is_present`: the table has this name now.
        """
        settings = self._settings
        controls, key = settings.controls(table.id), settings.mask_key_bytes
        how = self._published.get(table.id, WHOLE)
        is_listed = how.columns is not None
        table = controlled(table, controls, key, self._types, strict=strict, is_listed=is_listed)
        if is_present:
            if how.filter_fault is not None:
                raise how.filter_fault
            table = as_published(table, None if self._is_ours else how.columns, how.row_filter)
        lake = self._lake.setdefault(table.id, {})
        columns = allocate(table.columns, lake)
        # The server drops `missing` when the table is rewritten; the lake's old rows stay. For a
        # partitioned table it may be that of a partition that was added later.
        present = self._present.get(table.id, {})
        stays = table.oid in self._partitioned
        columns = tuple(
            replace(c, missing=present[c.lake_name].missing)
            if (c.missing is None or stays) and c.lake_name in present
            else c
            for c in columns
        )
        table = replace(table, columns=columns)
        found = {c.name: c for c in registered_columns(table)}
        lake.update(found)
        if is_present:
            self._present[table.id] = found
        return table


def _shape(column: Any) -> tuple[str, int, int]:  # noqa: ANN401 - of a message or of the catalog
    return column.name, column.type_oid, column.typmod


def _bare(relation: int, number: int, column: Any) -> ColumnRow:  # noqa: ANN401
    """Return a row for a column that the catalog does not have any more, or has changed."""
    return ColumnRow(
        relation=relation,
        number=number,
        name=column.name,
        type_oid=column.type_oid,
        typmod=column.typmod,
        pg_type="",
        nullable=True,
        comment=None,
        xmin=0,
    )
