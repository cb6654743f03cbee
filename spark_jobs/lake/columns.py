"""The names, types and comparisons of columns in Spark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as f

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from ingestd.lake.definitions import LakeColumn

RAW = "_cdc_raw"
RAW_TYPE = "map<string,string>"

_NEVER_RAW = frozenset({"boolean", "byte", "short", "integer", "long", "binary"})
"""Delta types that represent every value of their source types."""
_NEEDS_MAPPING = frozenset(" ,;{}()\n\t=")
"""Characters that Parquet does not allow in names; Delta needs column mapping for them."""


def quoted(name: str) -> str:
    """Return a column's name quoted for an expression."""
    return "`" + name.replace("`", "``") + "`"


def col(name: str, of: str | None = None) -> Column:
    """Return the column with exactly that name. `of`: the alias of its DataFrame."""
    return f.col(quoted(name) if of is None else f"{of}.{quoted(name)}")


def may_be_raw(column: LakeColumn) -> bool:
    """Return whether a value of the column may be in `_cdc_raw` instead."""
    return column.delta_type not in _NEVER_RAW


def needs_column_mapping(names: Sequence[str]) -> bool:
    """Return whether Delta can write these names only with column mapping."""
    return any(_NEEDS_MAPPING.intersection(name) for name in names)


def selected(rows: DataFrame, columns: Sequence[LakeColumn]) -> list[Column]:
    """Return the columns of a raw table; null for one that it does not have yet."""
    there = set(rows.columns)
    return [
        col(c.name) if c.name in there else f.lit(None).cast(c.delta_type).alias(c.name)
        for c in columns
    ]


def same_key(key: Sequence[LakeColumn], left: str, right: str) -> Column:
    """Return the condition that rows of two aliased DataFrames have the same key.

    A value that its column can't represent is compared by its text in `_cdc_raw`.
    """
    found = f.lit(True)  # noqa: FBT003 - SQL's true
    for column in key:
        if may_be_raw(column):
            found = found & col(column.name, left).eqNullSafe(col(column.name, right))
            texts = [f.element_at(col(RAW, of), f.lit(column.name)) for of in (left, right)]
            found = found & texts[0].eqNullSafe(texts[1])
        else:
            found = found & (col(column.name, left) == col(column.name, right))
    return found


def later(left: str, right: str) -> Column:
    """Return the condition that `left`'s row has a higher position than `right`'s."""
    lsn = col("_cdc_lsn", left), col("_cdc_lsn", right)
    seq = col("_cdc_seq", left), col("_cdc_seq", right)
    return (lsn[0] > lsn[1]) | ((lsn[0] == lsn[1]) & (seq[0] > seq[1]))
