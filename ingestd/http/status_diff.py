"""The status that the page shows, as differences to what was sent before."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ingestd.observe.history import columns
from ingestd.observe.status import ready
from ingestd.observe.status_json import facts_to_json, table_to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from datetime import datetime

    from ingestd.config.redaction import Redactor
    from ingestd.observe.history import SourceHistories
    from ingestd.observe.status import DaemonStatus, SourceStatus, TableStatus

_UNSHOWN = {"since", "snapshot_lsn", "snapshot_progress"}
"""Facts of tables that the page does not show, so they are not sent for hundreds of tables."""
_REMEMBERED = 8192


class RedactionCache:
    """Removes secrets from what is sent; caches, as the same names and times recur each second."""

    def __init__(self, redactor: Redactor) -> None:
        self.tree = redactor.tree
        self.text: Callable[[str], str] = lru_cache(_REMEMBERED)(redactor.text)

    def flat(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Redact a dict with few nested values."""
        return {k: self.text(v) if isinstance(v, str) else self.tree(v) for k, v in facts.items()}


class StatusDiff:
    """What was sent so far. A new instance has sent nothing: its first `update` is complete.

    The facts of a source in an update replace those sent before, one by one. A table in an update
    is complete, without values that are null or false. Most tables don't change between two
    updates: they cost one comparison, and only what is sent goes through the redactor.
    """

    def __init__(self, redacted: RedactionCache) -> None:
        self._redacted = redacted
        self._sources: dict[str, _ShownSource] = {}
        self._is_ready: bool | None = None

    def update(
        self, status: DaemonStatus, history: SourceHistories, now: datetime
    ) -> dict[str, Any]:
        """Return what is new, for JSON; ``sources`` holds only those with something new.

        ``removed``: the names of removed sources.
        """
        found: dict[str, Any] = {}
        is_ready, _ = ready(status)
        if self._is_ready is None:
            started_at = round(status.started_at.timestamp() * 1000)
            found = {"version": status.version, "started_at": started_at}
        if is_ready is not self._is_ready:
            self._is_ready = found["ready"] = is_ready
        sources = {}
        for name, source in status.sources.items():
            shown = self._sources.setdefault(name, _ShownSource(self._redacted))
            if new := shown.update(source, history):
                sources[self._redacted.text(name)] = new
        if sources:
            found["sources"] = sources
        if removed := self._sources.keys() - status.sources.keys():
            found["removed"] = [self._redacted.text(name) for name in sorted(removed)]
            for name in removed:
                del self._sources[name]
        return {"now": round(now.timestamp() * 1000), **found} if found else {}


class _ShownSource:
    def __init__(self, redacted: RedactionCache) -> None:
        self._redacted = redacted
        self._facts: dict[str, Any] = {}
        self._tables: dict[str, Hashable] = {}
        self._points = 0

    def update(self, source: SourceStatus, history: SourceHistories) -> dict[str, Any]:
        facts = facts_to_json(source)
        changed = {k: v for k, v in facts.items() if k not in self._facts or v != self._facts[k]}
        self._facts = facts
        found = self._redacted.flat(changed)
        if tables := [self._table(t) for t in source.tables.values() if self._is_new(t)]:
            found["tables"] = tables
        if gone := self._tables.keys() - source.tables.keys():
            found["gone"] = [self._redacted.text(name) for name in sorted(gone)]
            for name in gone:
                del self._tables[name]
        past = history.of_source(source.source)
        if past.added > self._points:
            found["history"] = columns(past.since(self._points))
            self._points = past.added
        return found

    def _is_new(self, table: TableStatus) -> bool:
        seen = _seen(table)
        if self._tables.get(table.table) == seen:
            return False
        self._tables[table.table] = seen
        return True

    def _table(self, table: TableStatus) -> dict[str, Any]:
        facts = table_to_json(table).items()
        shown = {k: v for k, v in facts if k not in _UNSHOWN and v is not None and v is not False}
        return self._redacted.flat(shown)


def _seen(table: TableStatus) -> Hashable:
    """Return a key that changes whenever a fact that is shown changes."""
    read = table.snapshot
    return (
        table.state,
        table.rows,
        table.last_change,
        table.reason,
        table.remedy,
        table.snapshot_requested,
        table.last_snapshot,
        None if read is None else (read.ratio, read.nbytes, read.started_at),
    )
