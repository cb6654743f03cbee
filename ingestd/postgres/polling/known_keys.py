"""The keys of polled tables that the lake holds, within the memory for the keys of all tables."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from ingestd.model.changes import TableBatch
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.schema import TableId
from ingestd.ports import ChangeLog
from ingestd.postgres.polling.keys.key_set import KeySet
from ingestd.postgres.polling.table_state import PolledState


class KnownKeys:
    """Loads the keys of tables in `states` from `log`, and keeps them up to date.

    `log`: None if changes of the lake can't be read. `memory_bytes`: for all keys; a table's are
    not kept if they take more than those of others leave. `least_bytes`: see `keys_held`.
    """

    def __init__(
        self,
        log: ChangeLog | None,
        states: Mapping[TableId, PolledState],
        *,
        memory_bytes: int,
        least_bytes: int,
    ) -> None:
        self._log = log
        self._states = states
        self._memory_bytes = memory_bytes
        self._least_bytes = least_bytes

    async def load_keys(self, state: PolledState) -> KeySet | None:
        """Return the keys that the lake holds of a table; None if there are too many."""
        async with state.loading:  # a poll and a sweep may both need them
            if not state.knows_keys and self._log is not None:
                table, before = state.polled.table, state.forgotten
                keys = await KeySet.load(
                    self._log,
                    table,
                    limit_bytes=self._bytes_for(table.id),
                    least_bytes=self._least_bytes,
                )
                if before == state.forgotten:
                    state.keys, state.knows_keys = keys, True
        return state.keys

    def can_be_loaded(self, state: PolledState, durable: Lsn) -> bool:
        """Return whether they are known, or can be: the lake has all that was delivered.

        `durable`: the position up to which it has.
        """
        if state.knows_keys or self._log is None or state.load_above == ZERO:
            return True
        return state.load_above < durable

    async def record_delivered(self, state: PolledState, batches: Sequence[TableBatch]) -> None:
        """Record the keys of rows that were delivered."""
        keys = state.keys
        if keys is None:
            return
        for batch in batches:
            await asyncio.to_thread(keys.apply_changes, batch)
        if keys.nbytes > self._bytes_for(state.polled.table.id):
            state.keys = None

    def _bytes_for(self, table: TableId) -> int:
        """Return how many bytes a table's keys may take, of what other tables have left."""
        others = (s.keys for name, s in self._states.items() if name != table)
        taken: int = sum(k.nbytes for k in others if k is not None)
        return max(0, self._memory_bytes - taken)
