"""The values of rows in a column that was added after they were written (docs/types.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from pyspark.sql import functions as f

from ingestd.decode.values.cast import cast
from ingestd.decode.values.text_column import ByteBuffer, TextColumn
from ingestd.lake.delta.types import arrow_type
from spark_jobs.delta_log.statements import literal
from spark_jobs.lake.columns import RAW, RAW_TYPE, col
from spark_jobs.lake.variants import is_exact, stored_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from ingestd.lake.definitions import LakeColumn


def with_missing(rows: DataFrame, added: Sequence[LakeColumn]) -> DataFrame:
    """Fill `added` columns in rows written before them. The rows have `_cdc_lsn`, `_cdc_raw`."""
    there = set(rows.columns)
    for column in added:
        is_before = col("_cdc_lsn") < column.since_lsn
        value, text = missing_value(column)
        own = col(column.name) if column.name in there else f.lit(None).cast(column.delta_type)
        rows = rows.withColumn(column.name, f.when(is_before, f.expr(value)).otherwise(own))
        filled = f.when(is_before, f.expr(with_text(column, text))).otherwise(col(RAW))
        rows = rows.withColumn(RAW, filled)
    return rows


def missing_value(column: LakeColumn) -> tuple[str, str | None]:
    """Return the value of such rows as SQL, and its text if the column can't represent it."""
    null = f"CAST(NULL AS {column.delta_type})"
    if column.missing is None:
        return null, None
    if column.is_variant:
        if not is_exact(column.missing):
            return null, column.missing
        return f"to_json(parse_json({literal(column.missing)}))", None
    buffer = column.missing.encode()
    texts = TextColumn(ByteBuffer(buffer), np.zeros(1, np.int64), np.full(1, len(buffer), np.int64))
    array, refused = cast(texts, arrow_type(column.delta_type))
    value = array[0].as_py()
    parts = value if isinstance(value, list) else [value]
    if len(refused) or any(isinstance(part, dict) for part in parts):
        return null, column.missing
    # (times as text: no zone but the session's, which is UTC, is involved)
    return f"CAST({literal(value)} AS {column.delta_type})", None


def with_text(column: LakeColumn, text: str | None) -> str:
    """Return, as SQL, `_cdc_raw` with the text of a value that its column can't represent.

    None removes it. (It may have one already if a column was dropped and re-created with the same
    name.)
    """
    name = literal(column.name)
    texts = f"coalesce({RAW}, CAST(map() AS {RAW_TYPE}))"
    others = f"map_filter({texts}, (name, _text) -> name <> {name})"
    if text is None:
        return f"CASE WHEN size({others}) > 0 THEN {others} END"
    return f"map_concat({others}, map({name}, {literal(text)}))"


def lacks(column: LakeColumn, value: str, text: str | None) -> str:
    """Return, as SQL, whether a row has a value or text other than these."""
    recorded = f"try_element_at({RAW}, {literal(column.name)})"
    is_same = (
        f"{stored_text(column)} <=> {value} AND {recorded} <=> CAST({literal(text)} AS string)"
    )
    return f"NOT ({is_same})"
