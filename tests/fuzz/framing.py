"""How an input holds several messages, for a fuzzer that knows only bytes.

Each message follows two bytes, its length; if the top bit is set, a feed ends after it. A
length beyond the input's end is cut, so that every input is a list of messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Laid = tuple[bytes, NDArray[np.int64], NDArray[np.int64]]

_ENDS_FEED = 0x8000
MOST_BYTES = _ENDS_FEED - 1
"""Of one message."""


def feeds_of(data: bytes) -> list[list[bytes]]:
    """Return the messages of each feed."""
    found: list[list[bytes]] = [[]]
    at = 0
    while at + 2 <= len(data):
        head = int.from_bytes(data[at : at + 2])
        end = at + 2 + (head & MOST_BYTES)
        found[-1].append(data[at + 2 : end])
        if head & _ENDS_FEED:
            found.append([])
        at = end
    return found


def input_of(feeds: Sequence[Sequence[bytes]]) -> bytes:
    """Write an input that holds these feeds."""
    out = bytearray()
    for number, messages in enumerate(feeds):
        for place, message in enumerate(messages):
            is_last = place == len(messages) - 1 and number < len(feeds) - 1
            out += (len(message) | _ENDS_FEED * is_last).to_bytes(2) + message
    return bytes(out)


def laid_out(messages: Sequence[bytes]) -> Laid:
    """Lay messages out as a transport does, with something else between them."""
    gap = b"dw"
    lengths = np.array([len(m) for m in messages], np.int64)
    ends = np.cumsum(lengths + len(gap))
    return b"".join(gap + m for m in messages), ends - lengths, ends
