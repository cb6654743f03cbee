"""Column settings applied to a table: exclusions, masks, types, column lists.

Pure functions on a table as described by the catalog or a RELATION message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import pyarrow as pa

from ingestd.config import TableSettings
from ingestd.config.interpolation import key_path
from ingestd.decode.type_mapping import MOST_DEPTH, Types, is_number, is_too_deep, override_type
from ingestd.decode.values.masks import masked_text
from ingestd.model.errors import TableError, did_you_mean
from ingestd.model.schema import Column, Mask, Table
from ingestd.postgres.catalog.tables import qualified

FULL = "f"


def controlled(
    table: Table,
    settings: TableSettings,
    mask_key: bytes | None,
    types: Types,
    *,
    strict: bool = True,
    is_listed: bool = False,
) -> Table:
    """Return the table as it is captured: its config section applied to its columns.

    `table` has all its columns, with their default lake types, and `before` set. A RELATION message
    is not `strict`: entries of `types` for missing columns are then ignored, because an older or
    newer state of the table may lack them. A hidden column that is missing may exist under another
    name, so such a table is refused. An exception is an excluded column that a column list omits
    (`is_listed`), whatever its name. Raises TableError with the config's key: the column is
    missing, rows can't be identified without it, or the type can't hold it.
    """
    if strict:
        _refuse_unknown(table, settings)
    else:
        _refuse_renamed(table, settings, is_listed=is_listed)
    _refuse_unidentifiable(table, settings, types)
    columns = tuple(
        _one(table, column, settings, mask_key, types)
        for column in table.columns
        if column.name not in settings.exclude_columns
    )
    for column in columns:
        _refuse_unread(table, column)
    if not columns and table.columns:
        raise _fault(table, "exclude_columns", "leaves no column", "leave a column in")
    return _with_columns(table, columns)


def _refuse_unread(table: Table, column: Column) -> None:
    """Raise TableError if a column's value for older rows can't be read."""
    if not column.unread:
        return
    raise TableError(
        table.id,
        f"column {column.name!r} was added with a default {column.unread}",
        remedy="exclude the column (`exclude_columns`); or, if the server can output the value,"
        f" VACUUM FULL {qualified(table.id)}; and restart",
    )


def refuse_shown(
    table: Table, names: Mapping[int, str], hidden: Mapping[int, str], settings: TableSettings
) -> None:
    """Raise TableError if a hidden column would be captured under a name that is not hidden.

    `names`: the names of its columns by their catalog numbers. `hidden`: for each column that ever
    had a name that the config hides, this name.
    """
    for number, name in names.items():
        once = hidden.get(number)
        if once is not None and name not in settings.hidden:
            key = "mask_columns" if once in settings.mask_columns else "exclude_columns"
            what = f"column {name!r} was called {once!r}, which {key} hides, but is not hidden"
            raise _fault(table, key, what, f"add {name!r} to")


def as_published(table: Table, columns: Collection[str] | None, row_filter: str | None) -> Table:
    """Return the table as the publication sends it: with its column list and row filter.

    `columns` None: all of them. If the list leaves no column, the table is unchanged: no rows are
    sent.
    """
    table = replace(table, row_filter=row_filter)
    if columns is None:
        return table
    return _with_columns(table, tuple(c for c in table.columns if c.name in columns))


def _with_columns(table: Table, columns: tuple[Column, ...]) -> Table:
    """Replace the columns. A key or `before` that lost a column is reset."""
    names = {c.name for c in columns}
    key = table.key if names.issuperset(table.key) else ()
    before = tuple(n for n in table.before if n in names) or tuple(c.name for c in columns)
    return replace(table, columns=columns, key=key, before=before)


def _one(
    table: Table, column: Column, settings: TableSettings, mask_key: bytes | None, types: Types
) -> Column:
    kind = settings.mask_columns.get(column.name)
    if kind == "sha256":
        if mask_key is None:  # the config check has refused this
            raise ValueError(kind)
        mask = Mask("sha256", mask_key)
        missing = None if column.missing is None else masked_text(column.missing, mask)
        return replace(column, type=pa.string(), mask=mask, missing=missing)
    wanted = settings.types.get(column.name)
    if wanted is not None:
        try:
            chosen = override_type(wanted, column.type_oid, column.typmod, types)
        except ValueError as error:
            at = _at(table, "types", column.name)
            was = f" {column.pg_type}" if column.pg_type else ""
            what = f"column {column.name!r}{was} can't be {wanted!r}: {error}"
            raise TableError(table.id, what, remedy=f"correct {at} in the config") from error
        column = replace(column, type=chosen, is_override=True)
    elif kind != "null" and is_too_deep(column.type_oid, types):
        raise TableError(
            table.id,
            f"column {column.name!r} has lists in lists, of more than {MOST_DEPTH} levels",
            remedy=f'set types = {{ {key_path((column.name,))} = "string" }} in the table\'s'
            " section: its text is kept",
        )
    if kind == "null":
        return replace(column, mask=Mask("null"), missing=None, unread="", nullable=True)
    return column


def _refuse_unknown(table: Table, settings: TableSettings) -> None:
    names = [c.name for c in table.columns]
    by_key = {
        "exclude_columns": settings.exclude_columns,
        "mask_columns": list(settings.mask_columns),
        "types": list(settings.types),
    }
    for key, columns in by_key.items():
        for column in columns:
            if column not in names:
                configured = {c for others in by_key.values() for c in others}
                hint = did_you_mean(column, [n for n in names if n not in configured])
                what = f"column {column!r} in {key} does not exist, or can't be captured"
                raise TableError(table.id, what, remedy=f"{hint}correct {_at(table, key)}")


def _refuse_renamed(table: Table, settings: TableSettings, *, is_listed: bool) -> None:
    names = {c.name for c in table.columns}
    for key, hidden in (
        ("exclude_columns", [] if is_listed else settings.exclude_columns),
        ("mask_columns", list(settings.mask_columns)),
    ):
        gone = [column for column in hidden if column not in names]
        if gone:
            what = f"column {gone[0]!r} in {key} is missing; it may have been renamed"
            raise _fault(table, key, what, "correct")


def _refuse_unidentifiable(table: Table, settings: TableSettings, types: Types) -> None:
    """Refuse to hide identifying columns; with complete rows those of the primary key, if any."""
    oids = {column.name: column.type_oid for column in table.columns}
    needed = table.key if table.replica_identity == FULL else table.identity
    what = "primary key" if table.replica_identity == FULL else "replica identity"
    for column in needed:
        reason = f"column {column!r} belongs to the {what}, which identifies changed rows: "
        if column in settings.exclude_columns:
            raise _fault(
                table, "exclude_columns", reason + "it can't be excluded", "remove it from"
            )
        if settings.mask_columns.get(column) == "null":
            raise _fault(
                table,
                "mask_columns",
                reason + "it can't be masked with null",
                "use sha256 for it in",
            )
        chosen = "".join(settings.types.get(column, "").split()).lower()
        if "decimal" in chosen and not is_number(oids.get(column, 0), types):
            raise _fault(
                table,
                "types",
                reason + "as decimals, texts that are two rows (1.5 and 1.50) would be one",
                "remove it from",
            )


def _fault(table: Table, key: str, what: str, remedy: str) -> TableError:
    return TableError(table.id, what, remedy=f"{remedy} {_at(table, key)}")


def _at(table: Table, *keys: str) -> str:
    """Return the key's path below the source's section."""
    return key_path(("table", str(table.id), *keys))
