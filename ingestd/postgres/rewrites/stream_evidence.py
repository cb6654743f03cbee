"""Evidence from the stream about table states that no catalog poll has seen.

Of one transaction, or of statements in quick succession, a poll sees only the end. A column that
was added, written and renamed in between left its values under a name that the catalog never had,
or that a different column has now. A partition that was created, filled and dropped left its rows.
The stream shows both: the columns in a RELATION message, which lists them by number, and the
partition in a RELATION message before its first change (`PgoutputDecoder`).

Evidence is only judged by a poll that sees the transaction it came with, because a transaction's
changes may be in the stream before a poll sees them. It is not judged if the rows of that
transaction are void: the table has been read since, or a poll that sees the transaction caused a
re-read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from sys import intern

import numpy as np

from ingestd.decode.pgoutput.relation import Relation
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.pg_snapshot import PgSnapshot, is_before
from ingestd.postgres.rewrites.catalog_evidence import reads_alike
from ingestd.postgres.rewrites.ddl_log import DdlLog
from ingestd.postgres.rewrites.fingerprint import TableFingerprint, digest
from ingestd.postgres.rewrites.streamed_texts import StreamedTexts


@dataclass(frozen=True, slots=True)
class _Columns:
    """What transactions with these ids reported of a table's columns; names as digests.

    `new`: names that no poll had seen. `void`: such names in rows that are void. `common`: names in
    all reports that had a new one. `types`: types that no poll had seen, by name. `lists`: all
    names in their order, if one was new or they differ from the last poll. `is_rekeyed`: their
    changes identify rows by a different replica identity than the last poll found.
    """

    new: frozenset[str] = frozenset()
    void: frozenset[str] = frozenset()
    common: frozenset[str] | None = None
    types: frozenset[tuple[str, int]] = frozenset()
    lists: tuple[tuple[str, ...], ...] = ()
    is_rekeyed: bool = False
    xids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PendingEvidence:
    """Evidence of transactions that a catalog poll sees, by the table's OID."""

    columns: Mapping[int, _Columns]
    partitions: Mapping[int, Collection[int]]
    emptied: frozenset[int] = frozenset()
    changed: Collection[tuple[int, int]] = ()
    labels: Mapping[int, frozenset[str]] = field(default_factory=dict)

    def difference(
        self, oid: int, now: TableFingerprint, then: TableFingerprint | None = None
    ) -> str | None:
        """Return why the rows of a table differ from those of the stream; None if they do not.

        `now`: the fingerprint of this poll; `then`: that of the last one.
        """
        evidence = self.columns.get(oid, _Columns())
        types = {c.name: c.type_oid for c in now.columns}
        found = {
            "a column was renamed": (
                (evidence.new - _ever(now)) and _present(now) - (evidence.common or frozenset())
            )
            or not all(_are_these(names, now) for names in evidence.lists),
            "a column's type changed": any(
                n in types and not reads_alike(before, types[n]) for n, before in evidence.types
            ),
            "a partition was detached or dropped": self._partitions_went(oid, now),
            "its replica identity was temporarily different": evidence.is_rekeyed,
            "a partition was truncated directly": oid in self.emptied,
            "labels or attributes of a type changed": _are_ambiguous(
                self.labels.get(oid, frozenset()), now, then
            ),
        }
        return next((reason for reason, applies in found.items() if applies), None)

    def has_news(self, oid: int, last: TableFingerprint) -> bool:
        """Return whether there is evidence that the last poll has not recorded."""
        then = self.without_changed(oid, self.with_streamed_names(oid, last))
        return then != last or oid in self.labels or self.difference(oid, last) is not None

    def with_streamed_names(self, oid: int, now: TableFingerprint) -> TableFingerprint:
        """Return a table's fingerprint, with names that came and went added to the former ones."""
        evidence = self.columns.get(oid, _Columns())
        return replace(now, former=now.former | ((evidence.new | evidence.void) - _ever(now)))

    def without_changed(self, oid: int, now: TableFingerprint) -> TableFingerprint:
        """Return a table's fingerprint; a partition with changes is removed from the empty ones."""
        return replace(now, empty=now.empty - {p for p, table in self.changed if table == oid})

    def _partitions_went(self, oid: int, now: TableFingerprint) -> bool:
        return not now.files.keys() >= set(self.partitions.get(oid, ()))


@dataclass(slots=True)
class StreamEvidence:
    """Evidence since the last catalog poll. Used on the event loop only.

    `_columns`: by the table's OID. `_partitions`: by a partition's OID and its table's, the last
    transaction that reported it. `_had`: the last poll that saw it in the table. `_voided`: the
    last poll of a table that caused a re-read. `_points`: the position of the lake's snapshot of
    it. `_changed`: partitions (with their tables) whose changes this process has received.
    `_empty`: those recorded as empty. `_quiet`: those that were empty at two polls although their
    file was replaced in between, with the second poll. `_emptied`: those of them that changed
    before it. `_labels`: by the table's OID, enum labels that no poll had seen, each with the last
    transaction that wrote it. `first`: by partition and table, the transaction with the first
    change of it. `makers`: the (sub)transactions that created partitions. `texts`: evidence from
    the texts of values that refer to objects. `ddl`: the events of event triggers.
    """

    ddl: DdlLog = field(default_factory=DdlLog)
    _columns: dict[int, _Columns] = field(default_factory=dict)
    _partitions: dict[tuple[int, int], int] = field(default_factory=dict)
    _had: dict[tuple[int, int], PgSnapshot] = field(default_factory=dict)
    _voided: dict[int, PgSnapshot] = field(default_factory=dict)
    _points: Mapping[int, Lsn] = field(default_factory=dict)
    _changed: set[tuple[int, int]] = field(default_factory=set)
    _empty: set[tuple[int, int]] = field(default_factory=set)
    _quiet: dict[tuple[int, int], PgSnapshot] = field(default_factory=dict)
    _emptied: set[tuple[int, int]] = field(default_factory=set)
    _labels: dict[int, dict[str, int]] = field(default_factory=dict)
    first: dict[tuple[int, int], int] = field(default_factory=dict)
    makers: dict[tuple[int, int], int] = field(default_factory=dict)
    texts: StreamedTexts = field(default_factory=StreamedTexts)

    def record_columns(self, relation: Relation, last: TableFingerprint | None) -> None:
        """Record a table's columns from a RELATION message. `last`: its last fingerprint."""
        if last is None:
            return
        sent = {intern(digest(c.name)): c.type_oid for c in relation.columns}
        types = {c.name: c.type_oid for c in last.columns}
        new = sent.keys() - _ever(last)
        others = {(n, t) for n, t in sent.items() if not reads_alike(t, types.get(n, t))}
        is_void = self._is_void(relation.oid, relation.lsn, relation.xid)
        is_other = bool(new) or not _are_these(sent, last)
        is_rekeyed = _is_rekeyed(relation, last) and not is_void
        if not (new or is_rekeyed or ((others or is_other) and not is_void)):
            return
        before = self._columns.get(relation.oid, _Columns())
        found = replace(
            before,
            xids=before.xids | {relation.xid},
            is_rekeyed=before.is_rekeyed or is_rekeyed,
        )
        if is_void:
            found = replace(found, void=before.void | new)
        else:
            others |= {(name, sent[name]) for name in new}
            found = replace(found, new=before.new | new, types=before.types | others)
            if is_other:
                found = replace(found, lists=_with(before.lists, tuple(sent)))
        if new and not is_void:
            common = sent.keys() if before.common is None else before.common & sent.keys()
            found = replace(found, common=frozenset(common))
        self._columns[relation.oid] = found

    def record_lake_names(self, oid: int, names: Iterable[str], last: TableFingerprint) -> None:
        """Record the evidence of earlier runs: the names of the lake's columns."""
        new = frozenset(map(digest, names)) - _ever(last)
        if new:
            self._columns[oid] = _Columns(new)

    def record_partition(
        self, relation: Relation, table: int, last: TableFingerprint | None
    ) -> bool:
        """Record that a transaction changed rows in a partition of a table.

        `last`: see `record_columns`. Return whether no poll has seen it there, or it identified
        rows by another replica identity.
        """
        pair, lsn, xid = (relation.oid, table), relation.lsn, relation.xid
        self._changed.add(pair)
        if self._is_void(table, lsn, xid):
            return pair in self._empty
        is_rekeyed = last is not None and _names_other_rows(relation, last)
        if is_rekeyed:
            before = self._columns.get(table, _Columns())
            xids = before.xids | {xid}
            self._columns[table] = replace(before, xids=xids, is_rekeyed=True)
        return self._is_new_partition(pair, xid) or is_rekeyed

    def _is_new_partition(self, pair: tuple[int, int], xid: int) -> bool:
        had, quiet = self._had.get(pair), self._quiet.get(pair)
        if quiet is not None and _sees(quiet, {xid}):
            self._emptied.add(pair)
            return True
        self.first.setdefault(pair, xid)
        if self._is_loaded_when_made(pair):
            return True
        is_filled = pair in self._empty
        if had is not None and _sees(had, {xid}):
            return is_filled
        self._partitions[pair] = xid
        return had is None or is_filled

    def expect_quiet(self, oid: int, table: int, seen: PgSnapshot) -> None:
        """Watch for changes of a partition that a poll found still empty, with a different file.

        A change that arrives, and that the poll sees, was undone by a TRUNCATE.
        """
        self._quiet.setdefault((oid, table), seen)
        if (oid, table) in self._changed:  # it arrived since that poll started
            self._emptied.add((oid, table))

    def expect_made(self, table: int, makers: Mapping[int, int]) -> None:
        """Watch for changes of new partitions by the transactions that created them."""
        self.makers |= {(oid, table): xid for oid, xid in makers.items()}

    def loaded_when_made(self, table: int) -> str | None:
        """Return why a table is re-read if one transaction created and filled a partition of it.

        A TRUNCATE by that transaction keeps the file and is not sent, so it leaves no trace.
        """
        loaded = any(self._is_loaded_when_made(pair) for pair in self.makers if pair[1] == table)
        return "a partition was created and filled by one transaction" if loaded else None

    def _is_loaded_when_made(self, pair: tuple[int, int]) -> bool:
        """Return whether the first change is by the transaction that created the partition.

        A subtransaction has a higher id than its parent transaction, so one with a higher id than
        the creator's is a different one. One whose id compares as older may be the same.
        """
        first, maker = self.first.get(pair), self.makers.get(pair)
        return first is not None and maker is not None and not is_before(maker, first)

    def record_labels(self, oid: int, labels: Mapping[str, int], position: Lsn) -> bool:
        """Record labels that no poll has seen, each with the last transaction that wrote it.

        `position`: how far the stream has come. Return whether the catalog must be read.
        """
        new = {k: xid for k, xid in labels.items() if not self._is_void(oid, position, xid)}
        if new:
            self._labels[oid] = self._labels.get(oid, {}) | new
        return bool(new)

    def set_read_positions(self, points: Mapping[int, Lsn]) -> None:
        """Set the positions at which the lake's rows were read. Earlier evidence is void."""
        self._points = points

    def visible_to(self, seen: PgSnapshot) -> PendingEvidence:
        """Return the evidence of transactions that a catalog poll sees."""
        partitions: dict[int, list[int]] = {}
        for (oid, table), xid in self._partitions.items():
            if _sees(seen, {xid}):
                partitions.setdefault(table, []).append(oid)
        columns = {
            oid: evidence for oid, evidence in self._columns.items() if _sees(seen, evidence.xids)
        }
        labels = {
            oid: frozenset(label for label, xid in evidence.items() if _sees(seen, {xid}))
            for oid, evidence in self._labels.items()
        }
        emptied = frozenset(table for _, table in self._emptied)
        labels = {oid: found for oid, found in labels.items() if found}
        return PendingEvidence(columns, partitions, emptied, frozenset(self._changed), labels)

    def unjudged(self) -> frozenset[int]:
        """Return the tables with evidence from the stream that must still be judged."""
        came = {table for leaf, table in self._partitions if (leaf, table) not in self._had}
        emptied = {table for _, table in self._emptied}
        loaded = {pair[1] for pair in self.makers if self._is_loaded_when_made(pair)}
        pending = {*self._columns, *came, *emptied, *loaded, *self._labels}
        return frozenset(pending | self.texts.unjudged() | self.ddl.unjudged())

    def clear(
        self,
        pending: PendingEvidence,
        seen: PgSnapshot,
        polled: Mapping[int, TableFingerprint],
        voided: Iterable[int],
    ) -> None:
        """Drop evidence that a poll of these tables has judged; some of them are re-read."""
        for oid, evidence in pending.columns.items():
            if self._columns.get(oid) is evidence:  # nothing was reported since
                del self._columns[oid]
        for oid, labels in pending.labels.items():
            left = {k: xid for k, xid in self._labels.get(oid, {}).items() if k not in labels}
            self._labels = {**self._labels, oid: left} if left else _without(self._labels, oid)
        done = {pair for pair in self._emptied if pair[1] in pending.emptied}
        self._emptied -= done
        self._quiet = {p: s for p, s in self._quiet.items() if p not in done}
        self._empty = {(leaf, oid) for oid, now in polled.items() for leaf in now.empty}
        self._had = {(p, oid): seen for oid, now in polled.items() for p in now.files}
        voided = frozenset(voided)
        self._voided |= dict.fromkeys(voided, seen)
        # Proven or void: nothing more is expected. What arrived since this poll is for the next
        # one.
        self.makers = {
            p: xid
            for p, xid in self.makers.items()
            if p in self._had
            and p[1] not in voided
            and (p not in self.first or self._is_loaded_when_made(p))
        }
        self.first = {
            p: xid
            for p, xid in self.first.items()
            if p in self.makers or (p not in self._had and p[1] in polled and p[1] not in voided)
        }
        judged = {(oid, table) for table, oids in pending.partitions.items() for oid in oids}
        self._partitions = {
            p: xid
            for p, xid in self._partitions.items()
            if p not in judged or not _sees(seen, {xid})
        }

    def _is_void(self, oid: int, lsn: Lsn, xid: int) -> bool:
        """Return whether a transaction's changes to a table are void, or must be."""
        voided = self._voided.get(oid)
        is_read = lsn < self._points.get(oid, ZERO)
        return is_read or (voided is not None and _sees(voided, {xid}))


def _are_these(names: Iterable[str], now: TableFingerprint) -> bool:
    """Return whether columns listed by number can have had these names at the poll `now`.

    A new column never gets a lower number than an existing one.
    """
    numbers = {c.name: c.number for c in now.columns if c.number not in now.unlisted}
    listed = [numbers[n] for n in names if n in numbers]
    return listed == sorted(numbers.values())[: len(listed)]


def _is_rekeyed(relation: Relation, last: TableFingerprint) -> bool:
    """Return whether its changes identify rows differently than the last fingerprint's identity."""
    if last.key is None:
        return False
    if relation.replica_identity != last.key.replica_identity:
        return True
    names = {c.number: c.name for c in last.columns}
    expected = {names.get(n) for n in last.key.identity}
    found = {digest(c.name) for c in relation.columns if c.identity}
    return last.key.replica_identity in {"d", "i"} and found != expected


def _names_other_rows(partition: Relation, last: TableFingerprint) -> bool:
    """Return whether old rows of a partition lack a column that identifies the table's rows.

    `ingestd.postgres.catalog.replica_identity` checks the current replica identity of each
    partition the same way.
    """
    if last.key is None or partition.replica_identity == "f":
        return False
    numbers = last.key.key if last.key.replica_identity == "f" else last.key.identity
    names = {c.number: c.name for c in last.columns}
    sent = {digest(c.name) for c in partition.columns if c.identity}
    return bool(sent) and (not numbers or not sent.issuperset(names.get(n) for n in numbers))


def _are_ambiguous(
    labels: frozenset[str], now: TableFingerprint, then: TableFingerprint | None
) -> bool:
    """Return whether labels that the stream contained may have a different name now.

    A label that no type has was renamed. One that a type has may have been another label's name, if
    more than one label of the type is new.
    """
    if not labels:
        return False
    if not labels <= {label for t in now.types for label in t.labels}:
        return True
    before = {t.oid: t for t in then.types} if then is not None else {}
    new = [t.labels_since(before[t.oid]) for t in now.types if t.oid in before]
    return any(len(found) > 1 and found & labels for found in new)


def _without(labels: dict[int, dict[str, int]], oid: int) -> dict[int, dict[str, int]]:
    return {table: found for table, found in labels.items() if table != oid}


def _with(lists: tuple[tuple[str, ...], ...], new: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the lists with another one added; a list that is a prefix of another is redundant."""
    if any(known[: len(new)] == new for known in lists):
        return lists
    return (*(known for known in lists if new[: len(known)] != known), new)


def _present(fingerprint: TableFingerprint) -> frozenset[str]:
    return frozenset(c.name for c in fingerprint.columns)


def _ever(fingerprint: TableFingerprint) -> frozenset[str]:
    return fingerprint.former | _present(fingerprint)


def _sees(seen: PgSnapshot, xids: Collection[int]) -> bool:
    return bool(seen.sees(np.fromiter(xids, np.int64)).all())
