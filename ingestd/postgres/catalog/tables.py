"""The source's catalog: tables, their columns, keys and replica identity.

Source: PostgreSQL documentation, "System Catalogs" (pg_class, pg_attribute, pg_index).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.rows import args_row, class_row

from ingestd.decode.type_mapping import BUILT_IN, Attribute, PgType, Types, lake_type
from ingestd.decode.values.encodings import distinct_names
from ingestd.model.changes import RESERVED_PREFIX
from ingestd.model.errors import TableError
from ingestd.model.schema import Column, ReplicaIdentity, Table, TableId, with_before
from ingestd.ports import Refused
from ingestd.postgres.catalog.bounded_text import at_most
from ingestd.postgres.catalog.table_faults import find_unreadable, savepoint
from ingestd.postgres.connection.errors import is_of_what_is_read
from ingestd.postgres.connection.names import TYPE_NAME, refused_name, tables_apart
from ingestd.postgres.connection.quoting import printed

# A deferrable key does not count (indimmediate): within a transaction several rows may have it. If
# an identity's index was dropped, the primary key does not replace it. An index whose columns may
# be null identifies no rows (18+: a NOT NULL that is NOT VALID). The INCLUDE columns of an index,
# beyond indnkeyatts, are not part of the key.
_TABLES = """
SELECT c.oid::int8 AS oid, n.nspname AS schema, c.relname AS name,
       c.relpersistence::text AS persistence,
       c.relreplident::text AS replica_identity,
       has_schema_privilege(n.oid, 'USAGE') AS reachable,
       has_table_privilege(c.oid, 'SELECT') AS readable,
       CASE WHEN has_table_privilege(c.oid, 'SELECT') THEN '{}' ELSE
         ARRAY(SELECT a.attname::text FROM pg_catalog.pg_attribute a
                WHERE a.attrelid = c.oid AND NOT a.attisdropped
                  AND (a.attnum > 0 OR a.attname = 'xmin')
                  AND NOT has_column_privilege(c.oid, a.attnum, 'SELECT') ORDER BY a.attnum)
       END AS unreadable,
       pg_has_role(c.relowner, 'USAGE') AS owned,
       c.relowner::int8 AS owner, pg_catalog.pg_get_userbyid(c.relowner)::text AS owner_name,
       c.relnatts::int AS numbered,
       (pk.indkey::int2[])[0:pk.indnkeyatts - 1] AS primary_key,
       CASE WHEN ri.indkey IS NOT NULL THEN (ri.indkey::int2[])[0:ri.indnkeyatts - 1]
            WHEN c.relreplident <> 'i' THEN (pk.indkey::int2[])[0:pk.indnkeyatts - 1]
       END AS identity_key,
       coalesce(pkc.oid, pk.indexrelid, 0)::int8 AS primary_key_by,
       coalesce(ric.oid, ri.indexrelid, pkc.oid, pk.indexrelid, 0)::int8 AS identity_by,
       (SELECT k.conname::text FROM pg_catalog.pg_index i
          JOIN pg_catalog.pg_constraint k ON k.conrelid = i.indrelid AND k.contype = 'n'
           AND NOT k.convalidated
           AND k.conkey OPERATOR(pg_catalog.<@) (i.indkey::int2[])[0:i.indnkeyatts - 1]
         WHERE i.indrelid = c.oid AND i.indisreplident AND c.relreplident = 'i'
         ORDER BY 1 LIMIT 1) AS not_validated,
       (SELECT (i.indkey::int2[])[0:i.indnkeyatts - 1] FROM pg_catalog.pg_index i
         WHERE i.indrelid = c.oid AND i.indisprimary AND i.indisvalid) AS declared_key
  FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  LEFT JOIN pg_catalog.pg_index pk ON pk.indrelid = c.oid AND pk.indisprimary AND pk.indisvalid
       AND pk.indimmediate
  LEFT JOIN pg_catalog.pg_constraint pkc ON pkc.conrelid = c.oid AND pkc.contype IN ('p', 'u')
       AND pkc.conindid = pk.indexrelid
  LEFT JOIN pg_catalog.pg_index ri ON ri.indrelid = c.oid AND ri.indisreplident AND ri.indisvalid
       AND ri.indimmediate AND c.relreplident = 'i' AND NOT EXISTS (
         SELECT FROM pg_catalog.pg_constraint k
          WHERE k.conrelid = c.oid AND k.contype = 'n' AND NOT k.convalidated
            AND k.conkey OPERATOR(pg_catalog.<@) (ri.indkey::int2[])[0:ri.indnkeyatts - 1])
  LEFT JOIN pg_catalog.pg_constraint ric ON ric.conrelid = c.oid AND ric.contype IN ('p', 'u')
       AND ric.conindid = ri.indexrelid
 WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence <> 't'
   AND n.nspname <> 'information_schema' AND n.nspname NOT LIKE 'pg\\_%'
 ORDER BY n.nspname, c.relname
"""

MISSING_BYTES = 1 << 20
"""Limit for the missing values of all columns of a table."""
COMMENT_BYTES = 1 << 20
"""The same for their comments. Those of the last columns are left out."""
_THOSE_BEFORE = "PARTITION BY relation ORDER BY number"
# For a partitioned table the missing value is taken from the partitions that got the column with
# it: one that was attached later may have a different value.
_COLUMNS = (
    f"""
SELECT relation, number, name, type_oid, typmod, pg_type, nullable,
       {at_most(COMMENT_BYTES, "comment", of=_THOSE_BEFORE)} AS comment,
       xmin, generated, default_oid, missing_in[1], missing_in[2]::int2
  FROM (
SELECT a.attrelid::int8 AS relation, a.attnum AS number, a.attname AS name,
       a.atttypid::int8 AS type_oid, a.atttypmod AS typmod,
       type.name AS pg_type,
       NOT a.attnotnull OR EXISTS (
         SELECT FROM pg_catalog.pg_constraint k
          WHERE k.conrelid = a.attrelid AND k.contype = 'n' AND NOT k.convalidated
            AND a.attnum = ANY(k.conkey)) AS nullable,
       pg_catalog."left"(d.description, 8192) AS comment,
       coalesce(
         CASE WHEN a.atthasmissing THEN ARRAY[a.attrelid::int8, a.attnum] END,
         CASE WHEN c.relkind = 'p' THEN
           (WITH RECURSIVE tree AS (
              SELECT i.inhrelid AS oid FROM pg_catalog.pg_inherits i WHERE i.inhparent = a.attrelid
              UNION ALL
              SELECT i.inhrelid FROM tree t
                JOIN pg_catalog.pg_class p ON p.oid = t.oid AND p.relkind = 'p'
                JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid)
            SELECT CASE WHEN l.atthasmissing THEN ARRAY[l.attrelid::int8, l.attnum] END FROM tree
              JOIN pg_catalog.pg_attribute l ON l.attrelid = tree.oid AND l.attname = a.attname
             ORDER BY l.xmin = a.xmin DESC, l.atthasmissing DESC LIMIT 1) END) AS missing_in,
       a.xmin::text::int8 AS xmin, a.attgenerated <> '' AS generated,
       coalesce(CASE WHEN a.atthasdef THEN
         (SELECT d.oid FROM pg_catalog.pg_attrdef d
           WHERE d.adrelid = a.attrelid AND d.adnum = a.attnum) END, 0)::int8 AS default_oid
  FROM pg_catalog.pg_attribute a
  JOIN pg_catalog.pg_class c ON c.oid = a.attrelid
  LEFT JOIN pg_catalog.pg_description d ON d.objoid = a.attrelid AND d.objsubid = a.attnum
       AND d.classoid = 'pg_catalog.pg_class'::pg_catalog.regclass
"""  # noqa: S608 - constants
    + TYPE_NAME
    + """
 WHERE a.attrelid = ANY(%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped) AS found
 ORDER BY relation, number
"""
)
# A missing value is an array's only element; as the array's text it would depend on its delimiter.
_MISSING = f"""
SELECT relation, number, pg_catalog.octet_length(missing),
       {at_most(MISSING_BYTES, "missing", of=_THOSE_BEFORE)}
  FROM (
SELECT v.relation, v.number, pg_catalog.array_to_string(a.attmissingval, '') AS missing
  FROM ROWS FROM (pg_catalog.unnest(%s::int8[]), pg_catalog.unnest(%s::int2[]),
                  pg_catalog.unnest(%s::oid[]), pg_catalog.unnest(%s::int2[]))
       v (relation, number, holder, held)
  JOIN pg_catalog.pg_attribute a ON a.attrelid = v.holder AND a.attnum = v.held
OFFSET 0) AS found
"""  # noqa: S608 - constants
_GENERATED = """
SELECT attrelid::int8, attnum, attname::text FROM pg_catalog.pg_attribute
 WHERE attrelid = ANY(%s::oid[]) AND attnum > 0 AND NOT attisdropped AND attgenerated <> ''
"""

# Independent of row_security.
_HIDING = """
SELECT c.oid::int8 FROM pg_catalog.pg_class c
 WHERE c.oid = ANY(%s::oid[]) AND c.relrowsecurity AND pg_catalog.row_security_active(c.oid)
"""

# Including all component types: elements of arrays, bases of domains, fields of composites.
_TYPES = """
WITH RECURSIVE made_of AS (
  SELECT t.oid, CASE WHEN t.typtype = 'd' THEN t.typbasetype
                     WHEN e.typarray = t.oid THEN e.oid END AS of,
         CASE WHEN t.typtype = 'd' THEN 'domain' WHEN e.typarray = t.oid THEN 'array'
              WHEN t.typtype = 'c' THEN 'composite' ELSE 'other' END AS kind,
         t.typtypmod, coalesce(e.typdelim, ',')::text AS delimiter, t.typrelid
    FROM pg_catalog.pg_type t LEFT JOIN pg_catalog.pg_type e ON e.oid = t.typelem),
used AS (
  SELECT unnest(%s::oid[]) AS oid
  UNION
  SELECT x.oid FROM used JOIN made_of m ON m.oid = used.oid CROSS JOIN LATERAL (
    SELECT m.of UNION ALL
    SELECT a.atttypid FROM pg_catalog.pg_attribute a
     WHERE a.attrelid = m.typrelid AND m.kind = 'composite' AND a.attnum > 0 AND NOT a.attisdropped
    ) AS x(oid) WHERE x.oid IS NOT NULL)
SELECT m.oid::int8, m.kind, coalesce(m.of, 0)::int8, m.typtypmod, m.delimiter,
       ARRAY(SELECT ROW(a.attname::text, a.atttypid::int8, a.atttypmod)
               FROM pg_catalog.pg_attribute a
              WHERE m.kind = 'composite' AND a.attrelid = m.typrelid AND a.attnum > 0
                AND NOT a.attisdropped ORDER BY a.attnum)
  FROM made_of m JOIN used USING (oid)
"""


@dataclass(frozen=True, slots=True)
class TableRow:
    """A table's row in pg_class. `numbered`: its number of columns, including dropped ones.

    `primary_key_by`, `identity_by`: see `KeyMark`. `not_validated`: the NOT NULL constraint that
    disqualifies the identity's index. `declared_key`: the primary key, deferrable or not: it holds
    at the end of a transaction. `readable`: all of it is; if not, `unreadable` names the columns
    that are not, including xmin.
    """

    oid: int
    schema: str
    name: str
    persistence: str
    replica_identity: ReplicaIdentity
    reachable: bool
    readable: bool
    unreadable: tuple[str, ...]
    owned: bool
    owner: int
    owner_name: str
    numbered: int
    primary_key: tuple[int, ...] | None
    identity_key: tuple[int, ...] | None
    primary_key_by: int = 0
    identity_by: int = 0
    not_validated: str | None = None
    declared_key: tuple[int, ...] | None = None

    @property
    def id(self) -> TableId:
        """Its name."""
        return TableId(self.schema, self.name)


@dataclass(frozen=True, slots=True)
class ColumnRow:
    """A column's row in pg_attribute: the result columns of `_COLUMNS`, in order.

    `missing_relation`, `missing_number`: the row of pg_attribute that has the missing value. It is
    read apart: `missing`, or why it can't be read (`unread`).
    """

    relation: int
    number: int
    name: str
    type_oid: int
    typmod: int
    pg_type: str
    nullable: bool
    comment: str | None
    xmin: int
    generated: bool = False
    default_oid: int = 0
    missing_relation: int | None = None
    missing_number: int | None = None
    missing: str | None = None
    unread: str = ""

    @property
    def has_missing(self) -> bool:
        """Return whether rows from before the column have a value in it."""
        return self.missing_relation is not None


async def list_tables(connection: AsyncConnection[Any]) -> list[TableRow]:
    """Return all user tables that a publication could contain, partitioned ones as their root."""
    async with connection.cursor(row_factory=class_row(TableRow)) as cursor:
        await cursor.execute(_TABLES)
        rows = await cursor.fetchall()
        names = tables_apart([(row.schema, row.name) for row in rows])
        return [
            replace(
                row,
                schema=schema,
                name=name,
                unreadable=tuple(row.unreadable),
                primary_key=_hashable(row.primary_key),
                identity_key=_hashable(row.identity_key),
                declared_key=_hashable(row.declared_key),
            )
            for row, (schema, name) in zip(rows, names, strict=True)
        ]


def _hashable(numbers: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if numbers is None else tuple(numbers)


async def list_columns(
    connection: AsyncConnection[Any],
    tables: Iterable[int],
    generated: Mapping[int, Collection[str]] = MappingProxyType({}),
) -> dict[int, tuple[ColumnRow, ...]]:
    """Return the columns of these tables (OIDs) that a publication sends, in their order.

    `generated`: by OID, names of generated columns that it also sends. The others are omitted from
    the lake: better than null for a value that exists.
    """
    async with connection.cursor(row_factory=args_row(ColumnRow)) as cursor:
        await cursor.execute(_COLUMNS, (list(tables),))
        columns = await cursor.fetchall()
    by_table: dict[int, list[ColumnRow]] = {}
    for column in columns:
        if not column.generated or column.name in generated.get(column.relation, ()):
            by_table.setdefault(column.relation, []).append(column)
    held = {oid: f for oid, of in by_table.items() if (f := [c for c in of if c.has_missing])}
    missing = await _read_missing(connection, held)
    return {
        oid: _apart([missing.get((oid, c.number), c) for c in found])
        for oid, found in by_table.items()
    }


async def _read_missing(
    connection: AsyncConnection[Any], held: Mapping[int, Sequence[ColumnRow]]
) -> dict[tuple[int, int], ColumnRow]:
    """Return these columns, by table and number, with their missing values.

    The server calls the output functions of their types, which fail for some values. The usual case
    is one query and a savepoint, if there are any.
    """

    async def read(columns: Sequence[ColumnRow]) -> list[tuple[Any, ...]]:
        places = [(c.relation, c.number, c.missing_relation, c.missing_number) for c in columns]
        cursor = await connection.execute(_MISSING, [list(p) for p in zip(*places, strict=True)])
        return await cursor.fetchall()

    columns = [c for found in held.values() for c in found]
    if not columns:
        return {}
    unreadable: dict[ColumnRow, str] = {}
    try:
        async with savepoint(connection):
            rows = await read(columns)
    except psycopg.Error as error:
        if not is_of_what_is_read(error):
            raise
        for found in held.values():
            unreadable |= await find_unreadable(connection, found, read)
        left = [c for c in columns if c not in unreadable]
        rows = await read(left) if left else []
    values = {(oid, number): (size, text) for oid, number, size, text in rows}
    return {
        (c.relation, c.number): replace(c, unread=f"whose value can't be read: {unreadable[c]}")
        if c in unreadable
        else _with_missing(c, *values[c.relation, c.number])
        for c in columns
    }


def _with_missing(column: ColumnRow, nbytes: int | None, missing: str | None) -> ColumnRow:
    if missing is not None or nbytes is None:
        return replace(column, missing=missing)
    unread = (
        f"of {nbytes / 1e6:.1f} MB, which the catalog holds for older rows: with those of other"
        f" columns it is more than {MISSING_BYTES / 1e6:.0f} MB"
    )
    return replace(column, unread=unread)


def _apart(columns: Sequence[ColumnRow]) -> tuple[ColumnRow, ...]:
    names = distinct_names([column.name for column in columns])
    return tuple(replace(c, name=name) for c, name in zip(columns, names, strict=True))


async def list_generated(
    connection: AsyncConnection[Any], tables: Iterable[int]
) -> dict[int, dict[int, str]]:
    """Return the generated columns of these tables, by OID: their numbers and names."""
    cursor = await connection.execute(_GENERATED, (list(tables),))
    found: dict[int, dict[int, str]] = {}
    for oid, number, name in await cursor.fetchall():
        found.setdefault(oid, {})[number] = name
    return found


def their_names(columns: Mapping[int, Mapping[int, str]]) -> dict[int, tuple[str, ...]]:
    """Remove the numbers from a result of `list_generated`."""
    return {oid: tuple(named.values()) for oid, named in columns.items()}


async def list_with_hidden_rows(
    connection: AsyncConnection[Any], tables: Iterable[int]
) -> frozenset[int]:
    """Return which of these tables (OIDs) have policies that hide rows from this role."""
    cursor = await connection.execute(_HIDING, (list(tables),))
    return frozenset([oid for (oid,) in await cursor.fetchall()])


async def list_types(connection: AsyncConnection[Any], oids: Iterable[int]) -> dict[int, PgType]:
    """Return these types, with all component types. Missing ones are omitted."""
    cursor = await connection.execute(_TYPES, (list(oids),))
    return {
        oid: PgType(oid, kind, of, typmod, delimiter, tuple(_attribute(a) for a in attributes))
        for oid, kind, of, typmod, delimiter, attributes in await cursor.fetchall()
    }


def _attribute(row: tuple[str, str, str]) -> Attribute:
    name, type_oid, typmod = row
    return Attribute(name, int(type_oid), int(typmod))


async def describe(
    connection: AsyncConnection[Any], rows: Sequence[TableRow], *, before_full: bool
) -> list[Table]:
    """Return the tables with all their columns and default lake types."""
    columns = await list_columns(connection, [r.oid for r in rows])
    oids = {c.type_oid for found in columns.values() for c in found}
    types = {**BUILT_IN, **await list_types(connection, oids)}
    return [
        with_before(table_of(row, columns.get(row.oid, ()), types), full=before_full)
        for row in rows
    ]


def table_of(row: TableRow, columns: Sequence[ColumnRow], types: Types) -> Table:
    """Return a table built from its catalog rows. `before` is not set."""
    names = {c.number: c.name for c in columns}
    everything = row.replica_identity == "f"
    identity = () if row.replica_identity == "n" else row.identity_key or ()
    key = row.primary_key or ()
    return Table(
        id=row.id,
        oid=row.oid,
        columns=tuple(
            Column(
                name=c.name,
                type_oid=c.type_oid,
                typmod=c.typmod,
                type=lake_type(c.type_oid, c.typmod, types),
                pg_type=c.pg_type,
                identity=everything or c.number in identity,
                nullable=c.nullable,
                comment=c.comment,
                missing=c.missing,
                unread=c.unread,
            )
            for c in columns
        ),
        replica_identity=row.replica_identity,
        key=tuple(names[n] for n in key) if names.keys() >= set(key) else (),
    )


def qualified(table: TableId) -> str:
    """Return the table's name as SQL."""
    return printed(sql.Identifier(table.schema, table.name))


NO_COLUMNS = "has no columns"


def _read_of(table: Table) -> list[str]:
    """Return the columns that are read: all except those masked with null."""
    return [c.name for c in table.columns if c.mask is None or c.mask.kind != "null"]


def _unreadable(row: TableRow, names: Sequence[str]) -> list[str]:
    """Return the columns this role may not read. A table without columns must be readable."""
    if row.readable:
        return []
    found = [name for name in names if name in row.unreadable]
    return found or ([] if names else list(row.unreadable))


def _lacking_right(
    row: TableRow, table: Table, read: Sequence[str], lacking: Sequence[str]
) -> tuple[str, str]:
    """Return what can't be read, and the privilege to grant; excluded columns are omitted."""
    is_none_readable = all(c.name in row.unreadable for c in table.columns)
    left_out = set(row.unreadable) - {c.name for c in table.columns} - {"xmin"}
    if is_none_readable and not left_out:
        return "no privilege to read it", "SELECT"
    names = ", ".join(printed(sql.Identifier(name)) for name in read)
    return f"no privilege to read column {', '.join(map(repr, lacking))}", f"SELECT ({names})"


def refusal(
    row: TableRow, table: Table, role: str, *, also_read: Collection[str] = ()
) -> Refused | None:
    """Return why this role can't capture this table; None if it can or only an identity is missing.

    `table`: as captured; excluded columns need not be readable. `also_read`: what is read of it
    besides its columns.
    """
    odd = refused_name(row.oid, row.schema, row.name, (c.name for c in table.columns))
    if odd is not None:
        return Refused(table, TableError(row.id, odd[0], remedy=odd[1]))
    name = qualified(row.id)
    reserved = [c.name for c in table.columns if c.name.startswith(RESERVED_PREFIX)]
    if reserved:
        what = f"column {reserved[0]!r}: names that begin with {RESERVED_PREFIX} are reserved"
        remedy: str | None = "rename the column, or exclude the table in `tables`"
    elif not table.columns:
        what, remedy = (
            NO_COLUMNS,
            f"remove it from `tables`, or ALTER TABLE {name} ADD COLUMN id int;",
        )
    elif row.persistence == "u":
        what = "an unlogged table writes no WAL, and a crash empties it"
        remedy = f"ALTER TABLE {name} SET LOGGED;"
    elif not row.reachable:
        what = f"no privilege to use schema {row.schema!r}"
        schema, grantee = (printed(sql.Identifier(n)) for n in (row.schema, role))
        remedy = f"GRANT USAGE ON SCHEMA {schema} TO {grantee};"
    elif lacking := _unreadable(row, [*_read_of(table), *also_read]):
        what, right = _lacking_right(row, table, [*_read_of(table), *also_read], lacking)
        remedy = f"GRANT {right} ON {name} TO {printed(sql.Identifier(role))};"
    else:
        return None
    return Refused(table, TableError(row.id, what, remedy=remedy))
