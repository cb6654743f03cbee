"""DDL events logged by event triggers in the database, and the tables they cause to be re-read.

With ``ddl_log = "event_trigger"`` the functions of `ddl_log.sql` write one logical message for each
command, table and type, in the command's own transaction. Responsibilities:

1. The **trigger** reports facts and judges nothing: the command, its object, the resulting state.
2. `parse` accepts or refuses a message. Any role may write one, so a message that differs from the
   script's format is counted and ignored.
3. `reason_of` compares an event with what was known of the table: the previous event, and the last
   catalog poll. It returns why rows may differ from the streamed changes. In doubt, re-read.
4. The **catalog poll** decides when: an event counts as soon as a poll sees its transaction,
because
   the poll's result is then later than the command. It is void if the table was read since.

Events add evidence and remove none: a catalog poll's findings count with or without them. Every
event about a captured table triggers a catalog poll, so added, dropped and altered columns need
nothing else. Events that are not yet recorded in the lake are lost with the process; then the poll
at the next start decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.schema import TableId
from ingestd.postgres.rewrites.catalog_evidence import reads_alike
from ingestd.postgres.rewrites.fingerprint import TableFingerprint

VERSION = 1
"""The version of the script and of its message format."""

_COMMAND = re.compile(r"[A-Z][A-Z ]{0,62}")
_MOST_OID = (1 << 32) - 1
_ACCESS_METHOD = 8
"""The only rewrite reason that leaves every value unchanged, as a bit. Source:
src/include/commands/event_trigger.h."""
_KINDS = {
    "table",
    "table column",
    "type",
    "composite type",
    "composite type column",
    "command",
    "dropped table",
    "dropped column",
    "rewrite",
    "truncate",
}


@dataclass(frozen=True, slots=True)
class DdlEvent:
    """One message. `command`: its tag. `what`: one of `_KINDS`, the kind of `oid` or its event.

    `table`: its name then; None if unknown. `root`: the root of a partition. `types`: type OIDs by
    column number; `leaves`: the root's leaf partitions; `labels`: an enum's labels by their OIDs.
    None if the message lacks them. `why`: the bits of a rewrite's reason.
    """

    command: str
    what: str
    oid: int
    table: TableId | None = None
    root: int | None = None
    types: Mapping[int, int] | None = None
    leaves: frozenset[int] | None = None
    labels: Mapping[int, str] | None = None
    why: int = 0


def parse(content: bytes) -> DdlEvent | None:
    """Parse a message; return None if its format is not the script's."""
    try:
        text = content.decode()
        is_text = True
    except UnicodeDecodeError:  # the database has another encoding: names can't be compared
        text = content.decode("latin-1")
        is_text = False
    try:
        found = json.loads(text)
        return _event(found, is_text=is_text)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _event(recorded: Any, *, is_text: bool) -> DdlEvent | None:  # noqa: ANN401 - anyone's JSON
    command, what = recorded["kind"], recorded["what"]
    is_known = _number(recorded["v"]) == VERSION and what in _KINDS
    if not is_known or _COMMAND.fullmatch(command) is None:
        return None
    names = recorded.get("schema"), recorded.get("name")
    table = TableId(*names) if is_text and all(isinstance(n, str) for n in names) else None
    root, types, leaves, labels = (recorded.get(k) for k in ("root", "types", "leaves", "labels"))
    return DdlEvent(
        command,
        what,
        _number(recorded["oid"]),
        table,
        None if root is None else _number(root),
        None if types is None else {int(n): _number(t) for n, t in types.items()},
        None if leaves is None else frozenset(map(_number, leaves)),
        None if labels is None else {int(n): str(label) for n, label in labels.items()},
        _number(recorded.get("why", 0)),
    )


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_OID:
        msg = "not an OID"
        raise ValueError(msg)
    return value


@dataclass(frozen=True, slots=True)
class KnownObject:
    """What was known of a table or a type at a different time than an event's.

    `gone`: leaf partitions that existed before, or in between, but not at the event.
    """

    table: TableId | None = None
    types: Mapping[int, int] = field(default_factory=dict)
    labels: Mapping[int, str] = field(default_factory=dict)
    gone: frozenset[int] = frozenset()


def reason_of(event: DdlEvent, known: Iterable[KnownObject] = ()) -> str | None:
    """Return why the rows may differ from the streamed changes; None if they can't.

    The event is compared with each of `known`: a difference means an alteration in between.
    """
    by = f"({event.command})"
    if event.what == "truncate":
        return f"a partition was truncated directly {by}"
    if event.what == "rewrite":
        keeps_values = event.why == _ACCESS_METHOD
        return None if keeps_values else f"rewritten by {event.command}"
    if event.what == "table column":
        return f"a column was renamed {by}"
    if event.what in {"composite type", "composite type column"}:
        return f"labels or attributes of a type changed {by}"
    return next(filter(None, (_difference(event, one, by) for one in known)), None)


def _difference(event: DdlEvent, known: KnownObject, by: str) -> str | None:
    if event.table and known.table and event.what == "table" and event.table != known.table:
        return f"it was renamed, or moved to another schema {by}"
    if any(not reads_alike(known.types.get(n, t), t) for n, t in (event.types or {}).items()):
        return f"a column's type changed {by}"
    if any(known.labels.get(n, label) != label for n, label in (event.labels or {}).items()):
        return f"labels or attributes of a type changed {by}"
    if known.gone:
        return f"a partition was detached or dropped {by}"
    return None


@dataclass(slots=True)
class DdlLog:
    """The events that no catalog poll has judged yet. Used on the event loop only.

    `_pending`: by the table's OID and the transaction's id, the reason to re-read it, and the
    commit position. `_tables`, `_seen`: the last poll, by the table's OID. `before`: by OID, the
    events since the last poll and the one before them, because any role may have written the last.
    `_objects`: the captured tables, and the component types of their columns. `leaves`: by the
    root's OID, the partitions known from events. `_voided`: the last poll that caused the table to
    be re-read. `_points`: the position of the lake's snapshot of it. `_last`: the commit position
    of the last event's transaction; earlier events are repetitions. `awaits`: the last poll did not
    see an event's transaction. `most_kept`: limit for the columns and labels kept in earlier events
    of one object, for comparison.
    """

    awaits: bool = False
    most_kept: int = 20_000
    _pending: dict[tuple[int, int], tuple[str, Lsn]] = field(default_factory=dict)
    _tables: Mapping[int, tuple[TableId, TableFingerprint]] = field(default_factory=dict)
    _seen: PgSnapshot | None = None
    _objects: AbstractSet[int] = frozenset()
    before: dict[int, list[KnownObject]] = field(default_factory=dict)
    leaves: dict[int, set[int]] = field(default_factory=dict)
    _voided: dict[int, PgSnapshot] = field(default_factory=dict)
    _points: Mapping[int, Lsn] = field(default_factory=dict)
    _last: Lsn = ZERO
    _unseen: set[int] = field(default_factory=set)

    def unjudged(self) -> frozenset[int]:
        """Return the tables that must be re-read because of an event."""
        return frozenset(table for table, _ in self._pending)

    def record(
        self, event: DdlEvent, lsn: Lsn, xid: int, is_wanted: Callable[[TableId], bool]
    ) -> bool:
        """Record an event. Return whether it requires a catalog poll.

        `is_wanted`: whether the config includes a table of that name.
        """
        if lsn < self._last:
            return False
        self._last = lsn
        reasons = dict(self._judged(event, xid))
        concerned = bool(reasons) or event.what == "command" or event.oid in self._tables
        concerned |= event.root in self._tables
        concerned |= event.what == "table" and event.table is not None and is_wanted(event.table)
        self._note(event)
        for table, reason in reasons.items():
            if reason is not None and not self._is_void(table, lsn, xid):
                self._pending.setdefault((table, xid), (reason, lsn))
        if concerned:
            self._unseen.add(xid)
        return concerned

    def set_read_positions(self, points: Mapping[int, Lsn]) -> None:
        """Set the positions at which the lake's rows were read. Earlier events are void."""
        self._points = points

    def visible_to(self, seen: PgSnapshot) -> dict[int, str]:
        """Return the tables to re-read and why, judged by what a catalog poll sees."""
        self._unseen = {xid for xid in self._unseen if not _sees(seen, xid)}
        self.awaits = bool(self._unseen)
        found: dict[int, str] = {}
        for (table, xid), (reason, lsn) in self._pending.items():
            if _sees(seen, xid) and not self._is_void(table, lsn, xid):
                found.setdefault(table, reason)
        return found

    def record_poll(
        self,
        tables: Mapping[int, tuple[TableId, TableFingerprint]],
        seen: PgSnapshot,
        voided: Iterable[int],
    ) -> None:
        """Record what a poll found, after `visible_to`, and the tables re-read because of it."""
        self._tables, self._seen = tables, seen
        self._objects = {t.oid for _, s in tables.values() for t in s.types} | tables.keys()
        self._voided |= dict.fromkeys(voided, seen)
        self._pending = {
            key: found for key, found in self._pending.items() if not _sees(seen, key[1])
        }
        self.before = {
            oid: events if self._unseen else events[-1:]
            for oid, events in self.before.items()
            if oid in self._objects
        }
        self.leaves = {r: found for r, found in self.leaves.items() if r in self._objects}

    def _judged(self, event: DdlEvent, xid: int) -> Iterable[tuple[int, str | None]]:
        """Yield the captured tables that an event concerns, and why each is re-read, if it is."""
        if event.what in {"type", "composite type", "composite type column"}:
            yield from self._judged_type(event)
        elif event.what == "dropped table":
            for root in self._roots_of(event.oid):
                yield root, f"a partition was detached or dropped ({event.command})"
        elif event.root is not None:
            is_own = event.oid in self._tables
            if event.root in self._tables and event.what in {"rewrite", "truncate"}:
                yield event.root, reason_of(event)
            if is_own:  # from then on its changes belong to another table
                yield event.oid, f"it was attached to a partitioned table ({event.command})"
        elif event.oid in self._tables:
            reason = reason_of(event, self._known(event, xid))
            yield event.oid, reason or self._too_many(event)
        for leaf in event.leaves or ():
            if leaf in self._tables:
                yield leaf, f"it was attached to a partitioned table ({event.command})"

    def _judged_type(self, event: DdlEvent) -> Iterable[tuple[int, str | None]]:
        before, too_many = self.before.get(event.oid, ()), self._too_many(event)
        oid = -event.oid if event.what == "composite type column" else event.oid
        for table, (_, fingerprint) in self._tables.items():
            for part in fingerprint.types:
                if part.oid == oid:
                    known = [KnownObject(labels=dict(part.parts)), *before]
                    yield table, reason_of(event, known) or too_many

    def _known(self, event: DdlEvent, xid: int) -> Iterable[KnownObject]:
        name, fingerprint = self._tables[event.oid]
        leaves = frozenset(fingerprint.files) - {event.oid}
        gone: frozenset[int] = frozenset()
        if event.leaves is not None:
            is_later = self._seen is not None and _sees(self._seen, xid)
            gone = event.leaves - leaves if is_later else leaves - event.leaves
            gone |= self.leaves.get(event.oid, set()) - event.leaves
        yield KnownObject(name, {c.number: c.type_oid for c in fingerprint.columns}, gone=gone)
        yield from self.before.get(event.oid, ())

    def _too_many(self, event: DdlEvent) -> str | None:
        """Return why a table is re-read if it has too many events to compare; forget these then."""
        kept = self.before.get(event.oid, ())
        if sum(1 + len(k.types) + len(k.labels) for k in kept) <= self.most_kept:
            return None
        del self.before[event.oid]
        return f"too many commands at once ({event.command})"

    def _note(self, event: DdlEvent) -> None:
        """Record the state of captured tables and types, for comparison with the next event."""
        if not {event.oid, event.root} & self._objects and event.what != "dropped table":
            return
        if event.what == "table" and event.command.startswith("CREATE") and event.root is not None:
            self.leaves.setdefault(event.root, set()).add(event.oid)
        elif event.leaves is not None:
            self.leaves[event.oid] = set(event.leaves)
        elif event.what == "dropped table":
            for root in self._roots_of(event.oid):
                self.leaves.get(root, set()).discard(event.oid)
        if event.types is not None or event.labels is not None:
            known = KnownObject(event.table, event.types or {}, event.labels or {})
            kept = self.before.setdefault(event.oid, [])
            kept[:] = [k for k in kept if k != known] + [known]

    def _roots_of(self, leaf: int) -> set[int]:
        polled = {t for t, (_, s) in self._tables.items() if leaf in s.files and leaf != t}
        roots = {root for root, leaves in self.leaves.items() if leaf in leaves}
        return polled | (roots & self._tables.keys())

    def _is_void(self, table: int, lsn: Lsn, xid: int) -> bool:
        voided = self._voided.get(table)
        is_read = lsn < self._points.get(table, ZERO)
        return is_read or (voided is not None and _sees(voided, xid))


def _sees(seen: PgSnapshot, xid: int) -> bool:
    return bool(seen.sees(np.array([xid], np.int64)).all())
