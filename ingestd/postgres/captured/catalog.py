"""The catalog of a source: all that it says of the tables in the config, at one snapshot."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from psycopg import AsyncConnection

from ingestd.model.lsn import Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.schema import TableId
from ingestd.postgres.captured.selection import named_tables
from ingestd.postgres.catalog.indexes import IndexRow, list_indexes
from ingestd.postgres.catalog.publication import (
    WITH_GENERATED,
    Publication,
    Published,
    find_publication,
    published,
)
from ingestd.postgres.catalog.published_filters import NONE, with_row_filters
from ingestd.postgres.catalog.relation_kinds import NotTable, find_not_tables
from ingestd.postgres.catalog.replica_identity import Partition, PublishedIdentity, list_partitions
from ingestd.postgres.catalog.tables import (
    ColumnRow,
    TableRow,
    list_columns,
    list_generated,
    list_tables,
    list_with_hidden_rows,
    their_names,
)
from ingestd.postgres.catalog.user_types import TypeParts, find_large, read_type_parts
from ingestd.postgres.connection.session import connect
from ingestd.postgres.connection.wal_position import insert_position
from ingestd.postgres.rewrites.dependent_text_queries import read_texts, read_uses
from ingestd.postgres.rewrites.dependent_texts import NO_TEXTS, TableTexts, TypeUse
from ingestd.postgres.rewrites.fingerprint import KeyMark, StoredColumn, TableFingerprint, digest
from ingestd.postgres.rewrites.fingerprint_queries import (
    read_attach_xids,
    read_files,
    read_schema_xids,
)
from ingestd.postgres.rewrites.tracker import LOCK_TIMEOUT_S
from ingestd.postgres.settings import PostgresSettings
from ingestd.postgres.snapshot.read_view import current_pg_snapshot

WHOLE = Published(None, None, None)


@dataclass(frozen=True, slots=True)
class Catalog:
    """The catalog's state of the tables in the config. Two are equal if nothing changed.

    `is_streamed`: a publication sends the changes. `present`: every table, included or not.
    `not_tables`: names in the config that are not tables. `columns`, `files`, `toast`,
    `attach_xids`, `schema_xids` (see `TableFingerprint`): by table OID; `types`: by type OID.
    `structs`: by OID, the columns that are structs in the lake. `published`: by name. `generated`:
    generated columns, sent or not, by table OID. `refuses_unsent_identity`: the server refuses
    UPDATE and DELETE if an identity contains an unsent column (18+). `partitions`: see
    `list_partitions`, by OID of the root. `lsn`: all of it holds at that position. `pg_snapshot`:
    the transactions that precede it. Without a publication: `indexes`, the unique ones by table
    OID; `with_hidden_rows`, OIDs of the tables whose row security hides rows from this role.
    `type_oids`: the types of the columns, except of tables in `too_large`: by table OID, why its
    types are not read. `uses`: by type OID, the types whose text depends on other objects; `texts`:
    by table OID, these texts.
    """

    is_streamed: bool = False
    present: tuple[TableId, ...] = field(default=(), compare=False)
    not_tables: Mapping[TableId, NotTable] = field(default_factory=dict)
    rows: tuple[TableRow, ...] = ()
    columns: Mapping[int, tuple[ColumnRow, ...]] = field(default_factory=dict)
    files: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    toast: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    attach_xids: Mapping[int, Mapping[int, str]] = field(default_factory=dict)
    schema_xids: Mapping[int, str] = field(default_factory=dict)
    published: Mapping[TableId, Published] = field(default_factory=dict)
    publication: Publication | None = None
    types: Mapping[int, tuple[TypeParts, ...]] = field(default_factory=dict)
    structs: Mapping[int, frozenset[str]] = field(default_factory=dict)
    generated: Mapping[int, Mapping[int, str]] = field(default_factory=dict)
    refuses_unsent_identity: bool = False
    partitions: Mapping[int, tuple[Partition, ...]] = field(default_factory=dict)
    indexes: Mapping[int, tuple[IndexRow, ...]] = field(default_factory=dict)
    with_hidden_rows: frozenset[int] = frozenset()
    type_oids: frozenset[int] = field(default=frozenset(), compare=False)
    too_large: Mapping[int, str] = field(default_factory=dict)
    uses: Mapping[int, tuple[TypeUse, ...]] = field(default_factory=dict)
    texts: Mapping[int, TableTexts] = field(default_factory=dict)
    lsn: Lsn = field(default=Lsn(0), compare=False)
    pg_snapshot: PgSnapshot = field(default=PgSnapshot(0, 0), compare=False)

    def sending(self, row: TableRow) -> PublishedIdentity:
        """Return what decides, besides a table's replica identity, which changes can be sent."""
        sent = self.published.get(row.id, WHOLE).generated
        unsent = {n: c for n, c in self.generated.get(row.oid, {}).items() if c not in sent}
        named = row.identity_key or () if row.replica_identity in {"d", "i"} else ()
        return PublishedIdentity(
            frozenset(unsent.values()),
            frozenset(unsent[n] for n in named if n in unsent),
            self.partitions.get(row.oid, ()),
            refuses_unsent_identity=self.refuses_unsent_identity,
            not_validated=row.not_validated,
        )

    def fingerprint(self, row: TableRow) -> TableFingerprint:
        """Return the fingerprint of a table's storage."""
        described = self.columns.get(row.oid, ())
        columns = tuple(
            StoredColumn(
                c.number,
                c.type_oid,
                c.typmod,
                c.xmin,
                c.has_missing,
                digest(c.name),
                c.default_oid,
            )
            for c in described
        )
        structs = self.structs.get(row.oid, frozenset())
        types = {
            t
            for c in described
            for t in self.types.get(c.type_oid, ())
            if c.name in structs or not t.are_names
        }
        how = self.published.get(row.id, WHOLE)
        generated = self.generated.get(row.oid, {})
        present = {c.number for c in columns} | generated.keys()
        dropped = frozenset(range(1, row.numbered + 1)) - present
        unlisted = {c.number for c in described if how.columns and c.name not in how.columns}
        return TableFingerprint(
            columns,
            self.files.get(row.oid, {}),
            digest(how.row_filter),
            frozenset(map(digest, generated.values())) - {c.name for c in columns},
            membership=how.entry,
            types=tuple(sorted(types, key=lambda t: t.oid)),
            ended=self.pg_snapshot.xmin,
            attach_xids=self.attach_xids.get(row.oid, {}),
            publication=self.publication.altered if self.publication else "",
            numbered=row.numbered,
            dropped=dropped,
            unlisted=frozenset(unlisted),
            key=_key_mark(row),
            schema_xid=self.schema_xids.get(row.oid, ""),
            toast=self.toast.get(row.oid, {}),
            is_streamed=self.is_streamed,
            is_listed=how.membership is not None,
            texts=self.texts.get(row.oid, NO_TEXTS),
        )


async def read_catalog(
    settings: PostgresSettings, last: Mapping[TableId, Published] = NONE
) -> Catalog:
    """Return the catalog, on a separate connection: tables with row filters are briefly locked.

    All of it is read at one snapshot: columns and files must belong together, or a rewrite would be
    missed. `last`: what was published at the last reading. Raises psycopg.Error.
    """
    dsn = settings.dsn.get_secret_value()
    async with await connect(
        dsn, autocommit=False, lock_timeout_s=LOCK_TIMEOUT_S, reads_names=True
    ) as connection:
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        return await _read_catalog(connection, settings, last)


async def _read_catalog(
    connection: AsyncConnection[Any],
    settings: PostgresSettings,
    last: Mapping[TableId, Published],
) -> Catalog:
    lsn = await insert_position(connection)
    every = await list_tables(connection)
    wanted = tuple(r for r in every if settings.streams(r.id))
    oids = [r.oid for r in wanted]
    present = {r.id for r in every}
    absent = [t for t in named_tables(settings) if t not in present]
    files, toast = await read_files(connection, oids)
    catalog = Catalog(
        is_streamed=settings.sent_by is not None,
        present=tuple(r.id for r in every),
        not_tables=await find_not_tables(connection, absent),
        rows=wanted,
        files=files,
        toast=toast,
        attach_xids=await read_attach_xids(connection, oids),
        schema_xids=await read_schema_xids(connection, oids),
        structs={r.oid: _structs(settings, r.id) for r in wanted},
        generated=await list_generated(connection, oids),
        lsn=lsn,
        pg_snapshot=await current_pg_snapshot(connection),
    )
    if settings.sent_by is None:
        catalog = await _with_indexes(connection, catalog, oids)
        generated: Mapping[int, Collection[str]] = their_names(catalog.generated)
    else:
        catalog = await _with_publication(connection, catalog, oids, settings.sent_by, last)
        sent = catalog.published
        generated = {r.oid: sent[r.id].generated for r in wanted if r.id in sent}
    columns = await list_columns(connection, oids, generated)
    catalog = await _with_types(connection, replace(catalog, columns=columns), settings)
    return await _with_texts(connection, catalog, settings)


async def _with_types(
    connection: AsyncConnection[Any], catalog: Catalog, settings: PostgresSettings
) -> Catalog:
    """Return the catalog with its types, except those of tables whose types are too large."""
    used = {oid: {c.type_oid for c in found} for oid, found in catalog.columns.items()}
    large = await find_large(connection, used)
    if large:  # perhaps only by what is not captured
        for row in catalog.rows:
            excluded = settings.controls(row.id).exclude_columns if row.oid in large else ()
            if excluded:
                captured = (c for c in catalog.columns[row.oid] if c.name not in excluded)
                used[row.oid] = {c.type_oid for c in captured}
        large = await find_large(connection, {oid: used[oid] for oid in large})
    oids = frozenset(t for oid, found in used.items() if oid not in large for t in found)
    return replace(
        catalog, too_large=large, type_oids=oids, types=await read_type_parts(connection, oids)
    )


async def _with_texts(
    connection: AsyncConnection[Any], catalog: Catalog, settings: PostgresSettings
) -> Catalog:
    """Return the catalog with the dependent texts of captured columns."""
    uses = await read_uses(connection, catalog.type_oids)
    used: dict[int, tuple[TypeUse, ...]] = {}
    for row in catalog.rows if uses else ():
        excluded = settings.controls(row.id).exclude_columns
        found = [
            replace(use, column=column.name, type_oid=column.type_oid)
            for column in catalog.columns.get(row.oid, ())
            if column.name not in excluded
            for use in uses.get(column.type_oid, ())
        ]
        if found:
            used[row.oid] = tuple(found)
    texts = await read_texts(connection, {use.type for found in used.values() for use in found})
    return replace(
        catalog,
        uses=uses,
        texts={
            oid: TableTexts(tuple(texts[t] for t in sorted({use.type for use in found})), found)
            for oid, found in used.items()
        },
    )


def _key_mark(row: TableRow) -> KeyMark:
    identity = row.identity_key if row.replica_identity in {"d", "i"} else None
    return KeyMark(
        row.replica_identity,
        row.primary_key or (),
        row.primary_key_by,
        identity or (),
        row.identity_by if identity else 0,
    )


def _structs(settings: PostgresSettings, table: TableId) -> frozenset[str]:
    chosen = settings.controls(table).types
    return frozenset(column for column, kind in chosen.items() if "struct" in kind.lower())


async def _with_publication(
    connection: AsyncConnection[Any],
    catalog: Catalog,
    oids: Sequence[int],
    name: str,
    last: Mapping[TableId, Published],
) -> Catalog:
    sent = await published(connection, name, connection.info.server_version)
    names = {r.id for r in catalog.rows}
    wanted = {table: how for table, how in sent.items() if table in names}
    return replace(
        catalog,
        published=await with_row_filters(connection, wanted, last),
        publication=await find_publication(connection, name),
        refuses_unsent_identity=connection.info.server_version >= WITH_GENERATED,
        partitions=await list_partitions(connection, oids),
    )


async def _with_indexes(
    connection: AsyncConnection[Any], catalog: Catalog, oids: Sequence[int]
) -> Catalog:
    return replace(
        catalog,
        indexes=await list_indexes(connection, oids),
        with_hidden_rows=await list_with_hidden_rows(connection, oids),
    )
