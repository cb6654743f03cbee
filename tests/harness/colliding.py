"""Values that have one hash without a salt, as a client of the source can choose them."""

from __future__ import annotations

from itertools import count

import numpy as np

from ingestd.digests.value_hashes import mixed

_WORD = 8
ABSENT = 0x6A09E667F3BCC909
"""The hash of null."""
_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_INVERSES = (0x319642B2D24D8EC3, 0x96DE1B173F119089)
_SHIFTS = (31, 27, 30)


def _mixed(number: int) -> int:
    return int(mixed(np.array([number], np.uint64))[0])


def texts_of_one_hash() -> tuple[str, str]:
    """Return two texts of 16 bytes."""
    start, first, second = _mixed(2 * _WORD), b"AAAAAAAA", b"aaaaaaaa"
    for number in count():
        other = f"{number:08}".encode()
        word = _after(start, first) ^ _after(start, other) ^ int.from_bytes(second, "little")
        last = word.to_bytes(_WORD, "little")
        if last.isascii() and 0 not in last:
            return (first + second).decode(), (other + last).decode()
    raise AssertionError


def _after(state: int, word: bytes) -> int:
    return _mixed(state ^ int.from_bytes(word, "little"))


def integer_like_null() -> int:
    """Return the integer that has the hash of null."""
    return _unmixed(ABSENT)


def integers_of_multiples(of: int, number: int) -> list[int]:
    """Return integers whose hashes are multiples of a number: in one share of any divisor of it."""
    return [_unmixed(of * n) for n in range(1, number + 1)]


def texts_of_same_hash(number: int) -> list[str]:
    """Return so many texts of 16 bytes that have one hash."""
    start, found = _mixed(2 * _WORD), list[str]()
    wanted = _after(start, b"AAAAAAAA") ^ int.from_bytes(b"aaaaaaaa", "little")
    for each in count():
        other = f"{each:08}".encode()
        last = (wanted ^ _after(start, other)).to_bytes(_WORD, "little")
        if last.isascii() and 0 not in last:
            found.append((other + last).decode())
            if len(found) == number:
                return found
    raise AssertionError


def pair_like(first: int, second: int, other: int) -> int:
    """Return the integer that makes with `other` a pair of the hash of the pair before."""
    wanted = _mixed(_mixed(first & _MASK)) ^ _mixed(second & _MASK) ^ _mixed(_mixed(other & _MASK))
    return _unmixed(wanted)


def _unmixed(number: int) -> int:
    for shift, inverse in zip(_SHIFTS, (*_INVERSES, 1), strict=True):
        found = number
        for _ in range(64 // shift):
            found = number ^ (found >> shift)
        number = found * inverse & _MASK
    number = (number - _STEP) & _MASK
    return number - (number >> 63 << 64)
