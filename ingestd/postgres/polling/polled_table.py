"""What is polled: a table, and by what its changes are found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ingestd.model.schema import Table

CursorKind = Literal["time", "number", "uuid"]
"""timestamp, timestamptz and date; integers and numeric; uuid (of version 7: they grow)."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The columns, by the source's names, that grow when a row is written.

    The first alone says where to look, by an index that begins with it; the others, if any, only
    order rows that are equal in it. `kind` is of the first one's type.
    """

    columns: tuple[str, ...]
    kind: CursorKind


@dataclass(frozen=True, slots=True)
class PolledTable:
    """A table that is polled. Times are in seconds.

    `table.key` names the unique key that rows are told apart by, all of whose columns are captured
    and not null; those columns are its identity too. `cursor` None: every poll looks through the
    whole table, by xmin. `deleted`: the column (captured or not) that is neither null nor false in
    a row that counts as deleted; None without. `interval_s`: how often it is polled while it
    changes. `sweep_s`: how often its keys are compared with the lake's, None for never.
    """

    table: Table
    cursor: Cursor | None
    deleted: str | None
    interval_s: float
    sweep_s: float | None

    @property
    def by(self) -> str | None:
        """Name the column that says where to look; None without a cursor."""
        return None if self.cursor is None else self.cursor.columns[0]
