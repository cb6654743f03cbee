"""Tables that can't be polled at present."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from ingestd.model.backoff import Backoff
from ingestd.model.errors import TableError
from ingestd.model.schema import TableId

WAITS = Backoff(60.0, 3600.0)


class PollBackoff:
    """Why tables are not polled, and how long: longer each time, for then they are re-read."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._found: dict[TableId, tuple[TableError, float]] = {}
        self._failures: Counter[TableId] = Counter()

    def __contains__(self, table: TableId) -> bool:
        return table in self._found

    def add(self, fault: TableError) -> None:
        """Stop polling a table."""
        self._failures[fault.table] += 1
        wait_s = WAITS.after(self._failures[fault.table])
        self._found[fault.table] = fault, self._monotonic() + wait_s

    def lasting(self) -> Mapping[TableId, TableError]:
        """Return those of tables that are not to be tried again yet."""
        now = self._monotonic()
        return {name: why for name, (why, until) in self._found.items() if now < until}

    @property
    def has_waited(self) -> bool:
        """Whether there is a table to be tried again."""
        return len(self.lasting()) < len(self._found)

    def try_again(self) -> None:
        """Forget the faults of tables that have waited: who asks for this looks at them."""
        present = self.lasting().keys()
        self._found = {name: found for name, found in self._found.items() if name in present}

    def forget(self, table: TableId) -> None:
        """Record that a table is polled again."""
        self._found.pop(table, None)

    def succeeded(self, table: TableId) -> None:
        """Record that it was looked at."""
        self._failures.pop(table, None)
