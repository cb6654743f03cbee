"""What the config names of tables, and what of it matches none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from ingestd.config import SourceSettings, included
from ingestd.config.interpolation import key_path
from ingestd.model.errors import TableError, did_you_mean_table
from ingestd.model.lake_state import Notice
from ingestd.model.schema import Table, TableId
from ingestd.ports import Refused
from ingestd.postgres.catalog.relation_kinds import NotTable

_WILD = set("*?[")
Others = Mapping[TableId, NotTable]
NONE: Others = MappingProxyType({})


def named_tables(settings: SourceSettings) -> list[TableId]:
    """Return the tables that the config names in full, each once, whether they exist or not.

    By `tables`, with `!` too, and by sections.
    """
    exact = [p.removeprefix("!") for p in settings.tables if not set(p) & _WILD]
    return list(dict.fromkeys(map(TableId.parse, [*exact, *settings.table])))


def missing_tables(
    settings: SourceSettings, present: Iterable[TableId], others: Others = NONE
) -> list[Refused]:
    """Refuse each table that must exist to be captured, and does not.

    Those are named in `tables` without a wildcard, or their current rows are kept by their changes.
    A pattern that matches nothing is no fault: its tables may come later. `others`: what has such
    a name and is no table.
    """
    tables = set(present)
    wanted = [p for p in settings.tables if not p.startswith("!") and not set(p) & _WILD]
    named = dict.fromkeys([*map(TableId.parse, wanted), *settings.references()])
    missing = [t for t in named if t not in tables and settings.streams(t)]
    return [Refused(Table(t, 0, ()), missing_table(settings, t, tables, others)) for t in missing]


def missing_table(
    settings: SourceSettings, table: TableId, present: Iterable[TableId], others: Others = NONE
) -> TableError:
    """Say what the config names instead of a table, or that there is none, and what to do."""
    other = others.get(table)
    at = _where_named(settings, table)
    if other is not None:
        remedy = f"{other.instead}; take {table} out of the config: it is in {at}"
        return TableError(table, f"is {other.what}: only tables are captured", remedy=remedy)
    hint = did_you_mean_table(table, _helpful(settings, table, present))
    remedy = f"{hint}correct {at}, or create the table: it is read when it exists"
    return TableError(table, "does not exist in the database", remedy=remedy)


def is_left_out(settings: SourceSettings, table: TableId, columns: Sequence[object]) -> bool:
    """Return whether a table has no columns, and only a pattern asks for it: nobody misses it."""
    return not columns and table not in settings.references() and not _is_exact(settings, table)


def unmatched(settings: SourceSettings, present: Iterable[TableId]) -> list[str]:
    """Return the patterns with wildcards that match no table at present."""
    tables = list(present)
    patterns = [p for p in settings.tables if not p.startswith("!") and set(p) & _WILD]
    return [p for p in patterns if not _matches(p, tables)]


def unmatched_notices(
    settings: SourceSettings, present: Iterable[TableId], others: Others = NONE
) -> tuple[Notice, ...]:
    """Return a notice for all that matches no table at present, and stops none by that.

    Of the patterns that exclude only those without a wildcard: others may be for tables to come.
    """
    tables = list(present)
    notices = [
        _notice(
            f"no table matches {pattern!r} in `tables`",
            "correct the pattern, or create the table: it is captured when it exists; "
            "`ingestd tables` lists those that exist",
        )
        for pattern in unmatched(settings, tables)
    ]
    for pattern in settings.tables:
        matched = [] if pattern.startswith("!") else _candidates(pattern, tables)
        if matched and not any(settings.includes(t.schema, t.name) for t in matched):
            what = f"every table that {pattern!r} in `tables` matches is excluded there by '!'"
            notices.append(_notice(what, "take the one or the other out of `tables`"))
        excluded = pattern.removeprefix("!")
        if pattern != excluded and not set(excluded) & _WILD and not _matches(excluded, tables):
            what = f"no table matches {pattern!r} in `tables`: it excludes nothing"
            error = missing_table(settings, TableId.parse(excluded), tables, others)
            notices.append(_notice(what, str(error.remedy)))
    return (*notices, *_unused_sections(settings, tables, others))


def _notice(what: str, remedy: str) -> Notice:
    return Notice("tables.unmatched", what, remedy)


def _unused_sections(
    settings: SourceSettings, present: Sequence[TableId], others: Others
) -> list[Notice]:
    """Return a notice for each section whose table does not exist, and that stops none by that."""
    told = {refused.table.id for refused in missing_tables(settings, present)}
    told |= settings.references().keys()
    notices = []
    for table in map(TableId.parse, settings.table):
        if table in present or table in told:
            continue
        error = missing_table(settings, table, present, others)
        keys = ", ".join(sorted(settings.controls(table).model_fields_set)) or "nothing"
        what = f"section {_section(table)}: the table {error.reason}; what it sets holds for none"
        notices.append(_notice(f"{what}: {keys}", str(error.remedy)))
    return notices


def why_left_out(settings: SourceSettings, table: TableId) -> str | None:
    """Say why `tables` does not ask for a table; None if it does."""

    def matches(pattern: str) -> bool:
        return included([pattern.removeprefix("!")], table.schema, table.name)

    if not any(matches(p) for p in settings.tables if not p.startswith("!")):
        return "not matched by `tables`"
    excluding = next((p for p in settings.tables if p.startswith("!") and matches(p)), None)
    return None if excluding is None else f"left out by {excluding!r} in `tables`"


def _helpful(settings: SourceSettings, table: TableId, present: Iterable[TableId]) -> list[TableId]:
    """Return the tables that could stand in the name's place.

    None that has a section already. In `tables` none that it matches already, or excludes; as the
    name of a section, or after `!`, one that it matches.
    """
    sections = {TableId.parse(text) for text in settings.table}
    unconfigured = [t for t in present if t not in sections]
    if _is_exact(settings, table):
        patterns = [p.removeprefix("!") for p in settings.tables]
        return [t for t in unconfigured if not any(_candidates(p, [t]) for p in patterns)]
    return [t for t in unconfigured if settings.includes(t.schema, t.name)]


def _where_named(settings: SourceSettings, table: TableId) -> str:
    is_section = any(TableId.parse(text) == table for text in settings.table)
    places = [
        *(["`tables`"] if _is_exact(settings, table) else []),
        *([f"the section {_section(table)}"] if is_section else []),
    ]
    return " and ".join(places) or "`tables`"


def _section(table: TableId) -> str:
    return f"`{key_path(('table', str(table)))}`"


def _is_exact(settings: SourceSettings, table: TableId) -> bool:
    return any(
        not p.startswith("!") and not set(p) & _WILD and TableId.parse(p) == table
        for p in settings.tables
    )


def _candidates(pattern: str, tables: Iterable[TableId]) -> list[TableId]:
    return [t for t in tables if included([pattern], t.schema, t.name)]


def _matches(pattern: str, tables: Iterable[TableId]) -> bool:
    return bool(_candidates(pattern, tables))
