"""Why a value went to `_cdc_raw`, as far as the type of its column tells, and what may be done."""

from __future__ import annotations

import pyarrow as pa

_CALENDAR = "infinity, BC and years above 9999 have no place in a Delta {name}; kept as text"
_TEXT = (
    "its bytes have no character in the database's encoding, or (SQL_ASCII) are not UTF-8: they "
    "are kept as hex after \\x"
)
_DECIMAL = (
    "NaN, infinity and numbers that the decimal does not hold exactly are kept as text; "
    "`types` chooses a wider one, or string"
)
_LIST = (
    "arrays of several dimensions, with other lower bounds, or with an element that the element's "
    "type does not hold, are kept as text; `types` = string keeps them all so"
)
_STRUCT = "a field holds what its type does not; `types` = string keeps all values as text"


_HINTS = (
    (pa.types.is_date, _CALENDAR.format(name="date")),
    (pa.types.is_timestamp, _CALENDAR.format(name="timestamp")),
    (pa.types.is_string, _TEXT),
    (pa.types.is_decimal, _DECIMAL),
    (pa.types.is_list, _LIST),
    (pa.types.is_struct, _STRUCT),
)


def hint(column: pa.DataType) -> str:
    """Say why a column of this type can't hold some values. Names no value."""
    for is_kind, text in _HINTS:
        if is_kind(column):
            return text
    return f"the server's text is not one that {column} gives back exactly; kept as text"
