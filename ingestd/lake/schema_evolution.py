"""Evolution of a table's schema in the lake when rows with another schema arrive.

Columns are added, never removed or changed. A source column with a new type has another lake column
by then (`ingestd.decode.lake_columns`). deltalake's own schema merge is not used: it casts
silently and loses values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from ingestd.model.schema import lake_type_name


class SchemaConflictError(ValueError):
    """The lake's schema can't hold such rows; the text says why."""


def evolved(lake: pa.Schema | None, rows: pa.Schema) -> pa.Schema:
    """Return the schema that holds both. Raise SchemaConflictError."""
    fields = _merged(list(lake) if lake is not None else [], list(rows), "")
    return pa.schema(fields)


def additions(lake: pa.Schema, wanted: pa.Schema) -> list[pa.Field]:
    """Return the top-level fields of `wanted` that the lake lacks, or has with fewer fields."""
    known = {f.name: type_text(f.type) for f in lake}
    return [f for f in wanted if known.get(f.name) != type_text(f.type)]


def type_text(kind: pa.DataType) -> str:
    """Return the lake type's name; for a type that has none, Arrow's.

    Another program may have added a column of such a type to a table.
    """
    try:
        return lake_type_name(kind)
    except TypeError:
        return str(kind)


def lost_fields(before: pa.Schema, after: pa.Schema) -> list[str]:
    """Return what a schema lost compared to an earlier one: missing fields, changed types."""
    return list(_lost(list(before), list(after), ""))


def has_other_types(file: pa.Schema, table: pa.Schema) -> bool:
    """Return whether a file has a column or field that the table lacks or has in another type."""
    return bool(lost_fields(file, table))


def _lost(before: Iterable[pa.Field], after: Iterable[pa.Field], path: str) -> Iterator[str]:
    known = {f.name: f for f in after}
    for field in before:
        name, now = f"{path}{field.name}", known.get(field.name)
        if now is None:
            yield f"column {name} is missing"
        else:
            yield from _changed(field.type, now.type, name)


def _changed(before: pa.DataType, now: pa.DataType, name: str) -> Iterator[str]:
    if pa.types.is_struct(before) and pa.types.is_struct(now):
        yield from _lost(before, now, f"{name}.")
    elif pa.types.is_list(before) and pa.types.is_list(now):
        yield from _changed(before.value_type, now.value_type, f"{name}.element")
    elif type_text(before) != type_text(now):
        yield f"column {name} was {type_text(before)} and is {type_text(now)}"


def _merged(lake: list[pa.Field], rows: list[pa.Field], path: str) -> list[pa.Field]:
    result = {f.name: f for f in lake}
    for field in rows:
        there = result.get(field.name)
        result[field.name] = (
            _checked(field, path) if there is None else _together(there, field, path)
        )
    _refuse_same_letters(result, path)
    return list(result.values())


def _together(lake: pa.Field, rows: pa.Field, path: str) -> pa.Field:
    if pa.types.is_struct(lake.type) and pa.types.is_struct(rows.type):
        inner = _merged(list(lake.type), list(rows.type), f"{path}{lake.name}.")
        return pa.field(lake.name, pa.struct(inner))
    have, come = type_text(lake.type), lake_type_name(_checked(rows, path).type)
    if have != come:
        msg = f"column {path}{lake.name} is {have} in the lake, but its rows are now {come}"
        raise SchemaConflictError(msg)
    return lake


def _checked(field: pa.Field, path: str) -> pa.Field:
    try:
        lake_type_name(field.type)
    except TypeError as error:
        msg = f"column {path}{field.name}: {error}"
        raise SchemaConflictError(msg) from error
    return field.with_nullable(True).remove_metadata()  # noqa: FBT003 - pyarrow's signature


def _refuse_same_letters(names: Iterable[str], path: str) -> None:
    """Refuse names that differ only by case, as Delta's comparison ignores case."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            msg = f"columns {path}{other} and {path}{name} differ only by case, which Delta refuses"
            raise SchemaConflictError(msg)
