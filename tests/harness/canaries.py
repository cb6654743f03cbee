"""An unmistakable value for every type that columns of a server can have.

The types are read from pg_type, so those of newer servers and of extensions are included.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import psycopg
from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

    from tests.harness.databases import Database

WORD = "Kanarienvogel"
SCHEMA = WORD.lower()
"""Schema of the objects named by values of regclass and similar types. It is not captured."""
_MOMENT = datetime(7316, 4, 9, 17, 31, 49, 264973, tzinfo=UTC)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_BITS = "101100111000111100101"
_ISN = ("9780393040029", "978-0-393-04002-9", "979-0-2600-0043-8", "977-1436-452-00-8",
        "0-393-04002-X", "M-2600-0043-8", "1436-4522", "220356483481")  # fmt: skip
TEXTS = (
    WORD,
    f'"{WORD}"',
    f'"{WORD}"=>"{WORD}"',
    "7316492",
    "-31649",
    "31649 31648",
    "7316-04-09",
    "7316-04-09 17:31:49.264973+00",
    "17:31:49.264973",
    "7316492 days",
    "7316492a-7316-492a-8731-6492a7316492",
    "73.164.92.73",
    "73.164.92.0/24",
    "73:16:49:2a:2b:2c",
    "73:16:49:2a:2b:2c:2d:2e",
    _BITS,
    "7316492A/7316492B",
    "7316492:7316499:",
    "(7316492,7)",
    "((7316492,7),(7,7316492))",
    "{7316492,7,1}",
    "<(7316492,7),7>",
    "[7316492,7]",
    "[31648,7]",
    "7.3164",
    "{1:7316492}/5",
    "{1:31649}/5",
    f"{SCHEMA}=r/{SCHEMA}",
    f"{SCHEMA}.{SCHEMA}",
    f"{SCHEMA}.{SCHEMA}(integer)",
    f"{SCHEMA}.###",
    f"{SCHEMA}.###(integer,integer)",
    *_ISN,
    "(6378168, 0, 0)",
)
"""Input for the input functions. A type's canary is the first one that survives a round trip."""
FORMS = (
    WORD.lower(),
    WORD.encode().hex(),
    base64.b64encode(WORD.encode()).decode().rstrip("=").lower()[:-1],
    "7316492",
    "7,316,492",
    "7.316492e",
    "7316.492",
    "-31649",
    "31649 31648",
    "31648,7",
    "7.3164",
    "1:31649",
    "7316-04-09",
    "7316-4-9",
    "7316, 4, 9",
    "17:31:49.264973",
    "17, 31, 49",
    str((_MOMENT - _EPOCH).days),
    str(int((_MOMENT - _EPOCH).total_seconds())),
    "73.164.92.",
    "73:16:49",
    _BITS,
    "###",
    *(number.lower() for number in _ISN),
    "6378168",
)
"""The forms in which a server or a library may print a canary, in lower case."""
WITHOUT = {"bool", "char"}
"""Types whose values are too short to be recognized."""
WITHOUT_INPUT = re.compile(
    r"pg_(node_tree|ndistinct|dependencies|mcv_list|brin_\w+)"
    r"|xml|gtsvector|gbtreekey\w*|ghstore|gtrgm|ltree_gist|intbig_gkey"
)
"""Types without input (xml: on servers built without libxml)."""
EXTENSIONS = ("citext", "hstore", "ltree", "cube", "earthdistance", "pg_trgm", "seg", "isn", "lo",
              "intarray", "vector", "btree_gist")  # fmt: skip
SETUP = (
    f"CREATE ROLE {SCHEMA}",  # a role belongs to the server: only one database can have it
    f"CREATE SCHEMA {SCHEMA}",
    f"CREATE TABLE {SCHEMA}.{SCHEMA} ()",
    f"CREATE FUNCTION {SCHEMA}.{SCHEMA}(int) RETURNS int LANGUAGE sql AS 'SELECT 1'",
    f"CREATE FUNCTION {SCHEMA}.added(int, int) RETURNS int LANGUAGE sql AS 'SELECT 1'",
    f"CREATE OPERATOR {SCHEMA}.### (FUNCTION = {SCHEMA}.added, LEFTARG = int, RIGHTARG = int)",
    f"CREATE TEXT SEARCH CONFIGURATION {SCHEMA}.{SCHEMA} (COPY = simple)",
    f"CREATE TEXT SEARCH DICTIONARY {SCHEMA}.{SCHEMA} (TEMPLATE = simple)",
    f'CREATE COLLATION {SCHEMA}.{SCHEMA} FROM "C"',
    f"CREATE TYPE public.plumage AS ENUM ('{WORD}', 'dull')",
    "CREATE DOMAIN public.colour AS public.plumage CHECK (VALUE <> 'dull')",
    "CREATE DOMAIN public.song AS text CHECK (VALUE <> '')",
    "CREATE DOMAIN public.songs AS text[]",
    "CREATE DOMAIN public.weight AS numeric(12, 2) NOT NULL CHECK (VALUE > 0)",
    """CREATE TYPE public.bird AS (name text, hatched date, weight public.weight,
       colour public.plumage, rings int8[])""",
    "CREATE TYPE public.pair AS (he public.bird, she public.bird)",
    "CREATE DOMAIN public.real_bird AS public.bird CHECK ((VALUE).name <> '')",
    "CREATE TYPE public.songrange AS RANGE (subtype = text)",
    "CREATE TYPE public.opaque",
    """CREATE FUNCTION public.opaque_in(cstring) RETURNS public.opaque
       LANGUAGE internal IMMUTABLE STRICT AS 'textin'""",
    """CREATE FUNCTION public.opaque_out(public.opaque) RETURNS cstring
       LANGUAGE internal IMMUTABLE STRICT AS 'textout'""",
    "CREATE TYPE public.opaque (INPUT = public.opaque_in, OUTPUT = public.opaque_out, LIKE = text)",
)
_TYPES = """
SELECT t.oid::int8, n.nspname::text, t.typname::text, t.typtype::text, t.typbasetype::int8,
       CASE WHEN t.typcategory = 'A' AND t.typsubscript = 'array_subscript_handler'::regproc
            THEN t.typelem::int8 ELSE 0 END,
       coalesce(r.rngsubtype::int8, m.rngtypid::int8, 0),
       ARRAY(SELECT a.atttypid::int8 FROM pg_attribute a WHERE t.typtype = 'c'
                AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
              ORDER BY a.attnum),
       (SELECT e.enumlabel::text FROM pg_enum e WHERE e.enumtypid = t.oid
         ORDER BY e.enumsortorder LIMIT 1),
       EXISTS (SELECT FROM pg_opclass o JOIN pg_am a ON a.oid = o.opcmethod
                WHERE a.amname = 'btree' AND o.opcdefault AND o.opcintype = t.oid)
  FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
  LEFT JOIN pg_class c ON c.oid = t.typrelid
  LEFT JOIN pg_range r ON r.rngtypid = t.oid
  LEFT JOIN pg_range m ON m.rngmultitypid = t.oid
  LEFT JOIN pg_type e ON e.oid = t.typelem AND t.typcategory = 'A'
  LEFT JOIN pg_class ec ON ec.oid = e.typrelid
 WHERE t.typisdefined AND t.typtype IN ('b', 'd', 'e', 'r', 'm', 'c')
   AND coalesce(c.relkind, 'c') = 'c' AND coalesce(ec.relkind, 'c') = 'c'
   AND coalesce(e.typtype, 'b') <> 'p'
   AND t.typname NOT IN ('yes_or_no', '_yes_or_no')  -- of information_schema: YES and NO alone
 ORDER BY n.nspname, t.typname
"""


@dataclass(frozen=True, slots=True)
class CanaryType:
    """A type that a column can have. `value`: its canary as SQL, or None."""

    oid: int
    name: tuple[str, str]
    kind: str
    base: int
    element: int
    part: int
    """A range's subtype, or a multirange's range type."""
    attributes: Sequence[int]
    label: str | None
    is_ordered: bool
    """Whether it has its own operator class for indexes."""
    value: sql.Composable | None = field(default=None, compare=False)

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(*self.name)

    @property
    def column(self) -> str:
        """The name of a column of this type."""
        return re.sub(r"\W", "_", "_".join(("c", *self.name[self.name[0] == "pg_catalog" :])))

    def is_known(self, text: str) -> bool:
        """Return whether its canary can be recognized in the server's output."""
        return any(form in text.lower() for form in FORMS)


class Canaries:
    """The canaries of all types of a database."""

    def __init__(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        self._connection = connection
        rows = connection.execute(_TYPES).fetchall()
        self._types = {row[0]: CanaryType(row[0], (row[1], row[2]), *row[3:]) for row in rows}
        self._values: dict[int, sql.Composable | None] = {}

    def types(self) -> list[CanaryType]:
        """Return all types that have a canary, and those whose values are too short for one."""
        found = []
        for known in self._types.values():
            value = self._value(known.oid)
            if value is None:
                assert WITHOUT_INPUT.fullmatch(known.name[1].lstrip("_")), known.name
                continue
            text = self._text(value)
            is_known = text is not None and known.is_known(text)
            assert is_known or known.name[1].lstrip("_") in WITHOUT, (known.name, text)
            found.append(replace(known, value=value))
        return found

    def _value(self, oid: int) -> sql.Composable | None:
        if oid == 0:
            return None
        if oid not in self._values:
            self._values[oid] = self._found(self._types[oid])
        return self._values[oid]

    def _found(self, known: CanaryType) -> sql.Composable | None:
        if known.kind == "e":
            return self._cast(sql.Literal(known.label), known)
        if known.kind == "c":
            parts = [self._value(a) or sql.SQL("NULL") for a in known.attributes]
            return self._cast(sql.SQL("ROW({})").format(sql.SQL(", ").join(parts)), known)
        inner = self._value(known.element or known.part or known.base)
        if inner is None:
            return None if known.element else self._written(known)
        if known.element:
            return self._cast(sql.SQL("ARRAY[{}]").format(inner), known)
        if known.kind in "rm":
            made = "{0}({1}, {1}, '[]')" if known.kind == "r" else "{0}({1})"
            return sql.SQL(made).format(known.identifier, inner)
        value = self._cast(sql.SQL("({})").format(inner), known)  # a domain, whose checks may fail
        return value if self._text(value) is not None else self._written(known)

    @staticmethod
    def _cast(value: sql.Composable, known: CanaryType) -> sql.Composable:
        return sql.SQL("{}::{}").format(value, known.identifier)

    def _written(self, known: CanaryType) -> sql.Composable | None:
        shortest = None
        for text in (*TEXTS, "t", "x"):
            value = self._cast(sql.Literal(text), known)
            written = self._text(value)
            shortest = shortest or (None if written is None else value)
            if written is not None and known.is_known(written):
                return value
        return shortest if known.name[1] in WITHOUT else None

    def _text(self, value: sql.Composable) -> str | None:
        """Return the server's output of a value; None if the server rejects it."""
        try:
            query = sql.SQL("SELECT concat({})").format(value)
            [[written]] = self._connection.execute(query).fetchall()
        except psycopg.Error:
            return None
        return str(written)


def make_canaries(database: Database) -> list[CanaryType]:
    """Create the types of this module in a database, and return all of its types."""
    available = {name for (name,) in database.rows("SELECT name FROM pg_available_extensions")}
    extensions = [f"CREATE EXTENSION {name} CASCADE" for name in EXTENSIONS if name in available]
    database.execute(*(e for e in extensions if "earth" not in e or "cube" in available), *SETUP)
    with database.connect() as connection:
        return Canaries(connection).types()


def told_forms(text: str, forms: Iterable[str] = FORMS) -> list[str]:
    """Return the forms of canaries in a text, each with the text around it."""
    low = text.lower()
    return [
        f"{form}: ...{text[max(0, low.index(form) - 300) :][:600]}" for form in forms if form in low
    ]
