"""The changes that the lake already has, for a capture that compares with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    import pyarrow as pa

    from ingestd.model.schema import TableId


class ChangeLog(Protocol):
    """What the lake has of a source's changes."""

    def changes(
        self, table: TableId, columns: Sequence[str]
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Yield the durable change rows of a table, in any order: these columns of its raw table.

        As of when the call is made; nothing of a table that the lake has not. A column that it
        lacks is left out. Bounded memory. Close it always. Raises TransientError, OperatorError.
        """
        ...
