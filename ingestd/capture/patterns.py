"""Tables that the config names outright, and that must exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ingestd.config import SourceSettings
from ingestd.errors import OperatorError
from ingestd.schema import TableId


def missing_tables(settings: SourceSettings, present: Iterable[TableId]) -> list[OperatorError]:
    """Give an error for each name in `tables` that has no wildcard and is not there.

    A pattern that matches nothing is no error: its tables may come later.
    """
    names = [str(t) for t in present]
    wanted = [p for p in settings.tables if not p.startswith("!") and not set(p) & set("*?[")]
    return [_missing(name, names) for name in wanted if name not in names]


def _missing(name: str, present: list[str]) -> OperatorError:
    near = difflib.get_close_matches(name, present, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return OperatorError(
        f"tables: {name!r} does not exist in the database",
        remedy=f"{hint}names are schema.table as in the catalog; correct `tables` or create it",
    )
