"""The ports of a verification: a source at one point, and the lake's changes below that point.

`ingestd.pipeline.verify.run` drives them: the source returns its rows at the point, the lake
returns the changes that produce those rows.
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

    from ingestd.digests.row_digests import ComparedColumn, ComparedValue
    from ingestd.digests.value_hashes import Hashes
    from ingestd.model.errors import IngestdError
    from ingestd.model.lake_state import RegisteredTable
    from ingestd.model.pg_snapshot import PgSnapshot
    from ingestd.model.schema import Table, TableId
    from ingestd.ports import Split

from ingestd.model.changes import SNAPSHOT_SEQ
from ingestd.model.lsn import Lsn

Matrix = np.ndarray[tuple[int, int], np.dtype[np.uint64]]
"""Rows of numbers; the first is a hash, whose upper bits select the partition."""
KEY, ROW, LSN, SEQ, EXISTS, OLD = range(6)
"""Columns of a change's numbers. `EXISTS`: 1 if the row exists after it, 0 if it was deleted.
`OLD`: the key of the row that unsent values come from, if `Digested.linked` has any."""
SPLIT = 2
"""Column of a source row's numbers: the index of its split."""
UNSENT = np.uint64(0)
"""In a lazy column of a change: no value was sent."""
_RECENT_BYTES = 1 << 36
"""Less WAL than 2^31 transactions write; beyond it, transaction ids could be ambiguous."""


@dataclass(frozen=True, slots=True)
class VerifyPoint:
    """The point of the comparison: everything its snapshot sees precedes `lsn`.

    `seen`: the part of it that the snapshot sees; None: all of it. `is_exact` is False if the
    lake's changes don't determine the source's state at a position (polling): then all of them
    count.
    """

    lsn: Lsn
    seen: PgSnapshot | None = None
    is_exact: bool = True

    def sees(
        self, lsn: NDArray[np.int64], seq: NDArray[np.int64], xids: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return for each change whether the snapshot sees it; `xids`: -1 where there is none.

        Snapshot rows may lie exactly at the position: of a table that was complete before, by an
        older snapshot.
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

    `key`: indexes of the columns that identify a row; none: rows are a multiset. `lazy`: indexes of
    columns that some change was sent without. `linked`: sorted hashes of the keys of rows that
    carried unsent values along when their key changed. `changes`: an upper bound of their number.
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
        """Index of the first lazy column in a change's numbers."""
        return OLD + 1 if len(self.linked) else OLD

    @property
    def width(self) -> int:
        """Count of a change's numbers."""
        return self.first_lazy + len(self.lazy)

    def is_linked(self, keys: Hashes) -> NDArray[np.bool_]:
        """Return for each of these keys whether it is linked."""
        found: NDArray[np.bool_] = np.isin(keys, self.linked)
        return found


ValueRows = list[dict[str, "ComparedValue"]]
"""Rows as values, by the source's column names."""


class VerifiedSource(Protocol):
    """The source at `point`. Raises TableChangedError for a table altered since."""

    @property
    def point(self) -> VerifyPoint:
        """The point at which the source is read."""
        ...

    async def splits(self, table: Table) -> Sequence[Split]:
        """Return the table's splits. Raises TableError, TransientError."""
        ...

    def batches(self, split: Split) -> AsyncGenerator[pa.RecordBatch, None]:
        """Yield a split's rows, within the rate limit."""
        ...

    async def ensure_unreplaced(self, table: Table) -> None:
        """Raise TableChangedError if the rows read are not the table's rows at the point."""
        ...


class VerifiedLake(Protocol):
    """The lake, opened read-only."""

    async def known(self) -> Mapping[TableId, RegisteredTable]:
        """Return the recorded state of the tables."""
        ...

    async def position(self) -> Lsn | None:
        """Return the position up to which the lake is complete; None for an empty lake."""
        ...

    async def describe(self, table: Table) -> Digested:
        """Return how a table is compared, as far as that is known without its changes.

        Raises TableError if it can't be compared.
        """
        ...

    async def survey(
        self, described: Digested, point: VerifyPoint, *, most_linked: int
    ) -> Digested:
        """Examine a table's changes below `point`, all of which the lake has.

        Raises TableError as `describe` does, and for more than `most_linked` linked keys.
        """
        ...

    def changes(self, digested: Digested) -> AsyncGenerator[Matrix, None]:
        """Yield the numbers of the surveyed changes, in any order."""
        ...

    async def rows_of(self, digested: Digested, keys: Collection[int]) -> ValueRows:
        """Return the rows with these hashes of their keys (or of themselves), by the plain fold."""
        ...

    async def ensure_unchanged(self, table: Table) -> None:
        """Raise TableChangedError if the table has been re-read or is no longer live."""
        ...

    async def close(self) -> None:
        """Return when no read is in flight any more."""
        ...


class VerifyState(StrEnum):
    """How a table's verification ended."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NOT_COMPARED = "not compared"
    NOT_REACHED = "not reached"


class Kind(StrEnum):
    """How a row differs. `MISSING`: in the source only; `EXTRA`: in the lake only."""

    MISSING = "missing"
    EXTRA = "extra"
    DIFFERENT = "different"
    DOUBLED = "doubled"


@dataclass(frozen=True, slots=True)
class Difference:
    """A row that differs: its key as text; without a key, a hash under the name `row`.

    `count`: the number of equal rows. `columns`: those that differ. The values are empty unless
    requested; those of masked columns are always empty.
    """

    kind: Kind
    key: Mapping[str, str | None]
    columns: tuple[str, ...] = ()
    count: int = 1
    source: Mapping[str, str | None] = field(default_factory=dict)
    lake: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VerifyOutcome:
    """The outcome for one table. `counts`: differing rows by kind. `fault`: why not compared."""

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
    """Receives the progress of a verification."""

    def waiting(self, lake: Lsn | None, until: Lsn) -> None:
        """Report that the lake has not reached the position yet."""
        ...

    def table(self, name: str, ratio: float) -> None:
        """Report the part of a table that has been read, 0 to 1."""
        ...
