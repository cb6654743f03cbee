"""Exact conversion of output function texts to Arrow.

A value is accepted only if its column could reproduce the text. Any other value is refused: null in
the column, its text in `_cdc_raw`. Arrow's kernels accept more (``007``, ``0x1F``, a `T` in a
timestamp, 1e400 as infinity), so values that they would misread are found first, all rows at once.
Source of the formats: PostgreSQL documentation, "Data Types", with DateStyle ISO, TimeZone UTC,
bytea_output hex and the shortest-precise output of floats.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingestd.decode import native
from ingestd.decode.values.dates import dates, instants, timestamps
from ingestd.decode.values.decimals import decimals, exact_decimals, integers
from ingestd.decode.values.encodings import Encoding, recoded
from ingestd.decode.values.floats import exact_floats, floats
from ingestd.decode.values.kernels import Flags, any_within, parse
from ingestd.decode.values.nested import lists, structs
from ingestd.decode.values.text_column import TextColumn, bitmap
from ingestd.decode.values.utf8 import not_utf8
from ingestd.model.schema import TIMESTAMP, TIMESTAMP_NTZ

Caster = Callable[[TextColumn, pa.DataType], tuple[pa.Array, Flags | None]]
"""Returns the array and a mask of refused values (None: none), which may include absent ones."""

_HEX_PREFIX = int.from_bytes(b"\\x", "big")
_DIGITS_AT_ONCE = 1 << 16


def cast(
    texts: TextColumn, to: pa.DataType, *, is_override: bool = False
) -> tuple[pa.Array, NDArray[np.int64]]:
    """Return the values as an array of type `to`, and the rows of those refused (ascending).

    `is_override`: the config chose `to`, and the values may be of any type. Decimals then accept
    every number that they hold exactly; floats only what the server would write for a float. An
    unknown type refuses every value, so that none is lost.
    """
    if len(texts) == 0:
        return pa.array([], to), _NONE
    if texts.source.encoding is not None:
        texts, unknown = recoded(texts)
        array, rows = cast(texts, to, is_override=is_override)
        return array, np.union1d(rows, np.flatnonzero(unknown))
    array, refused = _caster(to, is_override=is_override)(texts, to)
    if refused is None:
        return array, _NONE
    if texts.present is not None:
        refused = refused & texts.present
    return array, np.flatnonzero(refused)


_NONE: NDArray[np.int64] = np.empty(0, np.int64)


def raw_text(value: bytes, encoding: Encoding | None = None) -> str:
    r"""Return a refused value's text for `_cdc_raw`; ``\x`` and hex if it can't be UTF-8."""
    try:
        return value.decode() if encoding is None else encoding.decode(value)
    except UnicodeDecodeError:
        return f"\\x{value.hex()}"


def raw_texts(refused: TextColumn) -> pa.StringArray:
    """Return refused values' texts for `_cdc_raw`."""
    values, encoding = refused.gather(), refused.source.encoding
    if encoding is not None:
        texts = [None if v is None else raw_text(v, encoding) for v in values.to_pylist()]
        return pa.array(texts, pa.string())
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([raw_text(v) for v in values.to_pylist()], pa.string())


def _caster(to: pa.DataType, *, is_override: bool) -> Caster:
    if pa.types.is_list(to):
        return lambda texts, to: lists(texts, to, partial(cast, is_override=is_override))
    if pa.types.is_struct(to):
        return lambda texts, to: structs(texts, to, partial(cast, is_override=is_override))
    if pa.types.is_decimal128(to):
        return exact_decimals if is_override else decimals
    if pa.types.is_floating(to) and is_override:
        return exact_floats
    return _CASTERS.get(to, _unknown)


def _unknown(texts: TextColumn, to: pa.DataType) -> tuple[pa.Array, Flags]:
    return pa.nulls(len(texts), to), np.ones(len(texts), np.bool_)


# --- types -----------------------------------------------------------------------------------


def _strings(texts: TextColumn, to: pa.DataType) -> tuple[pa.Array, Flags | None]:
    values = texts.gather()
    try:
        return values.cast(to), None
    except pa.ArrowInvalid:  # not UTF-8
        return parse(texts, to, np.zeros(len(texts), np.bool_), not_utf8)


def _booleans(texts: TextColumn, _: pa.DataType) -> tuple[pa.Array, Flags]:
    letters = texts.first()
    true = letters == ord("t")
    odd = (texts.lengths != 1) | ~(true | (letters == ord("f")))
    kept = texts.without(odd)
    return pa.BooleanArray.from_buffers(pa.bool_(), len(texts), [kept.validity, bitmap(true)]), odd


def _bytes(texts: TextColumn, _: pa.DataType) -> tuple[pa.Array, Flags]:
    if native.compiled is not None:
        offsets, data, odd = texts.unhex(native.compiled)
        buffers = [texts.without(odd).validity, offsets, data]
        return pa.BinaryArray.from_buffers(pa.binary(), len(texts), buffers), odd
    lengths = texts.lengths
    prefix = texts.source.int16_at(texts.starts)
    odd = (lengths < 2) | (lengths % 2 != 0) | (prefix != _HEX_PREFIX)  # noqa: PLR2004
    array, bad = _unhex(texts.without(odd))
    if bad is not None:
        odd |= bad
        array, _ = _unhex(texts.without(odd))
    return array, odd


def _unhex(texts: TextColumn) -> tuple[pa.Array, Flags | None]:
    """Parse pairs of hex digits after the prefix; also return a mask of values with wrong ones."""
    lengths = np.maximum(texts.lengths - 2, 0)
    digits = TextColumn(texts.source, texts.starts + 2 * (texts.lengths > 0), lengths).gather()
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    data = np.frombuffer((digits.buffers()[2] if len(digits) else None) or b"", np.uint8)
    data = data[: offsets[-1]]
    packed = np.empty(len(data) // 2, np.uint8)
    is_bad = False
    for at in range(0, len(data), _DIGITS_AT_ONCE):  # values may be as large as memory allows
        some = data[at : at + _DIGITS_AT_ONCE]
        is_bad = is_bad or bool(_are_no_digits(some).any())
        nibbles = (some & 15) + 9 * (some >> 6)
        half = at // 2
        packed[half : half + len(nibbles) // 2] = (nibbles[0::2] << 4) | nibbles[1::2]
    bad = any_within(_are_no_digits(data), offsets) if is_bad else None
    bounds = (offsets // 2).astype(np.int32)
    buffers = [texts.validity, pa.py_buffer(bounds), pa.py_buffer(packed)]
    return pa.BinaryArray.from_buffers(pa.binary(), len(texts), buffers), bad


def _are_no_digits(data: NDArray[np.uint8]) -> Flags:
    # Smaller numbers wrap around.
    return (data - ord("0") > 9) & (data - ord("a") > 5)  # noqa: PLR2004


_CASTERS: dict[pa.DataType, Caster] = {
    pa.string(): _strings,
    pa.binary(): _bytes,
    pa.bool_(): _booleans,
    pa.int8(): integers,
    pa.int16(): integers,
    pa.int32(): integers,
    pa.int64(): integers,
    pa.float32(): floats,
    pa.float64(): floats,
    pa.date32(): dates,
    TIMESTAMP_NTZ: timestamps,
    TIMESTAMP: instants,
}
