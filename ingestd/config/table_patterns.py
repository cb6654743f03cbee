"""The patterns of `tables`: which tables a source captures."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from ingestd.model.schema import TableId


def included(patterns: Sequence[str], schema: str, name: str) -> bool:
    """Return whether a table is included: a pattern matches, and none excludes it."""

    def matches(pattern: str) -> bool:
        wanted = TableId.parse(pattern.removeprefix("!"))
        return fnmatchcase(schema, wanted.schema) and fnmatchcase(name, wanted.name)

    found = [p for p in patterns if matches(p)]
    return bool(found) and not any(p.startswith("!") for p in found)
