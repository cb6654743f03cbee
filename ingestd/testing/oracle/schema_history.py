"""The history of a table's schemas in `_tables`, as a reader of the lake must interpret it.

Part of the reference fold: it follows design section 2 alone, row by row, without the code that
writes `_tables`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ingestd.model.schema import TableId


@dataclass(frozen=True, slots=True)
class Beginning:
    """The start of a column: rows with `_cdc_lsn` below `lsn` have the text `missing`."""

    lsn: int
    missing: str | None


class SchemaHistory:
    """The events of one table, in the order they were recorded; empty if nothing is known."""

    def __init__(self, events: Sequence[Mapping[str, Any]] = ()) -> None:
        self._events = [e for e in events if e["columns"]]

    @classmethod
    def from_events(cls, events: Sequence[Mapping[str, Any]], table: TableId) -> SchemaHistory:
        """Return the history of one table from all rows of `_tables`, in any order."""
        own = (e for e in events if e["table"] == str(table))
        return cls(sorted(own, key=lambda e: e["at"]))

    def lake_columns(self, name: str) -> list[str]:
        """Return the lake's columns that ever held a source column; one of them has each value."""
        found = {
            column["name"]: None
            for event in self._events
            for column in event["columns"]
            if _source_name(column) == name
        }
        return list(found) or [name]

    def beginning(self, name: str) -> Beginning:
        """Return since when the source has this column without a break.

        Earlier rows may have another column with its name, which was dropped since.
        """
        since, missing = 0, None
        was_there = True
        for event in self._events:
            column = next((c for c in event["columns"] if _source_name(c) == name), None)
            if column is None:
                was_there = False
                continue
            if not was_there:
                since = event["at_lsn"]
            was_there, missing = True, column["missing"]
        return Beginning(since, missing)

    def identities(self, lsn: int) -> list[tuple[str, ...]]:
        """Return the columns that identify the rows changed in the transaction at `lsn`.

        There are several sets, newest first, if that transaction itself changed them. An empty set:
        the server sent complete old rows, or none. An empty list: nothing is known.
        """
        found: list[tuple[str, ...]] = []
        for event in self._events:
            if event["at_lsn"] > lsn:
                continue
            if event["at_lsn"] < lsn:
                found.clear()
            found.insert(0, _identity(event))
        return found

    def read_until(self, point: int) -> int:
        """Return the end of the snapshot whose marker is at `point`; 0 if unknown.

        (Its rows don't show it if chunks were empty.)
        """
        live = (e for e in self._events if e["state"] == "live" and e["snapshot_lsn"] == point)
        return next((e["at_lsn"] for e in live), 0)

    def identity_columns(self) -> list[str]:
        """Return every source column that ever identified rows."""
        return list(dict.fromkeys(name for event in self._events for name in _identity(event)))


def _source_name(column: Mapping[str, Any]) -> str:
    name: str = column.get("source_name") or column["name"]
    return name


def _identity(event: Mapping[str, Any]) -> tuple[str, ...]:
    if event["replica_identity"] in "fn":
        return ()
    return tuple(_source_name(c) for c in event["columns"] if c["identity"])
