"""jsonb as VARIANT in the tables that jobs write (`--variant`).

Spark neither compares nor groups VARIANT. So inside a step a value is a text, and it is parsed
last, when the rows are written. The text is Spark's own of the VARIANT: two values have the same
text if, and only if, they are equal as VARIANT. So rows of the lake can be compared with rows of a
table.

A value that VARIANT can't hold exactly is null in its column, and its text is in `_cdc_raw`, as
with all other types. Source: Spark's VariantBuilder (a number that is no DECIMAL of up to 38 digits
becomes a DOUBLE).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import structlog
from pyspark.sql import functions as f

from ingestd.model.changes import OF_BEFORE
from ingestd.model.errors import TableError
from ingestd.model.recorded import RecordError, read_json
from ingestd.model.schema import TableId
from spark_jobs.delta_log.statements import quoted
from spark_jobs.lake.columns import RAW, RAW_TYPE, VARIANT, col, named, with_columns

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from ingestd.lake.definitions import Definition, LakeColumn

_JSONB = 3802
"""The type's OID: pg_type.dat."""
_BEFORE = "_cdc_before"

_MAY_BE_INEXACT = r"[0-9.]{39}|[0-9][eE]"
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
"""A string of JSON. (Possessive: else Java's stack overflows at a long one.)"""
_INEXACT = r"[1-9][0-9]{38}|\.[0-9]{39}|(?<![0-9.])[1-9](?=[0-9.]{39})[0-9]*\.[0-9]|[0-9][eE]"
"""Outside of strings: a number with more than 38 digits, or with an exponent."""


_MOST_BYTES, _MOST_DEPTH = 1 << 20, 500
"""Of a default: more bytes are not recorded; deeper ones Python may not read, though Spark may."""


# --- which columns -------------------------------------------------------------------------------


def with_variants(definition: Definition) -> Definition:
    """Return the definition with the columns marked that are stored as VARIANT.

    Those are columns of type jsonb, except for columns of the key, which must be compared, and
    those that have had values of another type, whose spelling counts. Domains and arrays of jsonb
    are not.
    """
    others = {c.name for c in definition.lives if c.had_other_type or not _is_jsonb(c)}
    others |= set(definition.key)

    def marked(column: LakeColumn) -> LakeColumn:
        return replace(column, is_variant=_is_jsonb(column) and column.name not in others)

    return replace(
        definition,
        columns=tuple(map(marked, definition.columns)),
        lives=tuple(map(marked, definition.lives)),
    )


def _is_jsonb(column: LakeColumn) -> bool:
    return column.type_oid == _JSONB and column.delta_type == "string"


def variant_names(columns: Iterable[LakeColumn]) -> list[str]:
    """Return the names of the columns that are stored as VARIANT, each once."""
    return list(dict.fromkeys(c.name for c in columns if c.is_variant))


def table_type(column: LakeColumn) -> str:
    """Return the type of a column in the table that a job writes."""
    return VARIANT if column.is_variant else column.delta_type


def stored_variants(rows: DataFrame) -> list[str]:
    """Return the names of the columns that are VARIANT in a table's rows."""
    return [field.name for field in rows.schema.fields if field.dataType.simpleString() == VARIANT]


def ensure_same_types(
    table: str,
    types: Mapping[str, str],
    columns: Iterable[str],
    variants: Collection[str],
    *,
    is_wanted: bool,
) -> None:
    """Raise TableError if a job's table was made with the other choice of VARIANT.

    `types`: its columns, name to type; `columns`: those of the step; `variants`: those of them that
    the step stores as VARIANT; `is_wanted`: with --variant.
    """
    there = {name.lower(): kind for name, kind in types.items()}
    for name in columns:
        if name.lower() not in there:
            continue
        is_variant = there[name.lower()] == VARIANT
        if is_variant == (name in variants):
            continue
        if is_variant and is_wanted:
            raise TableError(
                TableId.parse(table),
                f"its column {name} is VARIANT, and must be text: it belongs to the key, or has"
                " values of another type",
                remedy=f"--rebuild {table} re-creates it",
            )
        made = f"{'with' if is_variant else 'without'} --variant"
        raise TableError(
            TableId.parse(table),
            f"its column {name} was made {made}",
            remedy=f"--rebuild {table} re-creates it; or move it by a separate job {made}",
        )


# --- values --------------------------------------------------------------------------------------


def as_texts(rows: DataFrame, names: Collection[str] = ()) -> DataFrame:
    """Return rows with the texts of VARIANT columns, and with such texts in the columns `names`.

    `names`: columns with the source's texts; the rows have `_cdc_raw` then. Values that VARIANT
    can't hold go to it, also those of `_cdc_before`.
    """
    stored = stored_variants(rows)
    if stored:
        rows = with_columns(rows, {name: f.expr(f"to_json({quoted(name)})") for name in stored})
    own = [n for n in names if n in rows.columns and n not in stored]
    old = []
    if _BEFORE in rows.columns:
        before_type: Any = rows.schema[_BEFORE].dataType
        old = [n for n in names if n in before_type.names]
    if not own and not old:
        return rows
    values = {name: quoted(name) for name in own}
    values |= {OF_BEFORE + name: named(name, quoted(_BEFORE)) for name in old}
    texts = {key: f"_cdc_text{number}" for number, key in enumerate(values)}
    rows = with_columns(rows, {texts[key]: _text_of(value) for key, value in values.items()})
    changed = {name: col(texts[name]) for name in own}
    if old:
        before = f.col(_BEFORE)
        for name in old:
            before = before.withField(quoted(name), col(texts[OF_BEFORE + name]))
        changed[_BEFORE] = f.when(f.col(_BEFORE).isNotNull(), before)
    pairs = [
        f.struct(
            f.lit(key).alias("key"),
            f.when(col(texts[key]).isNull(), f.expr(value)).alias("value"),
        )
        for key, value in values.items()
    ]
    refused = f.filter(f.array(*pairs), lambda pair: pair["value"].isNotNull())
    present = f.coalesce(f.col(RAW), f.create_map().cast(RAW_TYPE))
    changed[RAW] = f.when(
        f.size(refused) > 0, f.map_concat(present, f.map_from_entries(refused))
    ).otherwise(f.col(RAW))
    return with_columns(rows, changed).drop(*texts.values())


def _text_of(value: str) -> Column:
    """Return Spark's text of a JSON text, as SQL; null if VARIANT can't hold it exactly."""
    own = f.expr(value)
    is_inexact = own.rlike(_MAY_BE_INEXACT) & f.regexp_replace(own, _STRING, "").rlike(_INEXACT)
    return f.when(~is_inexact, f.expr(f"to_json(try_parse_json({value}))"))


def is_exact(text: str) -> bool:
    """Return whether VARIANT can hold a default's text exactly, by the rule of `as_texts`.

    A text that is nested deeper than _MOST_DEPTH counts as one that it can't hold.
    """
    if re.search(_INEXACT, re.sub(_STRING, "", text)):
        return False
    try:
        read_json(text, _MOST_BYTES, _MOST_BYTES, _MOST_DEPTH)
    except RecordError:
        return False
    return True


def parsed(rows: DataFrame, names: Collection[str]) -> DataFrame:
    """Return rows in which the texts of `as_texts` are VARIANT. The last step before a write."""
    if not names:
        return rows
    return with_columns(rows, {name: f.expr(value_of_text(quoted(name))) for name in names})


def value_of_text(text: str) -> str:
    """Return, as SQL, the VARIANT of such a text, which fails for any other: nothing is lost."""
    return f"parse_json({text})"


def stored_text(column: LakeColumn, of: str | None = None) -> str:
    """Return, as SQL, a column of a table's own row as `as_texts` does. `of`: the row's alias."""
    own = named(column.name, of)
    return f"to_json({own})" if column.is_variant else own


# --- values that are kept as text ----------------------------------------------------------------


def kept_texts(names: Collection[str]) -> Column:
    """Return the number of values of these columns in `_cdc_raw`, summed up over all rows."""
    keys = f.coalesce(f.map_keys(RAW), f.array().cast("array<string>"))
    wanted = f.array(*map(f.lit, names)).cast("array<string>")
    return f.coalesce(f.sum(f.size(f.array_intersect(keys, wanted))), f.lit(0))


def kept_texts_in(rows: pa.Table, names: Collection[str]) -> int:
    """Return the same for rows in memory."""
    wanted = pa.array(names, pa.string())
    chunks = rows[RAW].chunks
    return sum(pc.sum(pc.is_in(chunk.keys, value_set=wanted)).as_py() or 0 for chunk in chunks)


def log_kept_texts(table: str, count: int) -> None:
    """Log how many values of a step's rows VARIANT can't hold, if any."""
    if count:
        log: structlog.stdlib.BoundLogger = structlog.get_logger("ingestd")
        log.warning("variant.kept_as_text", table=table, values=count)
