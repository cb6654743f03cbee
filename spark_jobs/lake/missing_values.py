"""The values of rows in a column that was added after they were written (docs/types.md)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING

import numpy as np
from pyspark.sql import functions as f

from ingestd.decode.values.cast import cast
from ingestd.decode.values.text_column import ByteBuffer, TextColumn
from ingestd.lake.delta.types import arrow_type
from spark_jobs.lake.columns import RAW, RAW_TYPE, col

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from ingestd.lake.definitions import LakeColumn


def with_missing(rows: DataFrame, added: Sequence[LakeColumn]) -> DataFrame:
    """Fill `added` columns in rows written before them. The rows have `_cdc_lsn`, `_cdc_raw`."""
    there = set(rows.columns)
    for column in added:
        is_before = col("_cdc_lsn") < column.since_lsn
        value, text = missing_value(column)
        own = col(column.name) if column.name in there else f.lit(None).cast(column.delta_type)
        rows = rows.withColumn(column.name, f.when(is_before, value).otherwise(own))
        rows = rows.withColumn(RAW, f.when(is_before, with_text(column, text)).otherwise(col(RAW)))
    return rows


def missing_value(column: LakeColumn) -> tuple[Column, str | None]:
    """Return the value of such rows, and its text if the column can't represent it."""
    if column.missing is None:
        return f.lit(None).cast(column.delta_type), None
    buffer = column.missing.encode()
    texts = TextColumn(ByteBuffer(buffer), np.zeros(1, np.int64), np.full(1, len(buffer), np.int64))
    array, refused = cast(texts, arrow_type(column.delta_type))
    if len(refused) or isinstance(array[0].as_py(), dict):
        return f.lit(None).cast(column.delta_type), column.missing
    return _literal(array[0].as_py()).cast(column.delta_type), None


def _literal(value: object) -> Column:
    """Return a literal; dates and times as text, since pyspark uses the process's time zone."""
    if isinstance(value, list):
        return f.array(*map(_literal, value))
    return f.lit(str(value) if isinstance(value, date) else value)


def with_text(column: LakeColumn, text: str | None) -> Column:
    """Return `_cdc_raw` with the text of a value that its column can't represent; None removes it.

    (It may have one already if a column was dropped and re-created with the same name.)
    """
    others = f.map_filter(
        f.coalesce(col(RAW), f.create_map().cast(RAW_TYPE)), lambda name, _: name != column.name
    )
    if text is None:
        return f.when(f.size(others) > 0, others)
    return f.map_concat(others, f.create_map(f.lit(column.name), f.lit(text)))


def lacks(column: LakeColumn, value: Column, text: str | None) -> Column:
    """Return whether a row has a value or text other than these."""
    recorded = f.try_element_at(RAW, f.lit(column.name))
    return ~(col(column.name).eqNullSafe(value) & recorded.eqNullSafe(f.lit(text).cast("string")))
