"""The statistics of a new file, with which readers of a Delta table skip files.

Source: Delta transaction log protocol, "Per-file Statistics".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_MAX_STATS = 32
_DAY_US = 86_400_000_000
_FIRST_DAY, _LAST_DAY = -354_285, 2_932_896
"""The years 1000 to 9999, in days since 1970: the dates that every reader can represent."""


def statistics(rows: pa.Table, indexed: Sequence[str]) -> dict[str, Any]:
    """Return the statistics of the columns `indexed` and of all temporal columns."""
    bounds: dict[str, tuple[int | str, int | str]] = {}
    ranged = [f.name for f in rows.schema if pa.types.is_temporal(f.type)]
    chosen = dict.fromkeys([*indexed, *ranged])
    names = [name for name in chosen if _has_bounds(rows.schema.field(name).type)][:_MAX_STATS]
    for name in names:
        found = _bounds(rows[name])
        if found is not None:
            bounds[name] = found
    return {
        "numRecords": rows.num_rows,
        "minValues": {name: low for name, (low, _) in bounds.items()},
        "maxValues": {name: high for name, (_, high) in bounds.items()},
        "nullCount": {name: rows[name].null_count for name in names},
        "tightBounds": True,
    }


def _has_bounds(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_date32(kind)
        or (pa.types.is_timestamp(kind) and kind.unit == "us")
    )


def _bounds(values: pa.ChunkedArray) -> tuple[int | str, int | str] | None:
    """Return the bounds as Delta writes them; None without values or if out of range."""
    kind = values.type
    if pa.types.is_integer(kind):
        both = pc.min_max(values).as_py()
        return None if both["min"] is None else (both["min"], both["max"])
    is_date = pa.types.is_date32(kind)
    both = pc.min_max(values.cast(pa.int32() if is_date else pa.int64())).as_py()
    low, high, unit = both["min"], both["max"], 1 if is_date else _DAY_US
    if low is None or low < _FIRST_DAY * unit or high >= _LAST_DAY * unit:
        return None
    if is_date:
        return str(np.datetime64(low, "D")), str(np.datetime64(high, "D"))
    zone = "Z" if kind.tz else ""
    return f"{np.datetime64(low, 'us')}{zone}", f"{np.datetime64(high, 'us')}{zone}"
