"""Partitions that the catalog can't judge alone: the stream must pass the poll that found them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.postgres.rewrites.fingerprint import TableFingerprint
from ingestd.postgres.rewrites.stream_evidence import StreamEvidence


@dataclass(frozen=True, slots=True)
class _Awaited:
    """Partitions to be judged only once the stream has passed `lsn`.

    `files`: the files that they had before those were replaced. `ended`: its value when they were
    found to be empty (`TableFingerprint`). `new`: the partitions that were added.
    """

    lsn: Lsn
    files: Mapping[int, int]
    ended: int
    new: frozenset[int] = frozenset()


class AwaitedPartitions:
    """The tables with such partitions, by OID. `evidence`: collects what the stream reports."""

    def __init__(self, evidence: StreamEvidence) -> None:
        self._evidence = evidence
        self._awaited: dict[int, _Awaited] = {}
        self._reached = ZERO

    def reach(self, position: Lsn) -> None:
        """Record that the stream has delivered all below this position."""
        self._reached = max(self._reached, position)

    @property
    def are_due(self) -> bool:
        """Return whether a poll could judge some of them now."""
        return any(awaited.lsn <= self._reached for awaited in self._awaited.values())

    def keep_only(self, tables: Collection[int]) -> None:
        """Forget the partitions of all other tables."""
        self._awaited = {oid: a for oid, a in self._awaited.items() if oid in tables}

    def expect(
        self,
        oid: int,
        then: TableFingerprint | None,
        now: TableFingerprint,
        makers: Mapping[int, int],
        *,
        lsn: Lsn,
        pg_snapshot: PgSnapshot,
    ) -> dict[int, int]:
        """Return the files of partitions that stayed empty but have another file.

        VACUUM FULL leaves that, and so does a TRUNCATE of rows inserted since. The stream shows
        which, as it sends those rows. Until it has reached the point at which the catalog was
        read (`lsn`), `_tables` keeps the old file, and no file of a new partition. `makers`: the
        transactions that created new partitions.
        """
        self._evidence.expect_made(oid, makers)
        both = then.empty & now.empty if then is not None else frozenset()
        quiet = {
            leaf: now.files[leaf]
            for leaf in both
            if then is not None and then.files.get(leaf) != now.files[leaf]
        }
        for leaf in quiet:
            self._evidence.expect_quiet(leaf, oid, pg_snapshot)
        awaited = self._awaited.get(oid)
        if (quiet or makers) and then is not None:
            files = {leaf: then.files[leaf] for leaf in quiet if leaf in then.files}
            ended, new = now.ended, frozenset(makers)
            if awaited is not None:
                files, ended = {**files, **awaited.files}, awaited.ended
                new |= awaited.new
            self._awaited[oid] = _Awaited(lsn, files, ended, new)
        elif awaited is not None and awaited.lsn <= self._reached:
            del self._awaited[oid]
        return quiet

    def settled(self, oid: int, now: TableFingerprint) -> TableFingerprint:
        """Return the fingerprint for `_tables`: with the former files of awaited partitions."""
        awaited = self._awaited.get(oid)
        if awaited is None:
            return now
        files = {
            leaf: awaited.files.get(leaf, file)
            for leaf, file in now.files.items()
            if leaf not in awaited.new
        }
        return replace(now, files=files, ended=awaited.ended)
