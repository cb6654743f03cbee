"""Positions in the write-ahead log.

Source: PostgreSQL documentation, "pg_lsn Type" (datatype-pg-lsn) and "WAL Internals".
"""

from __future__ import annotations

import re

_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})\Z")


class Lsn(int):
    """A log sequence number: a byte position in the WAL, an unsigned 64-bit integer.

    Its text is Postgres' own (``16/B374D848``); arithmetic returns plain integers (bytes).

    The positions of one transaction, in the order in which they grow:

    ``commit_lsn``
        start of its commit record; what ``_cdc_lsn`` holds.
    ``end_lsn``
        end of its commit record; where the slot resumes after it. No transaction has a commit_lsn
        between the two, so "commit_lsn < end_lsn of an epoch" says "is in that epoch or before".
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Lsn:
        """Parse Postgres' text form. Raises ValueError on anything else."""
        match = _TEXT.match(text)
        if match is None:
            msg = f"not an LSN: {text!r}"
            raise ValueError(msg)
        return cls(int(match[1], 16) << 32 | int(match[2], 16))

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"Lsn({self!s})"


ZERO = Lsn(0)
LAST = Lsn((1 << 63) - 1)
"""The highest position that the lake's columns hold: 64 bits, signed."""
