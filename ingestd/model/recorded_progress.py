"""The text in `_tables.progress`: what is left of a table's snapshot, and where its `t` is.

It is ``<place>|<remainder>``, or empty for a snapshot that must start over.

=========  ======================================================================
place      the snapshot's `t`
=========  ======================================================================
`first`    in the lake, before its rows
`last`     follows its rows
`again`    the same, and the table was live when the snapshot was requested: no
           change of it was missed, so its old rows serve meanwhile
=========  ======================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST, _LAST, _AGAIN, _SEPARATOR = "first", "last", "again", "|"


@dataclass(frozen=True, slots=True)
class RecordedProgress:
    """The progress of a snapshot that is not complete.

    `remainder`: what must still be read (`ingestd.ports.Snapshot.remainder`), empty for all.
    `has_marker_last`: its `t` follows its rows. `is_requested`: the table was live when the
    snapshot was requested; then the `t` comes last.
    """

    remainder: str
    has_marker_last: bool = True
    is_requested: bool = False

    @classmethod
    def parse(cls, text: str) -> RecordedProgress:
        """Return the progress from its text in `_tables`, which may be empty."""
        place, _, remainder = text.partition(_SEPARATOR)
        return cls(remainder, place != _FIRST, place == _AGAIN)

    def to_text(self) -> str:
        """Return the text for `_tables`."""
        place = _LAST if self.has_marker_last else _FIRST
        return (_AGAIN if self.is_requested else place) + _SEPARATOR + self.remainder
