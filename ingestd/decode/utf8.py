"""Which values are not UTF-8.

Source: The Unicode Standard, section 3.9, table 3-7, "Well-Formed UTF-8 Byte Sequences".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ingestd.decode.kernels import Bytes, Flags, Offsets, any_within

_SURROGATES, _LAST_PLANE = 0xED, 0xF4

_sizes = np.ones(256, np.uint8)
"""Bytes in the sequence that a byte leads; 0: it leads none."""
_sizes[0x80:0xC2] = 0
_sizes[0xC2:0xE0] = 2
_sizes[0xE0:0xF0] = 3
_sizes[0xF0:0xF5] = 4
_sizes[0xF5:] = 0
_lowest = np.full(256, 0x80, np.uint8)
"""The lowest second byte, so that nothing is written longer than need be."""
_lowest[0xE0], _lowest[0xF0] = 0xA0, 0x90
_highest = np.full(256, 0xBF, np.uint8)
"""The highest second byte: neither surrogates nor beyond the last plane."""
_highest[_SURROGATES], _highest[_LAST_PLANE] = 0x9F, 0x8F


def not_utf8(data: Bytes, offsets: Offsets) -> Flags:
    """Flag the values (bytes between neighbouring offsets) that are not UTF-8."""
    at = np.flatnonzero(data >= 0x80)  # noqa: PLR2004 - ASCII ends
    if len(at) == 0:
        return np.zeros(len(offsets) - 1, np.bool_)
    ends = offsets[1:][np.searchsorted(offsets, at, "right") - 1]
    bad = np.zeros(len(data), np.bool_)
    bad[at[~_well_formed(data, at, ends)]] = True
    return any_within(bad, offsets)


def _well_formed(data: Bytes, at: NDArray[np.int64], ends: NDArray[np.int64]) -> Flags:
    """Say which of all the bytes above ASCII, at `at`, are part of a sequence in their value."""
    letters = data[at]
    sizes = _sizes[letters]
    good = sizes > 1
    leads = np.flatnonzero(good)
    lead, size, place = letters[leads], sizes[leads], at[leads]
    fits = place + size <= ends[leads]
    second = data[np.minimum(place + 1, len(data) - 1)]
    fits &= (second >= _lowest[lead]) & (second <= _highest[lead])
    for further in (2, 3):
        byte = data[np.minimum(place + further, len(data) - 1)]
        fits &= (size <= further) | (byte & 0xC0 == 0x80)  # noqa: PLR2004 - a continuation
    good[leads[~fits]] = False
    followed = leads[fits]
    for further in (1, 2, 3):  # the bytes that follow are next in `at`, being above ASCII
        good[followed[size[fits] > further] + further] = True
    return good
