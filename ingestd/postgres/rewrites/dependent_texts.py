"""Values whose text depends on other objects, such as those of regclass, regrole and aclitem.

The value is an object's OID; its text is the object's name. Renaming, moving or dropping the object
changes the text of every row that refers to it, without changing the row. So the catalog poll also
reads the texts of all objects that a type can refer to, and two readings show which values have a
different text now. The table is re-read only if it has a row with such a value.

`_tables` stores only a digest of the texts, in buckets by OID, and the highest OID that it covers.
New objects do not change the digest of older ones. Temporary objects are in no digest: they come
and go with every session.

Source: PostgreSQL documentation, "Object Identifier Types"; src/backend/utils/adt/regproc.c.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ingestd.model.errors import TableError
from ingestd.model.recorded import integer_of
from ingestd.model.schema import Table

_BUCKETS = 64
_DIGITS = 6
_MOST_OID = (1 << 32) - 1
"""Hexadecimal digits of a bucket's digest."""
PREFIX = "texts="
"""Prefix of the part of a serialized fingerprint that contains these digests."""

How = Literal["value", "array", "within"]
"""A column is of the type, an array of it, or has it inside a composite or a range."""


@dataclass(frozen=True, slots=True)
class TypeUse:
    """How a column, or a type, uses a type whose text depends on other objects.

    `type_oid`: the column's own type.
    """

    type: str
    how: How
    column: str = ""
    type_oid: int = 0


@dataclass(frozen=True, slots=True)
class TypeTexts:
    """The texts of the objects to which values of `type` refer.

    `last`: the highest OID. `buckets`: the digests. `objects`: the text of each object by OID, and
    `temporary` those of temporary ones; both are set only if just read.
    """

    type: str
    last: int
    buckets: str
    objects: Mapping[int, str] = field(default_factory=dict, compare=False)
    temporary: frozenset[str] = field(default=frozenset(), compare=False)

    @classmethod
    def from_catalog(
        cls, type_: str, objects: Mapping[int, str], temporary: Iterable[str] = ()
    ) -> TypeTexts:
        """Return the texts as they have just been read."""
        last = max(objects, default=0)
        return cls(type_, last, _digests(objects, last), objects, frozenset(temporary))

    @property
    def is_just_read(self) -> bool:
        """Return whether each object's text is known, not only the digests."""
        return bool(self.objects)

    def __str__(self) -> str:
        """Serialize it."""
        return f"{self.type}:{self.last}:{self.buckets}"

    @classmethod
    def parse(cls, text: str) -> TypeTexts:
        """Parse what `str` returned. Raises ValueError."""
        type_, last, buckets = text.split(":")
        return cls(type_, integer_of(last, 0, _MOST_OID), buckets)


def _digests(objects: Mapping[int, str], last: int) -> str:
    found = [hashlib.sha256() for _ in range(_BUCKETS)]
    for oid in sorted(objects):
        if oid <= last:
            found[oid % _BUCKETS].update(f"{oid}:{objects[oid]}\n".encode())
    return "".join(digest.hexdigest()[:_DIGITS] for digest in found)


@dataclass(frozen=True, slots=True)
class TableTexts:
    """The dependent texts of a table. `uses`: its columns that have any; set only if just read."""

    types: tuple[TypeTexts, ...] = ()
    uses: tuple[TypeUse, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        """Serialize it; empty for a table without such columns."""
        return PREFIX + ",".join(map(str, self.types)) if self.types else ""

    @classmethod
    def parse(cls, text: str) -> TableTexts:
        """Parse what `str` returned. Raises ValueError."""
        parts = text.removeprefix(PREFIX).split(",")
        return cls(tuple(TypeTexts.parse(part) for part in parts if part))


NO_TEXTS = TableTexts()


@dataclass(frozen=True, slots=True)
class StaleText:
    """Values of `type` whose text may have changed.

    Those that refer to `oids`, to an OID in `buckets` up to `last`, or to one above `last` if
    `is_above`; all of them if no earlier reading is known (`is_total`).
    """

    type: str
    oids: frozenset[int] = frozenset()
    buckets: frozenset[int] = frozenset()
    last: int = 0
    is_above: bool = False
    is_total: bool = False

    @property
    def modulus(self) -> int:
        """The number of buckets."""
        return _BUCKETS


def doubts(then: TableTexts, now: TableTexts) -> list[StaleText]:
    """Return the values whose text may differ from the earlier reading; `now` was just read.

    An OID above those covered by `then` counts only if an earlier run made that reading: the
    object's history since then is unknown. Within a run, `StreamedTexts` detects changes.
    """
    before = {known.type: known for known in then.types}
    found = (_doubt(before.get(texts.type), texts) for texts in now.types)
    return [doubt for doubt in found if doubt is not None]


def _doubt(then: TypeTexts | None, now: TypeTexts) -> StaleText | None:
    if then is None:
        return StaleText(now.type, is_total=True)
    if then.is_just_read:
        changed = (oid for oid, text in then.objects.items() if now.objects.get(oid) != text)
        oids = frozenset(changed)
        return StaleText(now.type, oids) if oids else None
    digests = _digests(now.objects, then.last)
    places = range(0, len(digests), _DIGITS)
    buckets = frozenset(
        n for n, at in enumerate(places) if digests[at:][:_DIGITS] != then.buckets[at:][:_DIGITS]
    )
    is_above = now.type != MONEY
    if not (buckets or is_above):
        return None
    return StaleText(now.type, buckets=buckets, last=then.last, is_above=is_above)


def reason_of(texts: Iterable[StaleText]) -> str:
    """Return why a table that holds such values is re-read."""
    if any(doubt.is_total for doubt in texts):
        return "the earlier texts of its values are not known"
    return "an object that its values refer to was renamed, moved or dropped"


def refuse_key(table: Table, uses: Mapping[int, tuple[TypeUse, ...]]) -> None:
    """Raise TableError if a column that identifies rows has a text that may change.

    `uses`: by the OID of the column's type.
    """
    for name in table.identifying:
        column = table.column(name)
        found = [use.type for use in uses.get(column.type_oid, ()) if use.type in REFERRING]
        if found:
            raise TableError(
                table.id,
                f"key column {name!r} {column.pg_type} contains {found[0]}, whose text changes "
                "when the object it refers to is renamed or dropped",
                remedy=_remedy(table, name, uses[column.type_oid]),
            )


def _remedy(table: Table, column: str, uses: Iterable[TypeUse]) -> str:
    names = [_quoted(n) for n in (table.id.schema, table.id.name, column)]
    how = {use.how for use in uses}
    is_oid = "aclitem" not in {use.type for use in uses} and "within" not in how
    kind = ("oid[]" if "array" in how else "oid") if is_oid else "text"
    return "ALTER TABLE {}.{} ALTER COLUMN {} TYPE {} USING {}::{};".format(
        *names, kind, names[2], kind
    )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


MONEY = "money"
REFERRING = frozenset(
    {
        "aclitem",
        "regclass",
        "regcollation",
        "regconfig",
        "regdatabase",
        "regdictionary",
        "regnamespace",
        "regoper",
        "regoperator",
        "regproc",
        "regprocedure",
        "regrole",
        "regtype",
    }
)
"""Types whose values are OIDs of objects, and whose texts are the objects' names."""
DEPENDENT = REFERRING | {MONEY}
"""A money value's text depends on lc_monetary, which is pinned; early versions did not pin it."""
