"""Detection of values that are not UTF-8.

Source: The Unicode Standard, section 3.9, table 3-7, "Well-Formed UTF-8 Byte Sequences".
"""

from __future__ import annotations

import numpy as np

from ingestd.decode.values.kernels import Bytes, Flags, Offsets, any_at

_LONGEST = 4
_LEADS = {2: 0xC0, 3: 0xE0, 4: 0xF0}
"""The lowest byte that leads a sequence of this length, or of a longer one."""
_NEVER = (0xC0, 0xC1)
_END_OF_LEADS = 0xF5
_SECOND_BYTES = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}
"""Valid second bytes after these: no overlong forms, no surrogates, no plane beyond the last."""


def not_utf8(data: Bytes, offsets: Offsets) -> Flags:
    """Flag the values (bytes between neighboring offsets) that are not UTF-8."""
    # four bytes before and after, so that every byte has neighbors
    padded = np.zeros(len(data) + 2 * _LONGEST, np.uint8)
    padded[_LONGEST : len(data) + _LONGEST] = data
    bounds = offsets + _LONGEST
    wrong = (padded >= _END_OF_LEADS) | (padded == _NEVER[0]) | (padded == _NEVER[1])
    expected = np.zeros(len(padded), np.bool_)
    for size, lowest in _LEADS.items():
        leads = padded >= lowest
        for before_end in range(1, size):
            last = bounds - before_end
            cut_short = last[leads[last]]
            wrong[cut_short] = True
            leads[cut_short] = False
        expected[size - 1 :] |= leads[: 1 - size]
    wrong |= expected != (padded & 0xC0 == 0x80)  # noqa: PLR2004 - a continuation byte
    for lead, (low, high) in _SECOND_BYTES.items():
        at = np.flatnonzero(padded == lead)
        second = padded[at + 1]
        wrong[at] |= (second < low) | (second > high)
    places = np.flatnonzero(wrong) - _LONGEST
    return any_at(places, offsets)
