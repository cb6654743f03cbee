"""Parsing of floating-point numbers; see `ingestd.decode.values.cast` for accepted values.

Source: PostgreSQL, src/common/d2s.c and f2s.c: the shortest digits that identify the number, with
an exponent below 1e-4 and from 1e15 (float4: 1e6) on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.decode.values.kernels import Flags, blanked, foreign, numbers, parse
from ingestd.decode.values.text_column import TextColumn

_SPECIAL = pa.array([b"0", b"-0", b"NaN", b"Infinity", b"-Infinity"], pa.binary())
_SUSPECTS = foreign(b"0123456789+-.eE", b"NaN", b"Infinity")
_LEAST_FIXED = 1e-4
_END_FIXED = {pa.float64(): 1e15, pa.float32(): 1e6}


def floats(texts: TextColumn, to: pa.DataType) -> tuple[pa.Array, Flags]:
    """Cast to the nearest number; the server's shortest-precise text converts to it and back.

    Texts that round to infinity or zero, without being it, are refused. Other spellings of the same
    number (``1E5``), which no server sends from a column of floats, are not detected.
    """
    array, odd = parse(texts, to, _odd(texts), _SUSPECTS)
    found = np.asarray(numbers(array, np.float32 if to == pa.float32() else np.float64), float)
    special = np.flatnonzero(~np.isfinite(found) | (found == 0))
    if len(special):
        known = pc.is_in(texts[special].gather(), _SPECIAL)
        odd = odd.copy()
        odd[special[~known.to_numpy(zero_copy_only=False)]] = True
        array = blanked(array, odd)
    return array, odd


def exact_floats(texts: TextColumn, to: pa.DataType) -> tuple[pa.Array, Flags]:
    """Cast only texts that the server would write for the number; the column may be of any type."""
    array, odd = floats(texts, to)
    kind = np.float32 if to == pa.float32() else np.float64
    found: NDArray[Any] = numbers(array, kind)
    size = np.abs(found)
    written = pc.equal(array.cast(pa.string()).cast(pa.binary()), texts.gather())
    same = pc.fill_null(written, fill_value=False).to_numpy(zero_copy_only=False)
    fixed = (size == 0) | (size >= _LEAST_FIXED) & (size < _END_FIXED[to])
    doubtful = array.is_valid().to_numpy(zero_copy_only=False) & np.isfinite(found)
    for i in np.flatnonzero(doubtful & ~(same & fixed)).tolist():
        odd[i] |= _text(found[i], is_fixed=bool(fixed[i])) != texts.at(i)
    return blanked(array, odd), odd


def _text(number: float, *, is_fixed: bool) -> bytes:
    write = np.format_float_positional if is_fixed else np.format_float_scientific
    return write(number, unique=True, trim="-").encode()


def _odd(texts: TextColumn) -> Flags:
    """Flag texts that begin with a plus, a point or a leading zero, or end with a point."""
    texts = texts.headed()
    first, second = texts.first(), texts.second()
    negative = first == ord("-")
    if negative.any():
        first, second = np.where(negative, second, first), np.where(negative, texts.third(), second)
    odd: Flags = (first == ord("0")) & (second >= ord("0")) & (second <= ord("9"))
    odd &= texts.lengths > negative + 1
    odd |= (first == ord(".")) | (first == ord("+"))
    last = texts.source.bytes_at(texts.starts + texts.lengths - 1)
    odd |= (texts.lengths == 0) | (last == ord("."))
    return odd
