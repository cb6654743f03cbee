"""What a verification is of: the source at one point, the lake's changes below it, what differs.

The ports of `ingestd.pipeline.verify.run`: a source that gives its rows at a point, and a lake that
gives the changes that the point's rows come of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Mapping, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from ingestd.digests.row_digests import ComparedColumn, Value
    from ingestd.digests.value_hashes import Hashes
    from ingestd.model.errors import IngestdError
    from ingestd.model.pg_snapshot import PgSnapshot
    from ingestd.model.schema import Table
    from ingestd.ports import Split

from ingestd.model.changes import SNAPSHOT_SEQ
from ingestd.model.lsn import Lsn

Matrix = np.ndarray[tuple[int, int], np.dtype[np.uint64]]
"""Rows of numbers; the first is a hash, by whose upper bits they are parted."""
KEY, ROW, LSN, SEQ, THERE, OLD = range(6)
"""Columns of a change's numbers. `THERE`: 1 if the row is there after it, 0 if it is gone. `OLD`:
the key of the row that unsent values come from, where `Digested.linked` has any."""
SPLIT = 2
"""Column of a source row's numbers: the place of its split."""
UNSENT = np.uint64(0)
"""In a lazy column of a change: no value was sent."""
_RECENT_BYTES = 1 << 36
"""Less WAL than 2^31 transactions write, whose ids could be taken for others'."""


@dataclass(frozen=True, slots=True)
class VerifyPoint:
    """When the source is compared: all that its snapshot sees lies below `lsn`.

    `seen`: what it sees of that; None: all of it. `is_exact` is False where the lake's changes
    don't say what the source was at a position (polling): then all of them count.
    """

    lsn: Lsn
    seen: PgSnapshot | None = None
    is_exact: bool = True

    def sees(
        self, lsn: NDArray[np.int64], seq: NDArray[np.int64], xids: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Say of each change whether the snapshot sees it; `xids`: -1 where there is none.

        Rows that were read may lie at the very position: of a table that was whole before, by a
        snapshot that is older.
        """
        if not self.is_exact:
            return np.ones(len(lsn), np.bool_)
        found: NDArray[np.bool_] = (lsn < self.lsn) | ((lsn == self.lsn) & (seq <= SNAPSHOT_SEQ))
        if self.seen is not None:
            is_old = (lsn < self.lsn - _RECENT_BYTES) | (xids < 0)
            found &= is_old | self.seen.sees(xids)
        return found


@dataclass(frozen=True, slots=True)
class Digested:
    """How a table is compared.

    `key`: places of the columns that tell rows apart; none: rows are a multiset. `lazy`: places of
    those that some change was sent without. `linked`: sorted hashes of the keys of rows that took
    unsent values along when their key changed. `changes`: how many there are, at most.
    """

    table: Table
    columns: tuple[ComparedColumn, ...]
    key: tuple[int, ...]
    lazy: tuple[int, ...] = ()
    linked: Hashes = field(default_factory=lambda: np.empty(0, np.uint64))
    changes: int = 0
    note: str | None = None

    @property
    def first_lazy(self) -> int:
        """Where in a change's numbers the lazy columns begin."""
        return OLD + 1 if len(self.linked) else OLD

    @property
    def width(self) -> int:
        """How many numbers a change has."""
        return self.first_lazy + len(self.lazy)

    def is_linked(self, keys: Hashes) -> NDArray[np.bool_]:
        """Say which of these keys are linked."""
        found: NDArray[np.bool_] = np.isin(keys, self.linked)
        return found


Rows = list[dict[str, "Value"]]
"""Rows as values, by the source's names of their columns."""


class VerifiedSource(Protocol):
    """The source at `point`. Raises TableChangedError for a table that was altered meanwhile."""

    @property
    def point(self) -> VerifyPoint:
        """When it is."""
        ...

    async def splits(self, table: Table) -> Sequence[Split]:
        """Cut a table. Raises TableError, TransientError."""
        ...

    def batches(self, split: Split) -> AsyncGenerator[pa.RecordBatch, None]:
        """Read a split's rows, no faster than it may."""
        ...

    async def ensure_unreplaced(self, table: Table) -> None:
        """Raise TableChangedError if what was read is not what was there at the point."""
        ...


class VerifiedLake(Protocol):
    """The lake, which only is read."""

    async def position(self) -> Lsn | None:
        """Return the position up to which it has everything; None for an empty lake."""
        ...

    async def describe(self, table: Table) -> Digested:
        """Say how a table is compared, as far as that is known without its changes.

        Raises TableError if it can't be compared.
        """
        ...

    async def survey(
        self, described: Digested, point: VerifyPoint, *, most_linked: int
    ) -> Digested:
        """Look at a table's changes below `point`, which the lake has.

        Raises TableError as before, and for more than `most_linked` linked keys.
        """
        ...

    def changes(self, digested: Digested) -> AsyncGenerator[Matrix, None]:
        """Yield the numbers of the changes that were surveyed, in any order."""
        ...

    async def rows_of(self, digested: Digested, keys: Collection[int]) -> Rows:
        """Return the rows with these hashes of their keys (or of themselves), by the plain fold."""
        ...

    async def ensure_whole(self, table: Table) -> None:
        """Raise TableChangedError if the table was re-read since, or is not live any more."""
        ...


class VerifyState(StrEnum):
    """How a table's verification ended."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NOT_COMPARED = "not compared"
    NOT_REACHED = "not reached"


class Kind(StrEnum):
    """What is wrong with a row. `MISSING`: in the source only; `EXTRA`: in the lake only."""

    MISSING = "missing"
    EXTRA = "extra"
    DIFFERENT = "different"
    DOUBLED = "doubled"


@dataclass(frozen=True, slots=True)
class Difference:
    """A row that differs: its key as texts, or for rows without one a hash under the name `row`.

    `count`: how often, of equal rows. `columns`: those that differ. The values are empty unless
    asked for, and never those of masked columns.
    """

    kind: Kind
    key: Mapping[str, str | None]
    columns: tuple[str, ...] = ()
    count: int = 1
    source: Mapping[str, str | None] = field(default_factory=dict)
    lake: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VerifyOutcome:
    """A table's. `counts`: rows that differ, by how. `fault`: why it was not compared."""

    table: str
    state: VerifyState
    source_rows: int = 0
    lake_rows: int = 0
    changes: int = 0
    counts: Mapping[Kind, int] = field(default_factory=dict)
    differences: tuple[Difference, ...] = ()
    note: str | None = None
    fault: IngestdError | None = None


class VerifyProgress(Protocol):
    """What is told while it goes on."""

    def waiting(self, lake: Lsn | None, until: Lsn) -> None:
        """Tell that the lake is not there yet."""
        ...

    def table(self, name: str, ratio: float) -> None:
        """Tell how much of a table has been read."""
        ...
