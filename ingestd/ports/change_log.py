"""The port for changes the lake already has, for a capture that compares with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    import pyarrow as pa

    from ingestd.model.schema import TableId


class ChangeLog(Protocol):
    """The lake's copy of a source's changes."""

    def changes(
        self, table: TableId, columns: Sequence[str]
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Yield the durable change rows of a table, in any order: these columns of its raw table.

        As of the call; nothing for a table that the lake does not have. A missing column is
        omitted. Memory is bounded. Always close it. Raises TransientError, OperatorError.
        """
        ...
