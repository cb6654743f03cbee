"""Fingerprints of user-defined types, to detect alterations that change the text of values.

Renaming an enum label or changing a composite type's attributes modifies no row and leaves no trace
in pg_attribute, but the text of every value written before changes. An added label changes no text.
If it was renamed before a catalog poll saw it, only the stream shows that (see
`ingestd.postgres.wal.enum_labels`). A dropped attribute leaves its number behind. Attribute names
occur in no text, but in a struct. Source: PostgreSQL documentation, ALTER TYPE.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, LiteralString

from psycopg import AsyncConnection

from ingestd.model.errors import TableError
from ingestd.model.recorded import LONG, integer_of
from ingestd.model.schema import TableId

FIRST_USER_OID = 16384
"""Source: PostgreSQL, src/include/access/transam.h, FirstNormalObjectId."""
_ALL = 1 << 32

EACH_PART: LiteralString = """
   CROSS JOIN LATERAL (
    SELECT t.typbasetype, 'value' WHERE t.typtype = 'd' UNION ALL
    SELECT t.typelem, 'array' WHERE t.typelem <> 0 AND t.typlen = -1 UNION ALL
    SELECT r.rngsubtype, 'within' FROM pg_catalog.pg_range r
     WHERE t.oid IN (r.rngtypid, r.rngmultitypid) UNION ALL
    SELECT a.atttypid, 'within' FROM pg_catalog.pg_attribute a
     WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
    ) AS x(oid, how)"""
"""Joins to type `t` its direct component types, with their role: the base of a domain (`value`),
the element of an array, or a type `within` a composite type or a range."""
MOST_TYPES = 500
"""Limit for the user-defined types of a table's columns, with all that they consist of."""
MOST_PARTS = 10_000
"""Limit for the labels and attributes of all these types."""
# One table's types are counted once each, however many columns use them.
_LARGE = f"""
WITH RECURSIVE used AS (
  SELECT u.relation, u.oid
    FROM ROWS FROM (pg_catalog.unnest(%s::int8[]), pg_catalog.unnest(%s::oid[])) u (relation, oid)
  UNION
  SELECT used.relation, x.oid FROM used JOIN pg_catalog.pg_type t ON t.oid = used.oid
{EACH_PART}
   WHERE x.oid >= {FIRST_USER_OID})
SELECT used.relation, pg_catalog.count(*), coalesce(pg_catalog.sum(parts.number), 0)::int8
  FROM used JOIN pg_catalog.pg_type t ON t.oid = used.oid
 CROSS JOIN LATERAL (
   SELECT pg_catalog.count(*) FROM pg_catalog.pg_enum e
    WHERE t.typtype = 'e' AND e.enumtypid = t.oid
   UNION ALL
   SELECT c.relnatts FROM pg_catalog.pg_class c WHERE t.typtype = 'c' AND c.oid = t.typrelid
   ) parts (number)
 GROUP BY used.relation
HAVING pg_catalog.count(*) > {MOST_TYPES} OR pg_catalog.sum(parts.number) > {MOST_PARTS}
"""  # noqa: S608 - constants
# Each type once, with its labels or attributes, and the types that it directly consists of.
_PARTS = f"""
WITH RECURSIVE used AS (
  SELECT o AS oid FROM pg_catalog.unnest(%s::oid[]) o
  UNION
  SELECT x.oid FROM used JOIN pg_catalog.pg_type t ON t.oid = used.oid
{EACH_PART})
SELECT used.oid::int8, 'label', e.oid::int8, e.enumlabel::text, e.xmin::text
  FROM used JOIN pg_catalog.pg_enum e ON e.enumtypid = used.oid
UNION ALL
SELECT used.oid::int8, 'part', a.attnum::int8, a.atttypid || ':' || a.atttypmod, ''
  FROM used JOIN pg_catalog.pg_type t ON t.oid = used.oid AND t.typtype = 'c'
  JOIN pg_catalog.pg_attribute a ON a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT used.oid::int8, 'part', 0, 'range', ''
  FROM used JOIN pg_catalog.pg_range r ON used.oid IN (r.rngtypid, r.rngmultitypid)
UNION ALL
SELECT used.oid::int8, 'part', 0, c.relnatts::text, ''
  FROM used JOIN pg_catalog.pg_type t ON t.oid = used.oid AND t.typtype = 'c'
  JOIN pg_catalog.pg_class c ON c.oid = t.typrelid
UNION ALL
SELECT -used.oid::int8, 'part', a.attnum::int8, a.attname::text, ''
  FROM used JOIN pg_catalog.pg_type t ON t.oid = used.oid AND t.typtype = 'c'
  JOIN pg_catalog.pg_attribute a ON a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT used.oid::int8, 'type', x.oid::int8, '', ''
  FROM used JOIN pg_catalog.pg_type t ON t.oid = used.oid
{EACH_PART}
 ORDER BY 1, 2, 3
"""  # noqa: S608 - constants


@dataclass(frozen=True, slots=True)
class TypeParts:
    """A digest of a type's parts up to the one with number `last`. `parts`: set only if just read.

    `oid`: negative if the parts are the names of its attributes. `marks`: a digest of the
    transactions that altered an enum's labels, empty if unknown. `is_inside`: set only if just
    read; the enum is part of a composite type or of a range.
    """

    oid: int
    last: int
    digest: str
    marks: str = ""
    parts: tuple[tuple[int, str], ...] = field(default=(), compare=False)
    altered: tuple[tuple[int, str], ...] = field(default=(), compare=False, repr=False)
    is_inside: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        """Serialize it."""
        marks = f":{self.marks}" if self.marks else ""
        return f"{self.oid}:{self.last}:{self.digest}{marks}"

    @property
    def labels(self) -> frozenset[str]:
        """An enum's labels, if just read; empty for any other type."""
        return frozenset(text for _, text in self.parts) if self.altered else frozenset()

    def labels_since(self, then: TypeParts) -> frozenset[str]:
        """Return the labels added since `then`; `self` has just been read."""
        return frozenset(text for number, text in self.parts if number > then.last)

    @property
    def are_names(self) -> bool:
        """Return whether the parts are names, which are not part of a value's text."""
        return self.oid < 0

    @classmethod
    def parse(cls, text: str) -> TypeParts:
        """Parse what `str` returned. Raises ValueError."""
        oid, last, digest, *marks = text.split(":")
        return cls(
            integer_of(oid, -LONG), integer_of(last, -LONG), digest, marks[0] if marks else ""
        )

    def has_changed_since(self, then: TypeParts) -> bool:
        """Return whether parts that existed `then` may have been altered; `self` was just read.

        A label that was renamed and renamed back has its old name, but another mark. Labels inside
        other types can't be recognized in the stream, so a new one counts as well.
        """
        if _digest([p for p in self.parts if p[0] <= then.last]) != then.digest:
            return True
        if self.is_inside and self.labels_since(then):
            return True
        marks = _digest([a for a in self.altered if a[0] <= then.last])
        return bool(then.marks) and marks != then.marks


async def find_large(
    connection: AsyncConnection[Any], types: Mapping[int, Collection[int]]
) -> dict[int, str]:
    """Return which tables have types that are too large to be described, and why.

    `types`: by table OID, the type OIDs of its columns. Without user-defined ones among them no
    query is made.
    """
    pairs = [(t, oid) for t, oids in types.items() for oid in oids if oid >= FIRST_USER_OID]
    if not pairs:
        return {}
    tables, oids = zip(*pairs, strict=True)
    cursor = await connection.execute(_LARGE, (list(tables), list(oids)))
    return {
        table: f"its columns consist of {number:,} user-defined types with {parts:,} labels and"
        f" attributes, which is more than {MOST_TYPES:,} or {MOST_PARTS:,}"
        for table, number, parts in await cursor.fetchall()
    }


def too_large(table: TableId, why: str) -> TableError:
    """Return the error for a table that `find_large` has found."""
    return TableError(
        table, why, remedy="exclude the columns (`exclude_columns`), or give them the type text"
    )


async def read_type_parts(
    connection: AsyncConnection[Any], types: Iterable[int]
) -> dict[int, tuple[TypeParts, ...]]:
    """Return, by OID, the component types of the user-defined ones among these types."""
    oids = {oid for oid in types if oid >= FIRST_USER_OID}
    if not oids:
        return {}
    cursor = await connection.execute(_PARTS, (sorted(oids),))
    described: dict[int, TypeParts] = {}
    below: dict[int, list[int]] = {}
    for (oid, kind), rows in groupby(await cursor.fetchall(), key=lambda r: r[:2]):
        listed = [row[2:] for row in rows]
        if kind == "type":
            below[oid] = [number for number, *_ in listed]
            continue
        parts = tuple((number, text) for number, text, _ in listed)
        is_enum = kind == "label"
        altered = tuple((number, xmin) for number, _, xmin in listed) if is_enum else ()
        last = parts[-1][0] if is_enum else _ALL
        marks = _digest(altered) if is_enum else ""
        described[oid] = TypeParts(oid, last, _digest(parts), marks, parts, altered)
    found = {}
    for root in oids:
        inside = sorted(s for oid in _all_below(root, below) for s in (oid, -oid) if s in described)
        if inside:
            found[root] = _placed([described[oid] for oid in inside])
    return found


def _all_below(root: int, below: Mapping[int, Iterable[int]]) -> set[int]:
    """Return the type and all that it consists of."""
    found, left = {root}, [root]
    while left:
        new = {oid for oid in below.get(left.pop(), ()) if oid not in found}
        found |= new
        left += new
    return found


def _placed(types: Sequence[TypeParts]) -> tuple[TypeParts, ...]:
    """Mark the enums of a column's type if it also has other parts."""
    if all(t.altered for t in types):
        return tuple(types)
    return tuple(replace(t, is_inside=True) if t.altered else t for t in types)


def _digest(parts: Sequence[tuple[int, str]]) -> str:
    return hashlib.sha256(repr(list(parts)).encode()).hexdigest()[:16]
