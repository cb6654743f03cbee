"""What the stream told of tables that no look at the catalog has seen.

Of one transaction, or of statements without a pause, a look sees only the end. A column that was
added, written and renamed in between has left its values under a name that the catalog never had; a
partition that was made, filled and dropped, its rows. The stream tells of both: of the columns by a
RELATION message, of the partition by another before the first change (`StreamDecoder`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ingestd.capture.storage import Storage, digest
from ingestd.visibility import Visibility


@dataclass(frozen=True, slots=True)
class _Names:
    """Digests of names of a table's columns, as transactions with these ids told of them.

    `new`: no look had seen them. `common`: all that told of one told of these as well.
    """

    new: frozenset[str]
    common: frozenset[str]
    xids: frozenset[int]


@dataclass(slots=True)
class Told:
    """What was told since tables were looked at, by their OID. Used on the event loop only.

    `_partitions`: the table that a partition belonged to, and the transaction that told of it.
    `_known`: partitions that a look has seen, or that have been judged.
    """

    _names: dict[int, _Names] = field(default_factory=dict)
    _partitions: dict[int, tuple[int, int]] = field(default_factory=dict)
    _known: set[int] = field(default_factory=set)

    def columns(self, oid: int, names: Iterable[str], xid: int, last: Storage | None) -> None:
        """Take which columns a transaction told a table to have. `last`: the last look at it."""
        if last is None:
            return
        told = frozenset(map(digest, names))
        new = told - _ever(last)
        if new:
            before = self._names.get(oid, _Names(new, told, frozenset()))
            self._names[oid] = _Names(before.new | new, before.common & told, before.xids | {xid})

    def recorded(self, oid: int, names: Iterable[str], last: Storage) -> None:
        """Take what an earlier run looked at, and was told after its last look at the table."""
        self._known |= last.places.keys()
        new = frozenset(map(digest, names)) - _ever(last)
        if new:
            self._names[oid] = _Names(new, _present(last), frozenset())

    def partition(self, oid: int, table: int, xid: int) -> None:
        """Take that a transaction changed rows in a partition of a table."""
        if oid not in self._known:
            self._partitions[oid] = table, xid

    def difference(self, oid: int, now: Storage, seen: Visibility) -> str | None:
        """Say why the rows of a table are not what the stream told, None if nothing speaks for it.

        `now`: how a look found it, of what `seen` sees.
        """
        if self._unseen(oid, now, seen) and _present(now) - self._names[oid].common:
            return "a column was renamed"
        if self._went(oid, now, seen):
            return "a partition was detached or dropped"
        return None

    def has_news(self, oid: int, now: Storage, seen: Visibility) -> bool:
        """Whether there is something that a look has to take."""
        return bool(self._unseen(oid, now, seen) or self._went(oid, now, seen))

    def seen(self, oid: int, now: Storage, seen: Visibility) -> Storage:
        """Give how a table was found, with the names that were told meanwhile among the former."""
        return replace(now, former=now.former | self._unseen(oid, now, seen))

    def forget(self, looked_at: Mapping[int, Storage], seen: Visibility) -> None:
        """Take that this was looked at, and that what differed is told of."""
        self._names = {
            oid: names for oid, names in self._names.items() if not _all_seen(names.xids, seen)
        }
        for now in looked_at.values():
            self._known |= now.places.keys()
        judged = [p for p, (_, xid) in self._partitions.items() if _all_seen({xid}, seen)]
        self._known.update(judged)
        self._partitions = {p: t for p, t in self._partitions.items() if p not in self._known}

    def _unseen(self, oid: int, now: Storage, seen: Visibility) -> frozenset[str]:
        """Give the names of columns that came and went, or got another name, between two looks."""
        names = self._names.get(oid)
        if names is None or not _all_seen(names.xids, seen):
            return frozenset()
        return names.new - _ever(now)

    def _went(self, oid: int, now: Storage, seen: Visibility) -> list[int]:
        """Give the partitions that came and went between two looks."""
        return [
            partition
            for partition, (table, xid) in self._partitions.items()
            if table == oid and partition not in now.files and _all_seen({xid}, seen)
        ]


def _present(storage: Storage) -> frozenset[str]:
    return frozenset(c.name for c in storage.columns)


def _ever(storage: Storage) -> frozenset[str]:
    return storage.former | _present(storage)


def _all_seen(xids: Iterable[int], seen: Visibility) -> bool:
    """Whether all that these transactions did is there to be seen.

    What they wrote may be in the stream before.
    """
    found = np.fromiter(xids, np.int64)
    return bool(seen.sees(found).all())
