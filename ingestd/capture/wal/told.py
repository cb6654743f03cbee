"""What the stream told of tables that no look at the catalog has seen.

Of one transaction, or of statements without a pause, a look sees only the end. A column that was
added, written and renamed in between has left its values under a name that the catalog never had; a
partition that was made, filled and dropped, its rows. The stream tells of both: of the columns by a
RELATION message, of the partition by another before the first change (`StreamDecoder`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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


@dataclass(frozen=True, slots=True)
class Unseen:
    """What was told until a look, by transactions that it sees. By OID, of tables."""

    names: Mapping[int, _Names]
    partitions: Mapping[int, int]

    def difference(self, oid: int, now: Storage) -> str | None:
        """Say why the rows of a table are not what the stream told, None if nothing speaks for it.

        `now`: how the look found it.
        """
        if self._went(oid, now) and _present(now) - self.names[oid].common:
            return "a column was renamed"
        if self._partitions_went(oid, now):
            return "a partition was detached or dropped"
        return None

    def has_news(self, oid: int, now: Storage) -> bool:
        """Whether there is something that a look has to take."""
        return bool(self._went(oid, now) or self._partitions_went(oid, now))

    def taken(self, oid: int, now: Storage) -> Storage:
        """Give how a table was found, with names that came and went among the former ones."""
        return replace(now, former=now.former | self._went(oid, now))

    def _went(self, oid: int, now: Storage) -> frozenset[str]:
        """Give the names of columns that came and went, or got another name, between two looks."""
        names = self.names.get(oid)
        return frozenset() if names is None else names.new - _ever(now)

    def _partitions_went(self, oid: int, now: Storage) -> bool:
        """Whether partitions came and went between two looks."""
        return any(t == oid and p not in now.files for p, t in self.partitions.items())


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

    def by(self, seen: Visibility) -> Unseen:
        """Give what transactions told that a look sees: what they did may be told before."""
        return Unseen(
            {oid: names for oid, names in self._names.items() if _sees(seen, names.xids)},
            {p: table for p, (table, xid) in self._partitions.items() if _sees(seen, {xid})},
        )

    def forget(self, taken: Unseen, looked_at: Iterable[Storage]) -> None:
        """Take that this is told of, and that these tables were looked at."""
        for oid, names in taken.names.items():
            if self._names.get(oid) is names:  # nothing was told since
                del self._names[oid]
        self._known.update(taken.partitions, *(storage.places for storage in looked_at))
        self._partitions = {p: t for p, t in self._partitions.items() if p not in self._known}


def _present(storage: Storage) -> frozenset[str]:
    return frozenset(c.name for c in storage.columns)


def _ever(storage: Storage) -> frozenset[str]:
    return storage.former | _present(storage)


def _sees(seen: Visibility, xids: Collection[int]) -> bool:
    return bool(seen.sees(np.fromiter(xids, np.int64)).all())
