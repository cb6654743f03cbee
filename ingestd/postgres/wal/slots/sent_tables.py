"""Which tables the slot sends completely: the only place that says so.

The slot sends every change of them by transactions that end from now on, so their reader need not
wait for those that are open (`snapshot.earlier_transactions`). All other readers wait.

    becomes one   the slot's changes are given up, and `_tables` has the table live: its reader has
                  waited, and nothing has interrupted it since
                  a slot is created after the table was published: that waits for its writers. Until
                  the publication is prepared again
    ceases to be  a discovery or the stream finds it interrupted: the publication lacked it, columns
                  or rows of it, was altered, or could send less for a time
                  the publication is prepared without it: it is refused, dropped, renamed or
                  re-created, or locked

`_tables` may have an interrupted table live for a while, until its reader begins. A start after a
kill in between finds it interrupted once more, as `_tables` has its earlier entry in the
publication. An attempt remembers it, so the order of `discover` and `continuity` does not matter; a
new slot's tables are not remembered, as `_tables` need not have them yet. A new process
knows no such table, except from `_tables`.
"""

from __future__ import annotations

from collections.abc import Iterable

from ingestd.model.lake_state import LakeState
from ingestd.model.schema import Table, TableId


class SentTables:
    """The tables of one attempt; `kept`, by name the OID, outlives it."""

    def __init__(self, kept: dict[TableId, int]) -> None:
        self._kept = kept
        self._of_new_slot: dict[TableId, int] = {}
        self._interrupted: set[TableId] = set()

    def interrupt(self, names: Iterable[TableId]) -> None:
        """Record tables of which open transactions may have changes that are not sent."""
        for name in names:
            self._interrupted.add(name)
            self._kept.pop(name, None)
            self._of_new_slot.pop(name, None)

    def keep_live(self, committed: LakeState) -> None:
        """Record that the slot's changes are given up: the tables that were live until now."""
        live = {n: known.oid for n, known in committed.tables.items() if committed.is_live(n)}
        self._kept.update((n, oid) for n, oid in live.items() if n not in self._interrupted)

    def publish(self, tables: Iterable[Table], *, is_new: bool = False) -> None:
        """Record the tables that the publication was prepared with: it sends no others.

        `is_new`: the slot was created after that.
        """
        published = {table.id: table.oid for table in tables}
        kept = {} if is_new else dict(self._kept.items() & published.items())
        self._kept.clear()
        self._kept.update(kept)
        self._of_new_slot = published if is_new else {}

    def has_all(self, tables: Iterable[Table]) -> bool:
        """Return whether the slot sends all of these tables completely."""
        sent = self._kept | self._of_new_slot
        return all(sent.get(table.id) == table.oid for table in tables)
