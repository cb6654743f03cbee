"""Conversion of Delta type names to Arrow, the inverse of `ingestd.model.schema.lake_type_name`."""

from __future__ import annotations

import re

import pyarrow as pa

from ingestd.model.schema import TIMESTAMP, TIMESTAMP_NTZ

_SIMPLE = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": TIMESTAMP,
    "timestamp_ntz": TIMESTAMP_NTZ,
}
_FIELD = re.compile(r"(?:`((?:[^`]|``)*)`|([^`:][^:]*)):(.*)\Z", re.DOTALL)
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)\Z")


def arrow_type(name: str) -> pa.DataType:
    """Return the Arrow type with this name in `lake_type_name`. Raise ValueError."""
    if name in _SIMPLE:
        return _SIMPLE[name]
    if found := _DECIMAL.match(name):
        return pa.decimal128(int(found[1]), int(found[2]))
    if name.startswith("array<") and name.endswith(">"):
        return pa.list_(pa.field("element", arrow_type(name[6:-1])))
    if name.startswith("struct<") and name.endswith(">"):
        return pa.struct([_field(part) for part in _parts(name[7:-1])])
    msg = f"no type {name!r}"
    raise ValueError(msg)


def _field(text: str) -> pa.Field:
    found = _FIELD.match(text)
    if found is None:
        msg = f"no field {text!r}"
        raise ValueError(msg)
    quoted, plain, kind = found.groups()
    return pa.field(plain if quoted is None else quoted.replace("``", "`"), arrow_type(kind))


def _parts(text: str) -> list[str]:
    """Split at the commas outside of brackets and quoted names."""
    parts, depth, is_quoted = [""], 0, False
    for char in text:
        is_quoted ^= char == "`"
        depth += 0 if is_quoted else (char in "<(") - (char in ">)")
        if char == "," and depth == 0 and not is_quoted:
            parts.append("")
        else:
            parts[-1] += char
    return [part for part in parts if part]
