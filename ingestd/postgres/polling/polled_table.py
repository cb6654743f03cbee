"""A polled table, and the columns by which its changes are found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ingestd.model.schema import Table

CursorKind = Literal["time", "number", "uuid"]
"""timestamp, timestamptz and date; integers and numeric; uuid (version 7, which increases)."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The columns, by the source's names, that increase when a row is written.

    Only the first decides where to scan, by an index that begins with it; the others, if any, only
    order rows with equal values. `kind` is that of the first column's type.
    """

    columns: tuple[str, ...]
    kind: CursorKind


@dataclass(frozen=True, slots=True)
class PolledTable:
    """A table that is polled. Times are in seconds.

    `table.key` names the unique key that identifies rows; all its columns are captured and not
    null, and they are its identity, too. `cursor` None: every poll scans the entire table, by xmin.
    `deleted`: the column (captured or not) that is neither null nor false in a row that counts as
    deleted; None without. `interval_s`: how often it is polled while it changes. `sweep_s`: how
    often its keys are compared with the lake's, None for never. `others`: type OIDs of columns that
    queries name though they may not be captured: `by` and `deleted`.
    """

    table: Table
    cursor: Cursor | None
    deleted: str | None
    interval_s: float
    sweep_s: float | None
    others: Mapping[str, int] = field(default_factory=dict)

    @property
    def by(self) -> str | None:
        """The column that decides where to scan; None without a cursor."""
        return None if self.cursor is None else self.cursor.columns[0]
