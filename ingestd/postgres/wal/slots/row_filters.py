"""Row filters at which decoding can't fail.

The server applies a filter before it sends a relation, so a row at which one fails is of a table
that is not known. Most filters compare columns with constants, by operators that raise no error.
Only texts as Postgres writes such filters are recognized; any other filter can fail.

Source: PostgreSQL, src/backend/utils/adt/ruleutils.c (get_rule_expr).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingestd.model.schema import Table

_WHOLE = frozenset({16, 20, 21, 23, 26, 700, 701, 1082, 1083, 1114, 1184, 1700, 2950})
"""OIDs of boolean, numbers, dates, times and uuid: no comparison of two of these fails."""
_TEXTS = frozenset({25, 1043})
"""text and varchar: to order them, a library compares, which may refuse them."""
_BOOLEAN = 16
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<constant>'(?:[^']|'')*' (?:::(?P<type>[a-z][a-z0-9\ ]*[a-z0-9]))? | \d+(?:\.\d+)?\b)
  | (?P<quoted>"(?:[^"]|"")+")
  | (?P<keyword>[A-Z]+\b)
  | (?P<name>[a-z_][a-z0-9_$]*)
  | (?P<sign><>|<=|>=|::text|[=<>(),\[\]])
    )""",
    re.VERBOSE,
)
_KEYWORDS = {"AND": "A", "OR": "A", "NOT": "N", "IS": "I", "NULL": "U", "ANY": "Y", "ARRAY": "R"}
_SIGNS = {"<>": "=", "<=": "<", ">=": "<", ">": "<", "::text": "t"}
_KNOWN_TYPES = frozenset(
    {
        *("text", "character varying", "boolean", "smallint", "integer", "bigint", "numeric"),
        *("real", "double precision", "date", "uuid", "oid", "time without time zone"),
        *("timestamp without time zone", "timestamp with time zone"),
    }
)
_LIST = r"R\[C(?:,C)*\]"
_REDUCED = [
    (re.compile(pattern), "T")
    for pattern in (
        r"\([WBSO]IN?U\)",
        r"\([WB][=<]C\)",
        rf"\([WBS]=Y\({_LIST}\)\)",
        r"\((?:S|\(S\)t)=C\)",
        r"\(NT\)|\(NB\)|\(T\)",
        r"\([TB](?:A[TB])+\)",
    )
]
"""Letters for parts of a filter: W a column of _WHOLE, B of boolean, S of _TEXTS, O of other types,
C a constant, T a condition that can't fail; `=` also stands for `<>`, `<` for all that order, t for
a cast to text."""
_MOST_CHARS = 10_000


def can_fail(table: Table) -> bool:
    """Return whether the row filter of a table, as Postgres writes it, may fail at some row."""
    text = table.row_filter
    if text is None:
        return False
    kinds = {column.name: _letter(column.type_oid) for column in table.columns}
    letters = None if len(text) > _MOST_CHARS else "".join(_letters(text, kinds))
    while letters:
        before = letters
        for pattern, reduced in _REDUCED:
            letters = pattern.sub(reduced, letters)
        if letters == before:
            break
    return letters not in {"T", "B"}


def _letter(type_oid: int) -> str:
    if type_oid == _BOOLEAN:
        return "B"
    return "W" if type_oid in _WHOLE else "S" if type_oid in _TEXTS else "O"


def _letters(text: str, kinds: dict[str, str]) -> Iterator[str]:
    """Yield a letter for each part of a filter; `?` for one that is not known."""
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            yield "?"
            return
        at = found.end()
        if found["constant"]:
            is_known = found["type"] is None or found["type"] in _KNOWN_TYPES
            yield "C" if is_known else "?"
        elif found["keyword"]:
            yield _KEYWORDS.get(found["keyword"], "?")
        elif found["quoted"]:
            yield kinds.get(found["quoted"][1:-1].replace('""', '"'), "?")
        elif found["name"]:
            yield "C" if found["name"] in {"true", "false"} else kinds.get(found["name"], "?")
        else:
            yield _SIGNS.get(found["sign"], found["sign"])
