"""The ports of reference tables: the source of their rows, and the lake with the current ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import pyarrow as pa


class ReferenceTableSource(Protocol):
    """Current rows of one table: a snapshot, then the changes since.

    One user at a time. Any async method may raise TransientError, OperatorError or TableError; what
    was returned before stays valid.
    """

    @property
    def key(self) -> Sequence[str]:
        """Lake names of the columns by which changes find their rows, known with the first batch.

        Empty for a source that returns no changes.
        """
        ...

    @property
    def position(self) -> int:
        """A number that grows with what is returned: nothing up to it need be returned again.

        Known with a snapshot's first batch, then that of the changes polled last. 0 for a source
        that returns no changes.
        """
        ...

    async def poll_snapshot(self) -> pa.RecordBatch | None:
        """Return the next batch of the snapshot; None from the end of the snapshot on.

        All batches together are the table at one moment, each row once. Each has the table's
        columns, lake names and types, and nothing else. The first may be empty, so that an empty
        table shows its columns too. An empty batch is not the end: an empty first poll does not
        complete the snapshot. Neither does an error: the next poll continues where the last one
        was, or raises TransientError (``snapshot_gone``) each time: then a new source must be
        opened.
        """
        ...

    def is_snapshot_complete(self) -> bool:
        """Return whether `poll_snapshot` has returned None.

        False again once the snapshot is void (the table was truncated, re-read or altered): then
        `poll_snapshot` returns a new one, which replaces everything returned before.
        """
        ...

    async def poll_changes(self) -> pa.RecordBatch | None:
        """Return what changed since the last poll, or since the snapshot: one row per key.

        None while the snapshot is incomplete, also when it has just become void. The columns are
        the table's and ``_cdc_op``: `u`, the row as it is now, or `d`, the key of a deleted row.
        Optional are ``_cdc_unchanged``, the names of columns that keep the value from before these
        changes, and ``_cdc_before``, the earlier key if it was different. A source that sees no
        changes always returns an empty batch.
        """
        ...

    def checkpoint(self) -> bytes:
        """Return the state from which `restore` continues. Changes nothing."""
        ...

    def restore(self, checkpoint: bytes) -> bool:
        """Continue from a checkpoint, before the first poll.

        Return False if the snapshot can't be continued (the session that held it has ended). It
        then starts over, and the batches returned before the checkpoint are void.
        """
        ...

    async def close(self) -> None:
        """Release everything. May be called at any time, twice."""
        ...


@dataclass(frozen=True, slots=True)
class ReferenceState:
    """What the lake has of a reference table: its version, rows and columns.

    `position`: the source position up to which its rows are (`ReferenceTableSource.position`), None
    if never reported. `is_new`: the call that returned this has created a version.
    """

    version: int
    rows: int
    schema: pa.Schema
    position: int | None = None
    is_new: bool = False


class ReferenceSink(Protocol):
    """The current rows of one reference table in the lake; every version of it is complete.

    One user at a time. Raises TransientError (storage), OperatorError (disk full, another writer).
    After an error the table is either as before or as after the call.
    """

    async def open(self) -> ReferenceState | None:
        """Read what the lake has and make it durable; None if nothing. Creates nothing."""
        ...

    async def replace(
        self, batches: AsyncIterator[pa.RecordBatch], *, position: int | None = None
    ) -> ReferenceState:
        """Replace all rows, and the columns, by these: one version.

        At least one batch, all of one schema. Nothing is written if rows (in any order) and columns
        are the same as before and there is no `position`, or if `batches` raises.
        """
        ...

    async def merge(
        self, changes: pa.RecordBatch, key: Sequence[str], *, position: int
    ) -> ReferenceState:
        """Apply changes as `ReferenceTableSource.poll_changes` returns them: one version.

        No effect if `position` is not above the state's. Raises ValueError for columns that the
        table does not have; TransientError (``row_missing``) if a value should be kept from a row
        that is missing: replace all rows.
        """
        ...

    async def close(self) -> None:
        """Return when no write is in flight any more. May be called at any time, twice."""
        ...
