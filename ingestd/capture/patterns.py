"""Tables that the config names outright, and that must exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from ingestd.config import SourceSettings, included
from ingestd.errors import TableError
from ingestd.ports import Refused
from ingestd.recorded import Notice
from ingestd.schema import Table, TableId

_WILD = set("*?[")


def missing_tables(settings: SourceSettings, present: Iterable[TableId]) -> list[Refused]:
    """Refuse each name in `tables` that has no wildcard and is not there.

    A pattern that matches nothing is no fault: its tables may come later.
    """
    tables = set(present)
    wanted = [p for p in settings.tables if not p.startswith("!") and not set(p) & _WILD]
    missing = [table for table in map(TableId.parse, wanted) if table not in tables]
    return [_missing(table, sorted(map(str, tables))) for table in missing]


def is_left_out(settings: SourceSettings, table: TableId, columns: Sequence[object]) -> bool:
    """Whether a table has no columns, and only a pattern asks for it: nobody misses it."""
    return not columns and not any(
        not p.startswith("!") and not set(p) & _WILD and TableId.parse(p) == table
        for p in settings.tables
    )


def unmatched(settings: SourceSettings, present: Iterable[TableId]) -> list[str]:
    """Give the patterns with wildcards that match no table at present."""
    tables = list(present)
    patterns = [p for p in settings.tables if not p.startswith("!") and set(p) & _WILD]
    return [
        p for p in patterns if not any(included([p], table.schema, table.name) for table in tables)
    ]


def unmatched_notices(settings: SourceSettings, present: Iterable[TableId]) -> tuple[Notice, ...]:
    """Return a notice for each pattern that matches no table at present."""
    return tuple(
        Notice(
            "tables.unmatched",
            f"no table matches {pattern!r} in `tables`",
            "correct the pattern, or create the table: it is captured when it exists; "
            "`ingestd tables` lists those that exist",
        )
        for pattern in unmatched(settings, present)
    )


def why_left_out(settings: SourceSettings, table: TableId) -> str | None:
    """Say why `tables` does not ask for a table; None if it does."""

    def matches(pattern: str) -> bool:
        return included([pattern.removeprefix("!")], table.schema, table.name)

    if not any(matches(p) for p in settings.tables if not p.startswith("!")):
        return "not matched by `tables`"
    excluding = next((p for p in settings.tables if p.startswith("!") and matches(p)), None)
    return None if excluding is None else f"left out by {excluding!r} in `tables`"


def _missing(table: TableId, present: list[str]) -> Refused:
    missing = Table(table, 0, ())
    near = difflib.get_close_matches(str(table), present, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    error = TableError(
        missing.id,
        "does not exist in the database",
        remedy=f"{hint}names are schema.table as in the catalog; correct `tables` or create it",
    )
    return Refused(missing, error)
