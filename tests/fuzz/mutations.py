"""Random mutations of inputs: for runs of a few seconds without coverage feedback."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    Change = Callable[[random.Random, bytearray], None]

ODD = (b"\0", b"\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\0", b"d")


def mutated(rng: random.Random, inputs: Sequence[bytes]) -> bytes:
    """Change one of the inputs, or two that were joined, in one to four places."""
    data = bytearray(rng.choice(inputs))
    if rng.random() < 0.2:
        data[_place(rng, data) :] = rng.choice(inputs)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        rng.choice(_CHANGES)(rng, data)
    return bytes(data)


def _place(rng: random.Random, data: bytearray) -> int:
    return rng.randrange(len(data) + 1)


def _set(rng: random.Random, data: bytearray) -> None:
    at = _place(rng, data)
    data[at : at + 1] = bytes([rng.randrange(256)])


def _step(rng: random.Random, data: bytearray) -> None:
    at = _place(rng, data)
    data[at : at + 1] = bytes((byte + rng.choice((-1, 1))) % 256 for byte in data[at : at + 1])


def _put_odd(rng: random.Random, data: bytearray) -> None:
    at, odd = _place(rng, data), rng.choice(ODD)
    data[at : at + len(odd)] = odd


def _take_out(rng: random.Random, data: bytearray) -> None:
    at = _place(rng, data)
    del data[at : at + rng.choice((1, 1, 2, 4, 30))]


def _repeat(rng: random.Random, data: bytearray) -> None:
    at, length = _place(rng, data), rng.choice((1, 2, 4, 9, 30))
    data[at:at] = data[at : at + length]


_CHANGES: tuple[Change, ...] = (_set, _set, _step, _step, _put_odd, _take_out, _repeat)
