"""The faults of tables that can't be polled at present."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from ingestd.model.backoff import Backoff
from ingestd.model.errors import TableError
from ingestd.model.schema import TableId

WAITS = Backoff(60.0, 3600.0)


class PollFaults:
    """The faults of tables that are not polled. Pauses increase, as a re-read follows each."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._paused: dict[TableId, tuple[TableError, float]] = {}
        self._failures: Counter[TableId] = Counter()

    def __contains__(self, table: TableId) -> bool:
        return table in self._paused

    def pause(self, fault: TableError) -> None:
        """Stop polling a table."""
        self._failures[fault.table] += 1
        wait_s = WAITS.after(self._failures[fault.table])
        self._paused[fault.table] = fault, self._monotonic() + wait_s

    def lasting(self) -> Mapping[TableId, TableError]:
        """Return the faults of tables that must not be retried yet."""
        now = self._monotonic()
        return {name: why for name, (why, until) in self._paused.items() if now < until}

    @property
    def has_waited(self) -> bool:
        """True if a table can be retried."""
        return len(self.lasting()) < len(self._paused)

    def try_again(self) -> None:
        """Drop the faults of tables that have waited: the caller checks these tables."""
        present = self.lasting().keys()
        self._paused = {name: fault for name, fault in self._paused.items() if name in present}

    def retry(self, tables: Collection[TableId]) -> Collection[TableId]:
        """End the wait of those tables that wait; return which these are."""
        waiting = self._paused.keys() & set(tables)
        for table in waiting:
            self._paused[table] = self._paused[table][0], -math.inf
        return waiting

    def clear(self, table: TableId) -> None:
        """Record that a table is polled again."""
        self._paused.pop(table, None)

    def succeeded(self, table: TableId) -> None:
        """Record that it was looked at."""
        self._failures.pop(table, None)
