"""What user-defined types are made of, where a change of it changes the text of values.

Renaming an enum's label and changing a composite type's attributes touch no row and leave no trace
in pg_attribute; every value that was written before has another text then. A label that is added
changes none; whether it was renamed before a catalog reading saw it, only the stream can tell (see
`ingestd.postgres.wal.enum_labels`). An attribute that is dropped again leaves its number behind.
What they are called is in no text, but in a struct. Source: PostgreSQL documentation, ALTER TYPE.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from psycopg import AsyncConnection

FIRST_USER_OID = 16384
"""Source: PostgreSQL, src/include/access/transam.h, FirstNormalObjectId."""
_ALL = 1 << 32

EACH_PART = """
   CROSS JOIN LATERAL (
    SELECT t.typbasetype, 'value' WHERE t.typtype = 'd' UNION ALL
    SELECT t.typelem, 'array' WHERE t.typelem <> 0 AND t.typlen = -1 UNION ALL
    SELECT r.rngsubtype, 'within' FROM pg_catalog.pg_range r
     WHERE t.oid IN (r.rngtypid, r.rngmultitypid) UNION ALL
    SELECT a.atttypid, 'within' FROM pg_catalog.pg_attribute a
     WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
    ) AS x(oid, how)"""
"""Joins to type `t` the types that it is directly made of, and how: the type below a domain
(`value`), of an array's elements, of what is `within` a composite type or a range."""
_PARTS = f"""
WITH RECURSIVE used AS (
  SELECT o AS root, o AS oid FROM unnest(%s::oid[]) o
  UNION
  SELECT used.root, x.oid FROM used JOIN pg_catalog.pg_type t ON t.oid = used.oid
{EACH_PART})
SELECT root::int8, used.oid::int8, true, e.oid::int8, e.enumlabel::text, e.xmin::text
  FROM used JOIN pg_catalog.pg_enum e ON e.enumtypid = used.oid
UNION ALL
SELECT root::int8, used.oid::int8, false, a.attnum::int8, a.atttypid || ':' || a.atttypmod, ''
  FROM used JOIN pg_catalog.pg_type t ON t.oid = used.oid AND t.typtype = 'c'
  JOIN pg_catalog.pg_attribute a ON a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT root::int8, used.oid::int8, false, 0, 'range', ''
  FROM used JOIN pg_catalog.pg_range r ON used.oid IN (r.rngtypid, r.rngmultitypid)
UNION ALL
SELECT root::int8, used.oid::int8, false, 0, c.relnatts::text, ''
  FROM used JOIN pg_catalog.pg_type t ON t.oid = used.oid AND t.typtype = 'c'
  JOIN pg_catalog.pg_class c ON c.oid = t.typrelid
UNION ALL
SELECT root::int8, -used.oid::int8, false, a.attnum::int8, a.attname::text, ''
  FROM used JOIN pg_catalog.pg_type t ON t.oid = used.oid AND t.typtype = 'c'
  JOIN pg_catalog.pg_attribute a ON a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
 ORDER BY 1, 2, 4
"""  # noqa: S608 - constants


@dataclass(frozen=True, slots=True)
class TypeParts:
    """A digest of a type's parts up to the one with the number `last`; `parts` where just read.

    `oid` is below 0 where they are what its attributes are called. `marks`: a digest of the
    transactions that altered an enum's labels, empty where not known. `is_inside`: where just read,
    the enum is part of a composite type or of a range.
    """

    oid: int
    last: int
    digest: str
    marks: str = ""
    parts: tuple[tuple[int, str], ...] = field(default=(), compare=False)
    altered: tuple[tuple[int, str], ...] = field(default=(), compare=False, repr=False)
    is_inside: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        """Write it."""
        marks = f":{self.marks}" if self.marks else ""
        return f"{self.oid}:{self.last}:{self.digest}{marks}"

    @property
    def labels(self) -> frozenset[str]:
        """An enum's labels, where just read; empty for any other type."""
        return frozenset(text for _, text in self.parts) if self.altered else frozenset()

    def labels_since(self, then: TypeParts) -> frozenset[str]:
        """Return the labels that were added since; `self` has just been read."""
        return frozenset(text for number, text in self.parts if number > then.last)

    @property
    def are_names(self) -> bool:
        """Whether they are no part of a value's text."""
        return self.oid < 0

    @classmethod
    def parse(cls, text: str) -> TypeParts:
        """Read what `str` wrote. Raises ValueError."""
        oid, last, digest, *marks = text.split(":")
        return cls(int(oid), int(last), digest, marks[0] if marks else "")

    def has_changed_since(self, then: TypeParts) -> bool:
        """Return whether parts that there were then may have been altered; `self` was just read.

        A label that was renamed there and back is called as before, but has another mark. Labels
        inside of other types can't be recognised in the stream, so a new one counts as well.
        """
        if _digest([p for p in self.parts if p[0] <= then.last]) != then.digest:
            return True
        if self.is_inside and self.labels_since(then):
            return True
        marks = _digest([a for a in self.altered if a[0] <= then.last])
        return bool(then.marks) and marks != then.marks


async def read_type_parts(
    connection: AsyncConnection[Any], types: Iterable[int]
) -> dict[int, tuple[TypeParts, ...]]:
    """Return, by OID, what those of these types that users made have inside them."""
    oids = [oid for oid in types if oid >= FIRST_USER_OID]
    if not oids:
        return {}
    cursor = await connection.execute(_PARTS, (oids,))
    found: dict[int, list[TypeParts]] = {}
    for (root, oid, is_enum), rows in groupby(await cursor.fetchall(), key=lambda r: r[:3]):
        listed = list(rows)
        parts = tuple((number, text) for *_, number, text, _ in listed)
        altered = tuple((number, xmin) for *_, number, _, xmin in listed) if is_enum else ()
        last = parts[-1][0] if is_enum else _ALL
        marks = _digest(altered) if is_enum else ""
        made = TypeParts(oid, last, _digest(parts), marks, parts, altered)
        found.setdefault(root, []).append(made)
    return {root: _placed(made) for root, made in found.items()}


def _placed(types: Sequence[TypeParts]) -> tuple[TypeParts, ...]:
    """Mark the enums of a column's type that has other parts as well."""
    if all(t.altered for t in types):
        return tuple(types)
    return tuple(replace(t, is_inside=bool(t.altered)) for t in types)


def _digest(parts: Sequence[tuple[int, str]]) -> str:
    return hashlib.sha256(repr(list(parts)).encode()).hexdigest()[:16]
