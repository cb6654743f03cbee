"""What user-defined types are made of, where a change of it changes the text of values.

Renaming an enum's label and changing a composite type's attributes touch no row and leave no trace
in pg_attribute; every value that was written before has another text then. A label that is added
changes none. An attribute that is dropped again leaves its number behind. What they are called is
in no text, but in a struct. Source: PostgreSQL documentation, ALTER TYPE.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from psycopg import AsyncConnection

FIRST_USER_OID = 16384
"""Source: PostgreSQL, src/include/access/transam.h, FirstNormalObjectId."""
_ALL = 1 << 32

_PARTS = """
WITH RECURSIVE used AS (
  SELECT o AS root, o AS oid FROM unnest(%s::oid[]) o
  UNION
  SELECT used.root, x.oid FROM used JOIN pg_catalog.pg_type t ON t.oid = used.oid
   CROSS JOIN LATERAL (
    SELECT t.typbasetype WHERE t.typtype = 'd' UNION ALL
    SELECT t.typelem WHERE t.typelem <> 0 UNION ALL
    SELECT r.rngsubtype FROM pg_catalog.pg_range r
     WHERE t.oid IN (r.rngtypid, r.rngmultitypid) UNION ALL
    SELECT a.atttypid FROM pg_catalog.pg_attribute a
     WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
    ) AS x(oid))
SELECT root::int8, used.oid::int8, true, e.oid::int8, e.enumlabel::text
  FROM used JOIN pg_catalog.pg_enum e ON e.enumtypid = used.oid
UNION ALL
SELECT root::int8, used.oid::int8, false, a.attnum::int8, a.atttypid || ':' || a.atttypmod
  FROM used JOIN pg_catalog.pg_type t ON t.oid = used.oid AND t.typtype = 'c'
  JOIN pg_catalog.pg_attribute a ON a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT root::int8, used.oid::int8, false, 0, c.relnatts::text
  FROM used JOIN pg_catalog.pg_type t ON t.oid = used.oid AND t.typtype = 'c'
  JOIN pg_catalog.pg_class c ON c.oid = t.typrelid
UNION ALL
SELECT root::int8, -used.oid::int8, false, a.attnum::int8, a.attname::text
  FROM used JOIN pg_catalog.pg_type t ON t.oid = used.oid AND t.typtype = 'c'
  JOIN pg_catalog.pg_attribute a ON a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
 ORDER BY 1, 2, 4
"""


@dataclass(frozen=True, slots=True)
class TypeParts:
    """A digest of a type's parts up to the one with the number `last`; `parts` where just read.

    `oid` is below 0 where they are what its attributes are called.
    """

    oid: int
    last: int
    digest: str
    parts: tuple[tuple[int, str], ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        """Write it."""
        return f"{self.oid}:{self.last}:{self.digest}"

    @property
    def are_names(self) -> bool:
        """Whether they are no part of a value's text."""
        return self.oid < 0

    @classmethod
    def parse(cls, text: str) -> TypeParts:
        """Read what `str` wrote. Raises ValueError."""
        oid, last, digest = text.split(":")
        return cls(int(oid), int(last), digest)

    def has_changed_since(self, then: TypeParts) -> bool:
        """Whether parts that there were then are others now; `self` has just been read."""
        return _digest([p for p in self.parts if p[0] <= then.last]) != then.digest


async def read_type_parts(
    connection: AsyncConnection[Any], types: Iterable[int]
) -> dict[int, tuple[TypeParts, ...]]:
    """Give, by OID, what those of these types that users made have inside them."""
    oids = [oid for oid in types if oid >= FIRST_USER_OID]
    if not oids:
        return {}
    cursor = await connection.execute(_PARTS, (oids,))
    found: dict[int, list[TypeParts]] = {}
    for (root, oid, is_enum), rows in groupby(await cursor.fetchall(), key=lambda r: r[:3]):
        parts = tuple((number, text) for *_, number, text in rows)
        last = parts[-1][0] if is_enum else _ALL
        found.setdefault(root, []).append(TypeParts(oid, last, _digest(parts), parts))
    return {root: tuple(made) for root, made in found.items()}


def _digest(parts: Sequence[tuple[int, str]]) -> str:
    return hashlib.sha256(repr(list(parts)).encode()).hexdigest()[:16]
