"""Selection of tables by the config, and entries of the config that match no table."""

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
    """Return the tables that the config names in full, once each, whether they exist or not.

    From `tables`, including `!` entries, and from sections.
    """
    exact = [p.removeprefix("!") for p in settings.tables if not set(p) & _WILD]
    return list(dict.fromkeys(map(TableId.parse, [*exact, *settings.table])))


def missing_tables(
    settings: SourceSettings, present: Iterable[TableId], others: Others = NONE
) -> list[Refused]:
    """Return an error for each table that must exist to be captured, and does not.

    These are named in `tables` without a wildcard, or are reference tables kept by their changes. A
    pattern without matches is not an error: its tables may be created later. `others`: relations of
    such names that are not tables.
    """
    tables = set(present)
    wanted = [p for p in settings.tables if not p.startswith("!") and not set(p) & _WILD]
    named = dict.fromkeys([*map(TableId.parse, wanted), *settings.references()])
    missing = [t for t in named if t not in tables and settings.streams(t)]
    return [Refused(Table(t, 0, ()), missing_table(settings, t, tables, others)) for t in missing]


def missing_table(
    settings: SourceSettings, table: TableId, present: Iterable[TableId], others: Others = NONE
) -> TableError:
    """Return the error for a name that is not a table, or is missing, with a remedy."""
    other = others.get(table)
    at = _where_named(settings, table)
    if other is not None:
        remedy = f"{other.instead}; remove {table} from the config: it is in {at}"
        return TableError(table, f"is {other.what}: only tables are captured", remedy=remedy)
    hint = did_you_mean_table(table, _helpful(settings, table, present))
    remedy = f"{hint}correct {at}, or create the table: it is read once it exists"
    return TableError(table, "does not exist in the database", remedy=remedy)


def is_left_out(settings: SourceSettings, table: TableId, columns: Sequence[object]) -> bool:
    """Return whether a table has no columns, and only patterns include it: it is ignored then."""
    return not columns and table not in settings.references() and not _is_exact(settings, table)


def unmatched(settings: SourceSettings, present: Iterable[TableId]) -> list[str]:
    """Return the patterns with wildcards that currently match no table."""
    tables = list(present)
    patterns = [p for p in settings.tables if not p.startswith("!") and set(p) & _WILD]
    return [p for p in patterns if not _matches(p, tables)]


def unmatched_notices(
    settings: SourceSettings, present: Iterable[TableId], others: Others = NONE
) -> tuple[Notice, ...]:
    """Return a notice for each entry that currently matches no table and stops none.

    Of the excluding patterns only those without a wildcard count: others may be for future tables.
    """
    tables = list(present)
    notices = [
        _notice(
            f"no table matches {pattern!r} in `tables`",
            "correct the pattern, or create the table: it is captured once it exists; "
            "`ingestd tables` lists those that exist",
        )
        for pattern in unmatched(settings, tables)
    ]
    for pattern in settings.tables:
        matched = [] if pattern.startswith("!") else _candidates(pattern, tables)
        if matched and not any(settings.includes(t.schema, t.name) for t in matched):
            what = f"every table that {pattern!r} in `tables` matches is excluded there by '!'"
            notices.append(_notice(what, "remove one of the two from `tables`"))
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
    """Return a notice for each section whose table is missing without stopping anything."""
    known = {refused.table.id for refused in missing_tables(settings, present)}
    known |= settings.references().keys()
    notices = []
    for table in map(TableId.parse, settings.table):
        if table in present or table in known:
            continue
        error = missing_table(settings, table, present, others)
        keys = ", ".join(sorted(settings.controls(table).model_fields_set)) or "nothing"
        what = f"section {_section(table)}: the table {error.reason}; its settings have no effect"
        notices.append(_notice(f"{what}: {keys}", str(error.remedy)))
    return notices


def why_left_out(settings: SourceSettings, table: TableId) -> str | None:
    """Return why `tables` does not include a table; None if it does."""

    def matches(pattern: str) -> bool:
        return included([pattern.removeprefix("!")], table.schema, table.name)

    if not any(matches(p) for p in settings.tables if not p.startswith("!")):
        return "not matched by `tables`"
    excluding = next((p for p in settings.tables if p.startswith("!") and matches(p)), None)
    return None if excluding is None else f"excluded by {excluding!r} in `tables`"


def _helpful(settings: SourceSettings, table: TableId, present: Iterable[TableId]) -> list[TableId]:
    """Return the tables that the name may be a misspelling of.

    None that already has a section. For a name in `tables`, none that `tables` already matches or
    excludes. For the name of a section, or after `!`, only those that `tables` includes.
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
