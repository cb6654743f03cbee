"""Hints for the log: why a column of some type can't hold a value, and what to do."""

from __future__ import annotations

import pyarrow as pa

_CALENDAR = "a Delta {name} can't hold infinity, BC or years above 9999; kept as text"
_TEXT = (
    "its bytes are not a character in the database's encoding, or (SQL_ASCII) not UTF-8; they are "
    "kept as hex after \\x"
)
_DECIMAL = (
    "NaN, infinity and numbers that the decimal can't hold exactly are kept as text; "
    "set a wider one, or string, in `types`"
)
_LIST = (
    "arrays of several dimensions, with other lower bounds, or with an element that the element "
    "type can't hold, are kept as text; `types` = string keeps all of them as text"
)
_STRUCT = "a field's type can't hold its value; `types` = string keeps all values as text"


_HINTS = (
    (pa.types.is_date, _CALENDAR.format(name="date")),
    (pa.types.is_timestamp, _CALENDAR.format(name="timestamp")),
    (pa.types.is_string, _TEXT),
    (pa.types.is_decimal, _DECIMAL),
    (pa.types.is_list, _LIST),
    (pa.types.is_struct, _STRUCT),
)


def hint(column: pa.DataType) -> str:
    """Return why a column of this type can't hold some values. Contains no value."""
    for is_kind, text in _HINTS:
        if is_kind(column):
            return text
    return f"{column} would not reproduce the server's text exactly; kept as text"
