"""Which tables a source captures: the config's `tables` patterns."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from ingestd.errors import OperatorError
from ingestd.schema import TableId


class TablePatterns:
    """Patterns ``schema.table`` with ``*`` and ``?``; a leading ``!`` takes tables out again.

    A table is captured when a plain pattern matches it and no ``!`` pattern does. Names are
    compared as they are in the catalog: case counts, quotes don't belong.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._include = [p for p in patterns if not p.startswith("!")]
        self._included = [_regex(p) for p in self._include]
        self._excluded = [_regex(p[1:]) for p in patterns if p.startswith("!")]

    def matches(self, table: TableId) -> bool:
        """Whether the table is to be captured."""
        name = str(table)
        return any(r.fullmatch(name) for r in self._included) and not any(
            r.fullmatch(name) for r in self._excluded
        )

    def unmatched(self, tables: Iterable[TableId]) -> list[str]:
        """Give the plain patterns that no table matches."""
        names = [str(t) for t in tables]
        pairs = zip(self._include, self._included, strict=True)
        return [p for p, r in pairs if not any(r.fullmatch(n) for n in names)]

    def require(self, tables: Iterable[TableId]) -> None:
        """Raise OperatorError if a table that is named outright (no wildcard) does not exist."""
        present = list(tables)
        for pattern in self.unmatched(present):
            if not is_wildcard(pattern):
                raise missing_table(pattern, present)


def is_wildcard(pattern: str) -> bool:
    """Whether the pattern can match tables that do not exist yet."""
    return "*" in pattern or "?" in pattern


def missing_table(pattern: str, present: Iterable[TableId]) -> OperatorError:
    """Make the error for a table that is named outright and is not there."""
    near = difflib.get_close_matches(pattern, [str(t) for t in present], n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return OperatorError(
        f"tables: {pattern!r} does not exist in the database",
        remedy=f"{hint}names are schema.table, case counts; correct `tables` or create the table",
    )


def _regex(pattern: str) -> re.Pattern[str]:
    escaped = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.compile(escaped, re.DOTALL)
