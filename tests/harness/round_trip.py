"""Checks that rows of a raw table reproduce the source's texts (I7, docs/types.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psycopg import sql

from tests.harness.server_text import holds, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import psycopg
    import pyarrow as pa

    from tests.harness.databases import Database

Texts = dict[str, str | None]
"""A row of the source: the output functions' texts, by column."""

READER_SETTINGS = {
    "DateStyle": "ISO",
    "TimeZone": "UTC",
    "IntervalStyle": "iso_8601",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "search_path": "pg_catalog, pg_temp",
}
BEFORE = "_cdc_before"


def source_texts(
    connection: psycopg.Connection[Any], table: str, columns: Sequence[str]
) -> dict[int, Texts]:
    """Return a table's rows as texts of the types' output functions, by `id`."""
    # not a cast to text, which is another function for char(n), inet, bool and types with a cast
    text = "CASE WHEN {0} IS DISTINCT FROM NULL THEN concat({0}) END"
    each = [sql.SQL(text).format(sql.Identifier(c)) for c in columns]
    query = sql.SQL("SELECT id, {} FROM {}").format(
        sql.SQL(", ").join(each), sql.Identifier("public", table)
    )
    with connection.transaction():
        for name, value in READER_SETTINGS.items():
            connection.execute("SELECT set_config(%s, %s, true)", [name, value])
        rows = connection.execute(query).fetchall()
    return {row[0]: dict(zip(columns, row[1:], strict=True)) for row in rows}


def read_texts(database: Database, table: str, columns: Sequence[str]) -> dict[int, Texts]:
    with database.connect() as connection:
        return source_texts(connection, table, columns)


def row_faults(
    row: Mapping[str, Any], schema: pa.Schema, new: Texts, old: Texts | None
) -> Iterator[str]:
    """Yield the faults of a row of `to_pylist(maps_as_pydicts="strict")`.

    `new`: the expected texts of the columns; `old`: those of `_cdc_before`, None if that is null.
    A value must be in its column if the column can represent it, else in `_cdc_raw`, never in both.
    """
    raw = dict(row["_cdc_raw"] or {})
    for name, text in new.items():
        yield from _value_faults(
            name, row[name], raw.pop(name, None), schema.field(name).type, text
        )
    before, struct = row[BEFORE], schema.field(BEFORE).type
    if old is None:
        if before is not None:
            yield f"{BEFORE}: {before!r} instead of null"
    elif before is None:
        yield f"{BEFORE} is null"
    else:
        for name, text in old.items():
            key = f"{BEFORE}.{name}"
            found = raw.pop(key, None)
            yield from _value_faults(key, before[name], found, struct.field(name).type, text)
    for key, text in raw.items():
        yield f"_cdc_raw has {key!r}: {text!r}, which no column lacks"


def _value_faults(
    name: str, value: Any, raw: str | None, arrow: pa.DataType, text: str | None
) -> Iterator[str]:
    if text is None:
        if value is not None or raw is not None:
            yield f"{name}: {value!r} (raw {raw!r}) instead of null"
    elif value is not None and raw is not None:
        yield f"{name}: {value!r} and also in _cdc_raw, as {raw!r}"
    elif value is None and raw is None:
        yield f"{name}: lost; the source has {text!r}"
    elif holds(arrow, text) != (value is not None):
        place = "the column" if value is None else "_cdc_raw"
        yield f"{name}: {text!r} belongs into {place}, but has {value!r}, raw {raw!r}"
    else:
        written = raw if value is None else text_of(value, arrow)
        if written != text:
            yield f"{name}: {written!r} instead of {text!r}"
