"""Delta's statistics of a Parquet file, from its footer.

Source: Delta protocol, "Per-file Statistics"; Parquet format, "Statistics". Only types whose order
is the same in both, and whose bounds are exact, get bounds: deltalake compares decimals beyond 15
digits incorrectly, and floats have NaN. A column without bounds is never skipped, so leaving them
out is always correct.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

MAX_TEXT = 32
"""Longer texts get no bounds: they would only enlarge the log."""

_MILLISECOND = timedelta(milliseconds=1)


def has_statistics(arrow: pa.DataType) -> bool:
    """Return whether a column of this type gets bounds."""
    return bool(
        pa.types.is_signed_integer(arrow)
        or pa.types.is_string(arrow)
        or pa.types.is_date32(arrow)
        or (pa.types.is_timestamp(arrow) and arrow.tz is not None)
    )


def file_statistics(metadata: pq.FileMetaData, columns: Sequence[str]) -> str:
    """Return the statistics JSON of a file: numRecords, and bounds of these top-level columns."""
    stats: dict[str, Any] = {"numRecords": metadata.num_rows}
    lower: dict[str, Any] = {}
    upper: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for index in _leaves(metadata, columns):
        chunks = [metadata.row_group(g).column(index) for g in range(metadata.num_row_groups)]
        found = [c.statistics for c in chunks if c.statistics is not None]
        if not found or len(found) < len(chunks):
            continue
        name = chunks[0].path_in_schema
        if all(s.has_null_count for s in found):
            nulls[name] = sum(s.null_count for s in found)
        bounded = [s for s in found if s.has_min_max]
        if bounded and all(s.has_min_max or s.num_values == 0 for s in found):
            low, high = _bounds((s.min for s in bounded), (s.max for s in bounded))
            if low is not None and high is not None:
                lower[name], upper[name] = low, high
    stats |= {"minValues": lower, "maxValues": upper, "nullCount": nulls}
    return json.dumps(stats, ensure_ascii=False, separators=(",", ":"))


def _leaves(metadata: pq.FileMetaData, columns: Sequence[str]) -> Iterable[int]:
    wanted = set(columns)
    for index in range(metadata.num_columns):
        column = metadata.schema.column(index)
        # A top-level column whose name looks like a path ("a.b") differs from a nested one by name.
        if column.path in wanted and column.name == column.path:
            yield index


def _bounds(minima: Iterable[Any], maxima: Iterable[Any]) -> tuple[Any, Any]:
    return _json_value(min(minima), up=False), _json_value(max(maxima), up=True)


def _json_value(value: Any, *, up: bool) -> Any:  # noqa: ANN401 - a JSON scalar
    """Return a bound in the protocol's form: timestamps in milliseconds, rounded outwards."""
    if isinstance(value, datetime):
        whole = value.astimezone(UTC)
        cut = whole.replace(microsecond=whole.microsecond // 1000 * 1000)
        if up and cut != whole and cut > datetime.max.replace(tzinfo=UTC) - _MILLISECOND:
            return None  # the year 10000: no bound
        bound = cut + _MILLISECOND if up and cut != whole else cut
        return bound.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else None
    return value if isinstance(value, int) else None
