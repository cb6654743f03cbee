"""Whether a table's rows were given other values, or came or went, without changes in the stream.

Six things do that: DDL that rewrites the table (another type, a volatile default), columns that
take another's name or are read as another type, types whose labels or attributes change, partitions
that come or go with their rows, a TRUNCATE of one partition, a time in which the table is UNLOGGED
(one that is published by itself can't be). VACUUM FULL, CLUSTER and SET TABLESPACE replace the
files as well and change no row: only a rewrite that comes with an altered column counts, or with
a new TOAST table.

The stream knows columns by their names, and so does the lake: a renamed column is a new one, whose
old values lie under the old name; one made anew under its old name would have the values of the
dropped one. Only the catalog's numbers tell.

Source: PostgreSQL, src/backend/commands/tablecmds.c (ATRewriteTables), "ALTER TABLE", "Notes".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, LiteralString

import psycopg
from psycopg import AsyncConnection, sql

from ingestd.capture.type_parts import TypeParts

# What DETACH CONCURRENTLY has begun with is gone, though others may still look at it.
_FILES = """
WITH RECURSIVE tree AS (
  SELECT c.oid AS root, c.oid, c.relkind, c.relfilenode AS file
    FROM pg_catalog.pg_class c WHERE c.oid = ANY(%s::oid[])
  UNION ALL
  SELECT t.root, c.oid, c.relkind, c.relfilenode FROM tree t
    JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid AND NOT i.inhdetachpending
    JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
   WHERE t.relkind = 'p')
SELECT root::int8, oid::int8, file::int8
  FROM tree WHERE relkind <> 'p' ORDER BY 1, 2
"""
# Where a partition is: the transactions that put it, and what is above it, in their places.
_PLACES = """
WITH RECURSIVE tree AS (
  SELECT c.oid AS root, c.oid, '' AS place
    FROM pg_catalog.pg_class c WHERE c.oid = ANY(%s::oid[]) AND c.relkind = 'p'
  UNION ALL
  SELECT t.root, i.inhrelid, t.place || '.' || i.xmin::text FROM tree t
    JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid AND NOT i.inhdetachpending)
SELECT t.root::int8, t.oid::int8, t.place
  FROM tree t JOIN pg_catalog.pg_class c ON c.oid = t.oid WHERE c.relkind <> 'p' ORDER BY 1, 2
"""
# Of the partition and the partitioned tables above it. One that was made as a partition (CREATE
# TABLE ... PARTITION OF) had no rows: its columns were never touched after the system's, which
# ATTACH does to each. Of one that was attached, rows that are not younger may have come with it: a
# `cmin` tells nothing once somebody has tried to update the row. Where the file is another than the
# first (a rewrite, SET LOGGED), rows may look younger than they are, or never have been sent; a
# TRUNCATE by itself has taken some away that were.
_CAME_WITH_ROWS = """
WITH RECURSIVE places AS (
  SELECT i.inhrelid, i.inhparent, i.xmin AS xid
    FROM pg_catalog.pg_inherits i WHERE i.inhrelid = {oid}
  UNION ALL
  SELECT i.inhrelid, i.inhparent, i.xmin
    FROM places p JOIN pg_catalog.pg_inherits i ON i.inhrelid = p.inhparent),
attached AS (
  SELECT xid FROM places p
   WHERE NOT EXISTS (
     SELECT FROM pg_catalog.pg_attribute s
       JOIN pg_catalog.pg_attribute c ON c.attrelid = s.attrelid AND c.attnum > 0
        AND c.xmin = s.xmin AND c.cmin = s.cmin AND c.xmax = 0 AND c.attinhcount > 0
      WHERE s.attrelid = p.inhrelid AND s.attname = 'tableoid' AND s.attnum < 0 AND s.xmax = 0)),
replaced AS (SELECT FROM pg_catalog.pg_class WHERE oid = {oid} AND relfilenode <> oid)
SELECT CASE WHEN EXISTS (SELECT FROM attached) THEN EXISTS (
  SELECT FROM ONLY {table} r
   WHERE EXISTS (SELECT FROM replaced) OR age(r.xmin) < 0
      OR EXISTS (SELECT FROM attached a WHERE age(a.xid) BETWEEN 0 AND age(r.xmin)))
ELSE EXISTS (SELECT FROM replaced) END
"""
# What ALTER TABLE rewrites, SET LOGGED say, gets a TOAST table made anew; TRUNCATE leaves it.
_REMADE = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_class c
                 JOIN pg_catalog.pg_attribute a ON a.attrelid = c.reltoastrelid AND a.attnum = 1
                WHERE c.oid = %s AND a.xmin = c.xmin)
"""
_REWRITTEN = "rewritten by ALTER TABLE, or unlogged for a time"
_OLDER_THAN_FILE = """
SELECT EXISTS (SELECT FROM ONLY {table} r CROSS JOIN pg_catalog.pg_class c
                WHERE c.oid = {oid} AND (age(r.xmin) > age(c.xmin) OR age(r.xmin) < 0))
"""
_OLDER_THAN_XID = """
SELECT EXISTS (SELECT FROM ONLY {table} r
                WHERE age(r.xmin) > age({xid}::text::xid) OR age(r.xmin) < 0)
"""
# ALTER TABLE forgets constant defaults before it puts the new file in place, VACUUM FULL and
# CLUSTER after that. Where the rows of the catalog were altered since, or somebody tried to,
# nothing tells.
_FORGOTTEN_FIRST = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_class c
                 JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid
                WHERE c.oid = %s AND a.attnum = ANY(%s::int2[])
                  AND (a.xmin <> c.xmin OR a.xmax <> 0 OR c.xmax <> 0
                       OR a.cmin::text::int8 < c.cmin::text::int8))
"""
# TRUNCATE leaves the number of rows unknown (14 and later), VACUUM FULL and CLUSTER count them.
_UNCOUNTED = "SELECT reltuples = -1 FROM pg_catalog.pg_class WHERE oid = %s"
_BLOCKS = """
SELECT c.relkind <> 'r' OR pg_catalog.pg_relation_size(c.oid) > 0
  FROM pg_catalog.pg_class c WHERE c.oid = %s
"""
_NAME = """
SELECT n.nspname::text, c.relname::text FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s
"""

_XIDS = 1 << 32
_COMPARABLE_XIDS = 2_000_000_000
"""Transaction ids further apart can't be told by their age, of 32 bits."""
_TEXTS = {25, 1043}
"""text and varchar."""


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """A column's row in pg_attribute; `xmin`: the transaction that altered it last.

    `name`: a digest of its name (see `digest`); `default_oid`: of its pg_attrdef row, 0 without.
    """

    number: int
    type_oid: int
    typmod: int
    xmin: int
    has_missing: bool
    name: str
    default_oid: int = 0


@dataclass(frozen=True, slots=True)
class Storage:
    """How a table's rows were stored at some time.

    `columns`: those that can be sent. `files`: pg_relation_filenode by the OID of the table, or of
    each of its leaf partitions. `row_filter`: a digest of the publication's, empty without one.
    `former`: digests of the names that columns once had and none has now. `membership`: OID of the
    publication's entry for the table, 0 if it has none. `types`: what user-defined types of the
    columns are made of. `ended`: the transaction id (64 bits) below which all had ended then; 0
    where a publication sends the changes. `places`: by the OID of each of its leaf partitions,
    which transactions put it, and what is above it, there. `publication`: its mark, empty without.
    `numbered`: how many columns it has had; `dropped`: the numbers of those it has no more, and
    `unlisted` of those that the publication's column list leaves out, where just read.
    """

    columns: tuple[StoredColumn, ...]
    files: Mapping[int, int]
    row_filter: str = ""
    former: frozenset[str] = frozenset()
    membership: int = 0
    types: tuple[TypeParts, ...] = ()
    ended: int = field(default=0, compare=False)
    places: Mapping[int, str] = field(default_factory=dict)
    publication: str = ""
    numbered: int = 0
    dropped: frozenset[int] = field(default=frozenset(), compare=False)
    unlisted: frozenset[int] = field(default=frozenset(), compare=False)

    def __str__(self) -> str:
        """Write it for `_tables`."""
        columns = (
            f"{c.number}:{c.type_oid}:{c.typmod}:{c.xmin}:{c.name}:{c.default_oid}"
            f"{':m' * c.has_missing}"
            for c in self.columns
        )
        files = (f"{oid}:{file}" for oid, file in self.files.items())
        lists = [columns, files, [self.row_filter], sorted(self.former), [self.membership]]
        places = (f"{oid}:{place}" for oid, place in self.places.items())
        parts: list[Iterable[object]] = [*lists, self.types, [self.ended], places]
        parts += [[self.publication], [self.numbered]]
        return "|".join(",".join(map(str, part)) for part in parts)

    @classmethod
    def parse(cls, text: str) -> Storage | None:
        """Read what `str` wrote; None for anything else, as an older lake has."""
        try:
            columns, files, row_filter, former, membership, types, *more = text.split("|")
            ended, places, publication, numbered = (*more, "", "", "", "")[:4]
            return cls(
                tuple(_column(c) for c in columns.split(",") if c),
                {int(o): int(f) for o, f in (x.split(":") for x in files.split(",") if x)},
                row_filter,
                frozenset(f for f in former.split(",") if f),
                int(membership),
                tuple(TypeParts.parse(t) for t in types.split(",") if t),
                int(ended or 0),
                {int(o): p for o, p in (x.split(":") for x in places.split(",") if x)},
                publication,
                int(numbered or 0),
            )
        except ValueError:
            return None

    def differs_durably(self, other: Storage) -> bool:
        """Whether it is worth recording: more than other files of the same partitions."""
        alike = replace(self, files=other.files) == other
        return not alike or self.files.keys() != other.files.keys()

    def after(self, then: Storage) -> Storage:
        """Give it with what columns were called before."""
        present = {c.name for c in self.columns}
        once = then.former | {c.name for c in then.columns}
        return replace(self, former=(self.former | once) - present)


def _column(text: str) -> StoredColumn:
    *numbers, name, default_oid = text.removesuffix(":m").split(":")
    number, type_oid, typmod, xmin = map(int, numbers)
    has_missing = text.endswith(":m")
    return StoredColumn(number, type_oid, typmod, xmin, has_missing, name, int(default_oid))


def digest(text: str | None) -> str:
    """Give what tells one name or row filter from another; empty for none."""
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""


def is_altered(then: Storage, now: Storage) -> bool:
    """Whether a column was added, or altered in a way that a rewrite comes from.

    A VACUUM FULL touches pg_attribute too: it writes constant defaults into the rows, and forgets
    them there.
    """
    before = {c.number: c for c in then.columns}
    for column in now.columns:
        old = before.get(column.number)
        if old is None or (old.type_oid, old.typmod) != (column.type_oid, column.typmod):
            return True
        # ALTER TYPE makes the default's row anew, VACUUM FULL does not.
        is_vacuumed = old.has_missing and not column.has_missing
        is_vacuumed &= old.default_oid == column.default_oid
        if old.xmin != column.xmin and not is_vacuumed:
            return True
    return False


def _forgotten(then: Storage, now: Storage) -> list[StoredColumn]:
    """Give the columns whose constant default was written into the rows, as every rewrite does.

    As they were.
    """
    present = {c.number for c in now.columns if not c.has_missing}
    return [c for c in then.columns if c.has_missing and c.number in present]


def reassigned(then: Storage, now: Storage) -> str | None:
    """Say why a name or a type does not mean what it did for the rows of before."""
    before = {c.number: c for c in then.columns}
    once = then.former | {c.name for c in then.columns}
    for column in now.columns:
        old = before.get(column.number)
        if old is None:
            # Of one that came and went unseen, nothing tells what it was called.
            unseen = range(then.numbered + 1, column.number) if then.numbered else ()
            if column.name in once or not now.dropped.isdisjoint(unseen):
                return "a column was dropped and made anew"
        elif old.name != column.name:
            return "a column was renamed"
        elif not reads_alike(old.type_oid, column.type_oid):
            return "a column's type changed"
    types = {t.oid: t for t in then.types}
    if any(t.oid in types and t.has_changed_since(types[t.oid]) for t in now.types):
        return "labels or attributes of a type changed"
    return None


def reads_alike(then: int, now: int) -> bool:
    """Whether the same bytes have the same text: timestamp and timestamptz differ, for one."""
    return then == now or {then, now} <= _TEXTS


async def read_files(
    connection: AsyncConnection[Any], tables: Iterable[int]
) -> dict[int, dict[int, int]]:
    """Give `Storage.files` of these tables, by OID. Takes no lock."""
    return await _by_leaf(connection, _FILES, tables)


async def read_places(
    connection: AsyncConnection[Any], tables: Iterable[int]
) -> dict[int, dict[int, str]]:
    """Give `Storage.places` of those of these tables that have partitions, by OID; as above."""
    return await _by_leaf(connection, _PLACES, tables)


async def _by_leaf(
    connection: AsyncConnection[Any], query: LiteralString, tables: Iterable[int]
) -> dict[int, dict[int, Any]]:
    cursor = await connection.execute(query, (list(tables),))
    found: dict[int, dict[int, Any]] = {}
    for root, oid, value in await cursor.fetchall():
        found.setdefault(root, {})[oid] = value
    return found


async def difference(
    connection: AsyncConnection[Any], oid: int, then: Storage, now: Storage
) -> str | None:
    """Say why the rows are not what the stream told, None if nothing speaks for it."""
    if then.row_filter != now.row_filter:
        return "the publication's row filter changed"
    common = then.files.keys() & now.files.keys()
    replaced = [o for o in common if then.files[o] != now.files[o]]
    if replaced and is_altered(then, now):
        return "rewritten by ALTER TABLE"
    if replaced and await _was_forgotten_first(connection, oid, then, now):
        return "rewritten by ALTER TABLE"
    reason = reassigned(then, now)
    if reason is None and oid not in now.files:
        return await _of_partitions(connection, then, now, replaced)
    return await _of_file(connection, oid, then, now) if reason is None and replaced else reason


async def _of_file(
    connection: AsyncConnection[Any], table: int, then: Storage, now: Storage
) -> str | None:
    if then.ended:
        return "truncated" if await _was_truncated(connection, table, then, now) else None
    return _REWRITTEN if await _was_remade(connection, table) else None


async def _of_partitions(
    connection: AsyncConnection[Any], then: Storage, now: Storage, replaced: Iterable[int]
) -> str | None:
    if then.files.keys() - now.files.keys():
        return "a partition was detached or dropped"
    for partition in now.files.keys() - then.files.keys():
        if await _holds(connection, partition, _CAME_WITH_ROWS, unknown=True):
            return "a partition came with rows"
    if any(then.places.get(oid, place) != place for oid, place in now.places.items()):
        return "a partition was detached and attached again"
    for partition in replaced:
        if await _was_remade(connection, partition):
            return f"a partition was {_REWRITTEN}"
        if await _was_truncated(connection, partition, then, now):
            return "a partition was truncated by itself"
    return None


async def _was_forgotten_first(
    connection: AsyncConnection[Any], table: int, then: Storage, now: Storage
) -> bool:
    """Whether a constant default may have been forgotten because a column got other values."""
    forgotten = _forgotten(then, now)
    if not forgotten:
        return False
    if table not in now.files:  # VACUUM FULL leaves the columns of a partitioned table alone
        present = {c.number: c.xmin for c in now.columns}
        return any(present[c.number] != c.xmin for c in forgotten)
    cursor = await connection.execute(_FORGOTTEN_FIRST, (table, [c.number for c in forgotten]))
    row = await cursor.fetchone()
    return row is not None and bool(row[0])


async def _is_uncounted(connection: AsyncConnection[Any], table: int) -> bool:
    """Whether a table's rows were not counted since its file was replaced."""
    cursor = await connection.execute(_UNCOUNTED, (table,))
    row = await cursor.fetchone()
    return row is not None and bool(row[0])


async def _was_truncated(
    connection: AsyncConnection[Any], table: int, then: Storage, now: Storage
) -> bool:
    """Whether the file of a table without partitions was replaced by TRUNCATE.

    A row of before the last look tells that it was not, and is soon found; only where all rows were
    written anew since, or there are none, a VACUUM FULL is taken for a TRUNCATE. If that time is
    not known, what a TRUNCATE leaves in the catalog has to tell; an ANALYZE after it counts the
    rows.
    """
    if then.ended and now.ended - then.ended < _COMPARABLE_XIDS:
        xid = then.ended % _XIDS
        return not await _holds(connection, table, _OLDER_THAN_XID, unknown=False, xid=xid)
    if await _is_uncounted(connection, table):
        return True
    return not await _holds(connection, table, _OLDER_THAN_FILE, unknown=False)


async def _was_remade(connection: AsyncConnection[Any], table: int) -> bool:
    """Whether a file was replaced by an ALTER TABLE, though no column was altered: SET LOGGED say.

    Nothing is logged of what is done between SET UNLOGGED and SET LOGGED, and so nothing sent. Not
    told of a table without TOAST, nor where its row in pg_class was altered since (GRANT, SET).
    """
    row = await (await connection.execute(_REMADE, (table,))).fetchone()
    return row is not None and bool(row[0])


async def _holds(
    connection: AsyncConnection[Any],
    table: int,
    query: LiteralString,
    *,
    unknown: bool,
    xid: int = 0,
) -> bool:
    """Whether `query` holds for a table; `unknown` if its rows can't be looked at."""
    cursor = await connection.execute(_NAME, (table,))
    name = await cursor.fetchone()
    if name is None:
        return unknown
    question = sql.SQL(query).format(table=sql.Identifier(*name), oid=table, xid=xid)
    try:
        row = await (await connection.execute(question)).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        # The right to read a partitioned table is enough, and needs none on its partitions.
        return unknown and await _has_blocks(connection, table)
    except psycopg.errors.WrongObjectType:
        return unknown
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return False  # it has gone again: the next look says so
    return row is None or bool(row[0])


async def _has_blocks(connection: AsyncConnection[Any], table: int) -> bool:
    """Whether a table that can't be read may have rows."""
    row = await (await connection.execute(_BLOCKS, (table,))).fetchone()
    return row is None or bool(row[0])
