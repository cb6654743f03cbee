"""The names, types and comparisons of columns in Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as f

from spark_jobs.delta_log.statements import literal, quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from ingestd.lake.definitions import LakeColumn

RAW = "_cdc_raw"
RAW_TYPE = "map<string,string>"
VARIANT = "variant"
"""The name of the type in Spark and Delta."""

_NEVER_RAW = frozenset({"boolean", "byte", "short", "integer", "long", "binary"})
"""Delta types that represent every value of their source types."""
_NEEDS_MAPPING = frozenset(" ,;{}()\n\t=")
"""Characters that Parquet does not allow in names; Delta needs column mapping for them."""


def col(name: str, of: str | None = None) -> Column:
    """Return the column with exactly that name. `of`: the alias of its DataFrame."""
    return f.col(named(name, of))


def named(name: str, of: str | None = None) -> str:
    """Return the same as `col`, as SQL."""
    return quoted(name) if of is None else f"{of}.{quoted(name)}"


def with_columns(rows: DataFrame, columns: Mapping[str, Column]) -> DataFrame:
    """Return the rows with these columns, which may be none (Spark Connect takes at least one)."""
    return rows.withColumns(dict(columns)) if columns else rows


def may_be_raw(column: LakeColumn) -> bool:
    """Return whether a value of the column may be in `_cdc_raw` instead."""
    return column.delta_type not in _NEVER_RAW


def needs_column_mapping(names: Sequence[str]) -> bool:
    """Return whether Delta can write these names only with column mapping."""
    return any(_NEEDS_MAPPING.intersection(name) for name in names)


def missing_properties(kinds: Mapping[str, str], there: Mapping[str, str]) -> dict[str, str]:
    """Return the properties that a table needs for columns, and not yet for those that it has.

    `kinds`, `there`: name to type. A write adds no such property to an existing table.
    """
    own = _properties_for(there)
    return {name: value for name, value in _properties_for(kinds).items() if name not in own}


def _properties_for(kinds: Mapping[str, str]) -> dict[str, str]:
    found = {}
    if needs_column_mapping(list(kinds)):
        found["delta.columnMapping.mode"] = "name"
    if any("timestamp_ntz" in kind for kind in kinds.values()):
        found["delta.feature.timestampNtz"] = "supported"
    if VARIANT in kinds.values():
        found["delta.feature.variantType"] = "supported"
    return found


def selected(rows: DataFrame, columns: Sequence[LakeColumn]) -> list[Column]:
    """Return the columns of a raw table; null for one that it does not have yet."""
    there = set(rows.columns)
    return [
        col(c.name) if c.name in there else f.lit(None).cast(c.delta_type).alias(c.name)
        for c in columns
    ]


def same_key(key: Sequence[LakeColumn], left: str, right: str) -> str:
    """Return the condition that rows of two aliased tables have the same key, as SQL.

    A value that its column can't represent is compared by its text in `_cdc_raw`.
    """
    found = ["true"]
    for column in key:
        ours, theirs = named(column.name, left), named(column.name, right)
        if may_be_raw(column):
            texts = [
                f"element_at({named(RAW, of)}, {literal(column.name)})" for of in (left, right)
            ]
            found += [f"{ours} <=> {theirs}", " <=> ".join(texts)]
        else:
            found.append(f"{ours} = {theirs}")
    return " AND ".join(found)


def later(left: str, right: str) -> str:
    """Return the condition that `left`'s row has a higher position than `right`'s, as SQL."""
    is_same = f"{left}._cdc_lsn = {right}._cdc_lsn AND {left}._cdc_seq > {right}._cdc_seq"
    return f"({left}._cdc_lsn > {right}._cdc_lsn OR ({is_same}))"
