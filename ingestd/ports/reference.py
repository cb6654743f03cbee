"""Reference tables: the source of their rows, and the lake that keeps the current ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import pyarrow as pa


class ReferenceTableSource(Protocol):
    """Current rows of one table: a snapshot, then what changed.

    One user at a time. Raises TransientError, OperatorError or TableError from any async method;
    what it gave until then stays given.
    """

    @property
    def key(self) -> Sequence[str]:
        """Lake names of the columns that changes find their rows by, known with the first batch.

        Empty for a source that gives no changes.
        """
        ...

    @property
    def position(self) -> int:
        """A number that grows with what is given: what was given up to it need not be given again.

        Of a snapshot, known with its first batch, then of the changes polled last. 0 for a source
        that gives no changes.
        """
        ...

    async def poll_snapshot(self) -> pa.RecordBatch | None:
        """Return the next batch of the snapshot, None for good after the last.

        All batches together are the table at one moment, each row once. Each has the table's
        columns, lake names and types, and nothing else; the first may be empty, so that an empty
        table too tells its columns. An empty batch is not the end: an empty first poll is not the
        completion of a table. Nor is an error: the next poll goes on where it was, or raises
        TransientError (``snapshot_gone``), each time: then another source is to begin again.
        """
        ...

    def is_snapshot_complete(self) -> bool:
        """Return whether `poll_snapshot` has given None.

        No longer so when the snapshot is void (the table was truncated, re-read or altered):
        then `poll_snapshot` gives another one, which takes the place of all that was given.
        """
        ...

    async def poll_changes(self) -> pa.RecordBatch | None:
        """Return what changed since the last poll, or since the snapshot: one row a key.

        None while the snapshot is not complete, also when it has just become void. The table's
        columns, and ``_cdc_op``: `u`, the row as it is now, or `d`, the key of one that is gone.
        There may be ``_cdc_unchanged``, names of columns whose value is that which the row had
        before these changes, and ``_cdc_before``, the key that it had then if that was another. A
        source that sees no changes gives an empty batch, always.
        """
        ...

    def checkpoint(self) -> bytes:
        """Return the state from which `restore` goes on. Changes nothing."""
        ...

    def restore(self, checkpoint: bytes) -> bool:
        """Go on from there, before the first poll.

        False if the snapshot can't be gone on with (whoever held it has ended): it begins anew, and
        the batches given before the checkpoint are void.
        """
        ...

    async def close(self) -> None:
        """Free everything. At any time, twice."""
        ...


@dataclass(frozen=True, slots=True)
class ReferenceState:
    """What the lake has of a reference table: its Delta version, rows and columns.

    `position`: up to which source position its rows are (`ReferenceTableSource.position`), None if
    that was never told. `is_new`: the call that gave this has made a version.
    """

    version: int
    rows: int
    schema: pa.Schema
    position: int | None = None
    is_new: bool = False


class ReferenceSink(Protocol):
    """The current rows of one reference table in the lake; every version of it is whole.

    One user at a time. Raises TransientError (storage), OperatorError (disk full, another writer);
    after an error what is there is either that of before or that of after the call.
    """

    async def open(self) -> ReferenceState | None:
        """Read what the lake has, None if nothing; make it durable. Creates nothing."""
        ...

    async def replace(
        self, batches: AsyncIterator[pa.RecordBatch], *, position: int | None = None
    ) -> ReferenceState:
        """Put these rows, and their columns, in the place of all there is: one version.

        At least one batch, all of one schema. With the same rows (in any order) and columns as
        there are, and no `position`, nothing is written. If `batches` raises, nothing is either.
        """
        ...

    async def merge(
        self, changes: pa.RecordBatch, key: Sequence[str], *, position: int
    ) -> ReferenceState:
        """Apply changes as `ReferenceTableSource.poll_changes` gives them: one version.

        Nothing if `position` is not above the state's. Raises ValueError for other columns than the
        table has; TransientError (``row_missing``) if a value is to stay as it was in a row that is
        not there: replace all rows.
        """
        ...

    async def close(self) -> None:
        """Return when nothing is written any more. At any time, twice."""
        ...
