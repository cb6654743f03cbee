"""Parsing of dates and timestamps; see `ingestd.decode.values.cast` for accepted values."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingestd.decode.values.kernels import Bytes, Flags, Offsets, blanked, foreign, numbers, parse
from ingestd.decode.values.text_column import TextColumn
from ingestd.model.schema import TIMESTAMP_NTZ

FIRST_DAY = -719_162
"""0001-01-01 in days since 1970. Arrow accepts the year 0000, which Postgres calls 1 BC."""
FIRST_US = FIRST_DAY * 86_400_000_000
END_US = 253_402_300_800_000_000
"""10000-01-01 in us since 1970."""

_ZERO, _NINE = ord("0"), ord("9")
_DATE, _SECONDS = b"0000-00-00", b"0000-00-00 00:00:00"
_ZONE = int.from_bytes(b"+00", "big")
_DAYS = np.array([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])
_FEBRUARY, _DECEMBER = 2, 12
_LAST_HOUR, _LAST_MINUTE = 23, 59
_foreign = foreign(b"0123456789-: .")


def dates(texts: TextColumn, to: pa.DataType) -> tuple[pa.Array, Flags]:
    """Cast ``YYYY-MM-DD``."""
    array, odd = parse(texts, to, texts.lengths != len(_DATE), _no_date)
    odd |= numbers(array, np.int32).astype(np.int64) < FIRST_DAY
    return blanked(array, odd), odd


def timestamps(texts: TextColumn, to: pa.DataType) -> tuple[pa.Array, Flags]:
    """Cast ``YYYY-MM-DD HH:MM:SS[.ffffff]``, the fraction without trailing zeros."""
    array, odd = parse(texts, to, _odd_timestamp(texts), _no_timestamp)
    odd |= numbers(array, np.int64).astype(np.int64) < FIRST_US
    return blanked(array, odd), odd


def instants(texts: TextColumn, to: pa.DataType) -> tuple[pa.Array, Flags]:
    """Cast timestamps with ``+00``, which Arrow refuses. Without it, the rest is UTC."""
    source, ends = texts.source, texts.starts + texts.lengths
    odd = (texts.lengths <= len(_SECONDS)) | (
        (source.int32_at(np.maximum(ends - 4, 0)) & 0xFFFFFF) != _ZONE
    )
    kept = texts.without(odd)
    lengths = np.maximum(kept.lengths - 3, 0)
    array, odd_rest = timestamps(
        TextColumn(source, kept.starts, lengths, kept.present), TIMESTAMP_NTZ
    )
    return array.view(to), odd | odd_rest


def _odd_timestamp(texts: TextColumn) -> Flags:
    source, lengths = texts.source, texts.lengths
    odd: Flags = (lengths < len(_SECONDS)) | (lengths == len(_SECONDS) + 1)
    odd |= source.bytes_at(texts.starts + len(_DATE)) != ord(" ")
    last = source.bytes_at(texts.starts + lengths - 1)
    odd |= (last < _ZERO) | (last > _NINE)  # BC
    odd |= (lengths > len(_SECONDS)) & (last == _ZERO)
    return odd


# --- values that Arrow refuses ---------------------------------------------------------------


def _no_date(data: Bytes, offsets: Offsets) -> Flags:
    """Flag values that are not a valid date."""
    letters = _beginnings(data, offsets, len(_DATE))
    return _misshapen(letters, offsets, _DATE) | _no_day(letters)


def _no_timestamp(data: Bytes, offsets: Offsets) -> Flags:
    """Flag values that are not a valid timestamp, or are followed by other bytes."""
    letters = _beginnings(data, offsets, len(_SECONDS))
    found = _misshapen(letters, offsets, _SECONDS) | _no_day(letters) | _foreign(data, offsets)
    found |= (_field(letters, 11) > _LAST_HOUR) | (_field(letters, 14) > _LAST_MINUTE)
    return found | (_field(letters, 17) > _LAST_MINUTE)


def _beginnings(data: Bytes, offsets: Offsets, width: int) -> NDArray[np.int64]:
    """Return the first bytes of each value, one row per value."""
    places = offsets[:-1, np.newaxis] + np.arange(width)
    return data.take(places, mode="clip").astype(np.int64)


def _misshapen(letters: NDArray[np.int64], offsets: Offsets, shape: bytes) -> Flags:
    """Flag values without a digit where the shape has one, or with a different byte elsewhere."""
    wanted = np.frombuffer(shape, np.uint8)
    no_digit = (letters < _ZERO) | (letters > _NINE)
    wrong = np.where(wanted == _ZERO, no_digit, letters != wanted)
    found: Flags = wrong.any(axis=1) | (np.diff(offsets) < len(shape))
    return found


def _no_day(letters: NDArray[np.int64]) -> Flags:
    year = 100 * _field(letters, 0) + _field(letters, 2)
    month, day = _field(letters, 5), _field(letters, 8)
    leap = (year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))
    days = _DAYS[np.clip(month, 0, _DECEMBER)] + (leap & (month == _FEBRUARY))
    found: Flags = (month < 1) | (month > _DECEMBER) | (day < 1) | (day > days)
    return found


def _field(letters: NDArray[np.int64], at: int) -> NDArray[np.int64]:
    """Return the number in two digits."""
    return 10 * (letters[:, at] - _ZERO) + letters[:, at + 1] - _ZERO
