"""Checks that all changes of a table are sent, and that they identify their rows.

For a partitioned table this depends on its partitions. Each is logged or not, and has its own
replica identity, which ALTER TABLE on the root does not change. The replica identity determines
whether the server accepts UPDATE and DELETE once the table is published, and which columns of the
old row are sent. The RELATION message contains the root's.

Source: PostgreSQL, CheckCmdReplicaIdentity (executor/execReplication.c), ExtractReplicaIdentity
(access/heap/heapam.c); documentation, ALTER TABLE, "REPLICA IDENTITY".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, LiteralString

from psycopg import AsyncConnection, sql

from ingestd.model.errors import TableError
from ingestd.model.schema import Table, TableId
from ingestd.postgres.catalog.publication import Published
from ingestd.postgres.connection.quoting import printed

_PARTITIONS = """
WITH RECURSIVE tree AS (
  SELECT c.oid AS root, c.oid AS parent, c.oid, c.relkind
    FROM pg_catalog.pg_class c WHERE c.oid = ANY(%s::oid[]) AND c.relkind = 'p'
  UNION ALL
  SELECT t.root, t.oid, c.oid, c.relkind FROM tree t
    JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid AND NOT i.inhdetachpending
    JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
   WHERE t.relkind = 'p'),
leaf AS (
  SELECT t.root, n.nspname::text AS schema, c.relname::text AS name, c.relreplident = 'f' AS whole,
         c.relpersistence = 'u' AS unlogged, c.relkind = 'f' AS "foreign", t.parent,
         ARRAY(SELECT a.attname::text FROM pg_catalog.pg_index i
                 JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid
                  AND a.attnum = ANY((i.indkey::int2[])[0:i.indnkeyatts - 1])
                WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate
                  AND CASE c.relreplident WHEN 'd' THEN i.indisprimary
                                          WHEN 'i' THEN i.indisreplident ELSE false END
                ORDER BY 1) AS columns
    FROM tree t JOIN pg_catalog.pg_class c USING (oid)
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
   WHERE c.relkind <> 'p')
SELECT DISTINCT ON (root, whole, columns, unlogged, "foreign")
       root::int8, schema, name, whole, columns, unlogged, "foreign",
       pn.nspname::text, p.relname::text
  FROM leaf JOIN pg_catalog.pg_class p ON p.oid = parent
  JOIN pg_catalog.pg_namespace pn ON pn.oid = p.relnamespace
 ORDER BY root, whole, columns, unlogged, "foreign", schema, name
"""
_UNSENT_KEY = "its replica identity has generated column {!r}, which is not published"
_ADD_KEY = "add a primary key without generated columns; then "
_LEAVES: LiteralString = " WHERE isleaf"
_ALTER_TREE = (
    "DO $$ DECLARE part pg_catalog.regclass; BEGIN"
    " FOR part IN SELECT relid FROM pg_catalog.pg_partition_tree({}){} LOOP"
    " EXECUTE pg_catalog.format('ALTER TABLE %s REPLICA IDENTITY {}', part); END LOOP; END $$;"
)


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition that holds rows, and what the server can send of their changes.

    Its replica identity is the complete row (`whole`) or `columns`; neither, if it has none.
    """

    id: TableId
    whole: bool
    columns: frozenset[str]
    unlogged: bool = False
    foreign: bool = False
    parent: TableId | None = None

    @property
    def is_unidentified(self) -> bool:
        """Return whether the server refuses UPDATE and DELETE on it once it is published."""
        return not (self.whole or self.columns or self.foreign)


@dataclass(frozen=True, slots=True)
class PublishedIdentity:
    """What, besides a table's own replica identity, decides which of its changes can be sent.

    `unsent`: generated columns that are not sent; `unsent_key`: those in the replica identity's
    index. `partitions`: one of each group that differs only in names. `refuses_unsent_identity`:
    the server refuses UPDATE and DELETE if an identity contains an unsent column (18+).
    `not_validated`: the NOT NULL constraint that disqualifies the identity's index (18+).
    """

    unsent: frozenset[str] = frozenset()
    unsent_key: frozenset[str] = frozenset()
    partitions: tuple[Partition, ...] = ()
    refuses_unsent_identity: bool = False
    not_validated: str | None = None


NOTHING_ELSE = PublishedIdentity()


async def list_partitions(
    connection: AsyncConnection[Any], tables: Iterable[int]
) -> dict[int, tuple[Partition, ...]]:
    """Return the partitions of these tables (OIDs), one of each group that is the same."""
    cursor = await connection.execute(_PARTITIONS, (list(tables),))
    found: dict[int, tuple[Partition, ...]] = {}
    for root, schema, name, whole, columns, unlogged, foreign, *above in await cursor.fetchall():
        table, parent = TableId(schema, name), TableId(*above)
        partition = Partition(table, whole, frozenset(columns), unlogged, foreign, parent)
        found[root] = (*found.get(root, ()), partition)
    return found


def only_inserts(
    table: Table, entry: Published | None, sending: PublishedIdentity = NOTHING_ELSE
) -> str | None:
    """Return why the server refuses UPDATE and DELETE on this table once published; None if not.

    `table`: as in the catalog.
    """
    if sending.not_validated is not None:
        return f"constraint {sending.not_validated!r} of its replica identity is NOT VALID"
    if not table.identity:
        return "no usable replica identity"
    for partition in sending.partitions:
        if partition.is_unidentified:
            return f"partition {partition.id} has no usable replica identity"
    refused = _refused_for_unsent(table, sending)
    if refused is not None:
        return refused
    if entry is not None and entry.columns is not None:
        hidden = [n for n in table.identity if n not in entry.columns]
        if hidden:
            return f"its column list lacks {hidden[0]!r} of the replica identity"
    return None


def _refused_for_unsent(table: Table, sending: PublishedIdentity) -> str | None:
    """Return which identity has an unsent generated column, if the server refuses that."""
    if not sending.refuses_unsent_identity:
        return None
    for name in sending.unsent_key:
        return _UNSENT_KEY.format(name)
    if sending.unsent and _gives_whole_rows(table, sending):
        unsent = min(sending.unsent)
        return f"REPLICA IDENTITY FULL, with generated column {unsent!r} that is not published"
    for partition in sending.partitions:
        for name in partition.columns & sending.unsent:
            lacking = f"generated column {name!r}, which is not published"
            return f"the replica identity of partition {partition.id} has {lacking}"
    return None


def _gives_whole_rows(table: Table, sending: PublishedIdentity) -> bool:
    """Return whether complete old rows are sent for any part of it."""
    if sending.partitions:
        return any(partition.whole for partition in sending.partitions)
    return table.replica_identity == "f"


def only_keys(table: Table, sending: PublishedIdentity) -> Partition | None:
    """Return a partition that sends only keys, if the table's identity is the complete row."""
    if table.replica_identity != "f":
        return None
    return next((p for p in sending.partitions if not p.whole), None)


def _unlogged(table: Table, sending: PublishedIdentity) -> TableError | None:
    """Return the error for a table whose changes are not all in the WAL."""
    for partition in sending.partitions:
        quoted = _quoted(partition.id)
        if partition.unlogged:
            what = "is unlogged: it writes no WAL, and a crash empties it"
            remedy = f"ALTER TABLE {quoted} SET LOGGED;"
        elif partition.foreign:
            what = "is a foreign table: its changes are not in this server's WAL"
            parent = _quoted(partition.parent or table.id)
            remedy = f"ALTER TABLE {parent} DETACH PARTITION {quoted};"
        else:
            continue
        return TableError(table.id, f"partition {partition.id} {what}", remedy=remedy)
    return None


def _insufficient(table: Table, sending: PublishedIdentity) -> str | None:
    """Return what old rows will lack to identify their rows; None if they have everything."""
    if sending.not_validated is not None:
        return f"constraint {sending.not_validated!r} of its replica identity is NOT VALID"
    if not sending.refuses_unsent_identity:  # else it is not sent at all
        for name in sending.unsent_key:
            return _UNSENT_KEY.format(name)
    for partition in sending.partitions:
        if partition.is_unidentified:
            continue
        if not table.identity:
            return f"partition {partition.id} has a replica identity, but the table has none"
        if partition.whole:
            continue
        if not table.identifying:
            return f"partition {partition.id} does not send complete old rows, and it has no key"
        lacking = [name for name in table.identifying if name not in partition.columns]
        if lacking:
            return f"the replica identity of partition {partition.id} lacks {lacking[0]!r}"
    return None


def identify(
    table: Table,
    name: str = "",
    entry: Published | None = None,
    sending: PublishedIdentity = NOTHING_ELSE,
) -> str:
    """Return SQL that gives the table an identity, or adds its columns to publication `name`."""
    if sending.not_validated is not None:
        constraint = printed(sql.Identifier(sending.not_validated))
        return f"ALTER TABLE {_quoted(table.id)} VALIDATE CONSTRAINT {constraint};"
    if sending.unsent_key and table.key:
        return _alter(table, "DEFAULT", sending)
    if sending.unsent_key or _refused_for_unsent(table, sending):
        return whole_rows(table, sending)
    if table.identity and any(p.is_unidentified for p in sending.partitions):
        return _alter_partitions(table, sending)
    if table.identity and entry is not None and entry.columns is not None:
        quoted = _quoted(table.id)
        alter = f"ALTER PUBLICATION {printed(sql.Identifier(name))}"
        return f"{alter} DROP TABLE ONLY {quoted}; {alter} ADD TABLE ONLY {quoted};"
    return _add_identity(table, sending)


def _add_identity(table: Table, sending: PublishedIdentity) -> str:
    if table.replica_identity in {"n", "i"} and table.key:
        return _alter(table, "DEFAULT", sending)
    whole = whole_rows(table, sending)
    return whole if whole.startswith(_ADD_KEY) else f"add a primary key, or {whole}"


def incomplete(
    table: Table,
    entry: Published | None,
    *,
    manage: bool,
    sending: PublishedIdentity = NOTHING_ELSE,
) -> TableError | None:
    """Return the error for a table whose changes would be missing, unidentifiable or refused.

    The last does not apply if another role already publishes the table: the server refuses its
    UPDATE and DELETE already, and the inserts and truncates that remain are captured.
    """
    unlogged = _unlogged(table, sending)
    if unlogged is not None:
        return unlogged
    lacking = _insufficient(table, sending)
    if lacking is not None:
        why = f"{lacking}: updates and deletes would not identify the row they change"
        of_table = sending.not_validated or sending.unsent_key or not table.identity
        remedy = identify(table, sending=sending) if of_table else _alter_partitions(table, sending)
        return TableError(table.id, why, remedy=remedy)
    if entry is not None and not (manage and entry.membership is not None):
        return None
    why_not = only_inserts(table, None, sending)
    if why_not is None:
        return None
    return TableError(
        table.id,
        f"{why_not}: publishing it would make its own UPDATE and DELETE fail",
        remedy=identify(table, sending=sending),
    )


def _quoted(table: TableId) -> str:
    return printed(sql.Identifier(table.schema, table.name))


def _alter(table: Table, identity: LiteralString, sending: PublishedIdentity) -> str:
    """Return SQL that gives a table and its partitions this identity."""
    if sending.partitions:
        return _for_tree(table, identity, "")
    return f"ALTER TABLE {_quoted(table.id)} REPLICA IDENTITY {identity};"


def _alter_partitions(table: Table, sending: PublishedIdentity) -> str:
    """Return SQL that gives the partitions an identity that serves as the table's."""
    if table.key and table.replica_identity in {"d", "f"}:
        return _for_tree(table, "DEFAULT", _LEAVES)
    return whole_rows(table, sending, _LEAVES)


def whole_rows(table: Table, sending: PublishedIdentity, which: LiteralString = "") -> str:
    """Return SQL for sending complete rows, or the alternative if the server would refuse it."""
    if not (sending.refuses_unsent_identity and sending.unsent):
        if which:
            return _for_tree(table, "FULL", which)
        return _alter(table, "FULL", sending)
    key = "" if table.key else _ADD_KEY
    return f"{key}{_alter(table, 'DEFAULT', sending)}"


def _for_tree(table: Table, identity: LiteralString, which: LiteralString) -> str:
    root = sql.Literal(_quoted(table.id))
    statement = sql.SQL(_ALTER_TREE).format(root, sql.SQL(which), sql.SQL(identity))
    return f"{printed(statement)}  -- and the same for each future partition"
