"""The tables that a source captures, and what has changed in those that the lake knows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from psycopg import AsyncConnection

from ingestd.decode.pgoutput.relation import Relation
from ingestd.decode.type_mapping import BUILT_IN, Types
from ingestd.model.changes import ChangeSet
from ingestd.model.errors import TableError
from ingestd.model.lake_state import Notice, RegisteredTable
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table, TableId
from ingestd.ports import Discovery, Refused
from ingestd.postgres.captured.catalog import Catalog, read_catalog
from ingestd.postgres.captured.definition import TableDefinitions
from ingestd.postgres.captured.dropped_tables import DroppedTables, find_dropped
from ingestd.postgres.captured.selection import is_left_out, missing_tables, unmatched_notices
from ingestd.postgres.catalog.publication import Published
from ingestd.postgres.catalog.replica_identity import incomplete
from ingestd.postgres.catalog.table_faults import own_lock
from ingestd.postgres.catalog.tables import TableRow, refusal, table_of
from ingestd.postgres.rewrites.awaited_partitions import AwaitedPartitions
from ingestd.postgres.rewrites.ddl_log import DdlEvent
from ingestd.postgres.rewrites.ddl_script import DdlLogFault, ddl_log_fault
from ingestd.postgres.rewrites.fingerprint import TableFingerprint, digest
from ingestd.postgres.rewrites.fingerprint_queries import read_makers
from ingestd.postgres.rewrites.stream_evidence import PendingEvidence, StreamEvidence
from ingestd.postgres.rewrites.streamed_texts import read_at
from ingestd.postgres.rewrites.tracker import (
    FingerprintComparison,
    FingerprintTracker,
    is_wider,
    to_record,
)
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.enum_labels import EnumColumns, enum_columns, unknown_labels
from ingestd.postgres.wal.publication.preparation import PublicationRefusals, unpublishable
from ingestd.postgres.wal.server import WalServer
from ingestd.postgres.wal.slots.decode_gap import SlotDecodeGap

Known = Mapping[TableId, RegisteredTable]
ReadCatalog = Callable[[WalSettings, Mapping[TableId, Published]], Awaitable[Catalog]]
"""Reads the catalog, given what was published at the last reading."""


@dataclass(frozen=True, slots=True)
class _Readings:
    """What a discovery compares: the catalog, the lake's entries, fingerprints, the stream.

    `role`: the one that reads the tables.
    """

    catalog: Catalog
    role: str
    known: Known
    last: Mapping[int, TableFingerprint | None]
    pending: PendingEvidence
    by_ddl: Mapping[int, str]
    comparison: FingerprintComparison


@dataclass(frozen=True, slots=True)
class _Found:
    """What a discovery has found so far: see `Discovery`. `fingerprints`: by OID."""

    refused: list[Refused]
    accepted: list[Table] = field(default_factory=list)
    interrupted: dict[TableId, str] = field(default_factory=dict)
    rewritten: dict[TableId, str] = field(default_factory=dict)
    fingerprints: dict[int, TableFingerprint] = field(default_factory=dict)

    def refuse(self, row: TableRow, error: TableError) -> None:
        """Refuse a table while it is compared."""
        self.refused.append(Refused(Table(row.id, row.oid, ()), error))
        self.interrupted.pop(row.id, None)
        self.rewritten.pop(row.id, None)
        self.fingerprints.pop(row.oid, None)


class SourceTables:
    """The tables that the config asks for, as of the last discovery.

    Used on the event loop only. Raises psycopg.Error. `evidence`: what the stream has reported,
    also to earlier captures, which may have ended before a discovery. `decode_gap`: knows which
    tables are kept out, because the server can't output a row.
    """

    def __init__(
        self,
        settings: WalSettings,
        evidence: StreamEvidence | None = None,
        *,
        decode_gap: SlotDecodeGap | None = None,
        read: ReadCatalog = read_catalog,
    ) -> None:
        self._settings = settings
        self._decode_gap = decode_gap or SlotDecodeGap()
        self._read_catalog = read
        self._definitions = TableDefinitions(settings)
        self._catalog = Catalog()
        self._tracker = FingerprintTracker(settings.dsn.get_secret_value())
        self.evidence = evidence or StreamEvidence()
        self.texts = self.evidence.texts
        self.dropped: DroppedTables = {}
        self._accepted: frozenset[TableId] = frozenset()
        self._replaced: set[int] = set()
        self._rewritten: set[int] = set()
        self._publication_as_altered = ""
        self._ddl_fault: DdlLogFault | None = None
        self._is_reported = True
        self._enums: dict[int, EnumColumns] = {}
        self._awaited = AwaitedPartitions(self.evidence)
        self.refusals = PublicationRefusals(settings)

    async def discover(
        self, connection: AsyncConnection[Any], server: WalServer, known: Known
    ) -> Discovery:
        """See `ingestd.ports.ChangeCapture.discover`."""
        # Copied before the catalog is read: the stream continues, and what it reports meanwhile
        # would look as if the catalog had restored what it lacks.
        known = dict(known)
        catalog = await self._read_catalog(self._settings, self._catalog.published)
        self._decode_gap.note_owners(catalog.rows)
        types = await self._definitions.use_catalog(connection, catalog, known)
        dropped = await find_dropped(connection, known.values(), self._settings.streams)
        self._definitions.use_dropped(dropped)
        last = {row.oid: self._last(row, known.get(row.id)) for row in catalog.rows}
        self.evidence.set_read_positions(read_at(known.values()))
        self.evidence.ddl.set_read_positions(read_at(known.values()))
        # Copied now: what arrives while tables are compared is for the next discovery.
        pending = self.evidence.visible_to(catalog.pg_snapshot)
        by_ddl = self.evidence.ddl.visible_to(catalog.pg_snapshot)
        await self.refusals.try_again(catalog.rows, partial(self._of_catalog, catalog))
        refused = missing_tables(self._settings, catalog.present, catalog.not_tables)
        found = _Found(refused)
        async with self._tracker.comparing() as comparison:
            read = _Readings(catalog, server.role, known, last, pending, by_ddl, comparison)
            for row in self._rows_to_describe(catalog):
                try:
                    with own_lock(row.id):
                        await self._judge(connection, row, read, found)
                except TableError as error:
                    found.refuse(row, error)
        accepted, interrupted, rewritten = found.accepted, found.interrupted, found.rewritten
        fingerprints = found.fingerprints
        # Not earlier: a failed comparison would otherwise lose the difference.
        self._tracker.record(fingerprints)
        self._awaited.keep_only(fingerprints.keys())
        voided = [t.oid for t in accepted if t.id in rewritten or t.id in interrupted]
        self.evidence.clear(pending, catalog.pg_snapshot, fingerprints, voided)
        self._enums = _enums_of(catalog, fingerprints, types)
        polled = {t.oid: (t.id, fingerprints[t.oid]) for t in accepted}
        self.evidence.ddl.record_poll(polled, catalog.pg_snapshot, voided)
        self._ddl_fault = await self._find_ddl_fault(catalog, connection)
        self.texts.record_poll(
            {oid: now.texts for oid, now in fingerprints.items()},
            catalog.pg_snapshot,
            voided,
            read_at(known.values()),
        )
        self._catalog, self.dropped = catalog, dropped
        self._accepted = frozenset(t.id for t in accepted)
        self._is_reported = True
        return Discovery(
            tuple(accepted),
            tuple(found.refused),
            server.server_id,
            interrupted,
            rewritten,
            catalog.lsn,
            catalog.pg_snapshot,
            self._doubts(),
            frozenset(dropped),
            (
                *unmatched_notices(self._settings, catalog.present, catalog.not_tables),
                *self._notices(),
            ),
        )

    async def have_changed(self) -> bool:
        """Return whether the catalog differs from the last discovery, or we have altered it.

        Also true if it lacks something that the stream reported.
        """
        if not self._is_reported or self._awaited.are_due:
            return True
        if self.refusals.are_due:
            return True
        catalog = await self._read_catalog(self._settings, self._catalog.published)
        pending = self.evidence.visible_to(catalog.pg_snapshot)
        by_ddl = self.evidence.ddl.visible_to(catalog.pg_snapshot)
        if by_ddl.keys() & {row.oid for row in catalog.rows}:
            return True
        return (
            catalog != self._catalog
            or self.texts.has_news(catalog.pg_snapshot)
            or any(
                pending.has_news(row.oid, last)
                or self.evidence.loaded_when_made(row.oid) is not None
                for row in catalog.rows
                if (last := self._tracker.last(row.oid, None)) is not None
            )
        )

    def take_partition(self, partition: Relation, table: int) -> bool:
        """Record that a partition of a table has changes; see `StreamEvidence.record_partition`."""
        return self.evidence.record_partition(partition, table, self._tracker.last(table, None))

    def take_ddl(self, event: DdlEvent, lsn: Lsn, xid: int) -> bool:
        """Record what an event trigger wrote; see `DdlLog.record`."""
        return self.evidence.ddl.record(event, lsn, xid, self._settings.streams)

    async def ddl_log_changed(self, connection: AsyncConnection[Any]) -> bool:
        """Return whether the event triggers are not as they were at the last discovery."""
        return await self._find_ddl_fault(self._catalog, connection) != self._ddl_fault

    async def _find_ddl_fault(
        self, catalog: Catalog, connection: AsyncConnection[Any]
    ) -> DdlLogFault | None:
        if not self._settings.logs_ddl:
            return None
        # A table that is not published needs no trigger for TRUNCATE: once published, it is read.
        published = [row.oid for row in catalog.rows if row.id in catalog.published]
        return await ddl_log_fault(connection, published)

    def _notices(self) -> tuple[Notice, ...]:
        fault = self._ddl_fault
        if fault is None:
            return ()
        what = f'ddl_log = "event_trigger": {fault.what}; only the catalog checks apply'
        return (Notice("ddl_log.incomplete", what, fault.remedy),)

    async def take_publication(
        self, *, is_replaced: bool = False
    ) -> tuple[bool, dict[TableId, str]]:
        """Record our own changes to the publication; those of others are found as differences.

        An entry replaced for another column list is no gap; an entry with the same list belongs to
        a table that someone had removed. A publication that we had to alter, or to replace, is no
        gap either.
        Return whether `_tables` needs new entries, by another discovery; and its entries for the
        tables that were not published before, from their first row in it on: the next start must
        know by which entry they were published.
        """
        catalog = await self._read_catalog(self._settings, self._catalog.published)
        ours = dict(self._catalog.published)
        fingerprints: dict[TableId, str] = {}
        rows = {row.id: row for row in catalog.rows}
        for table in self._accepted & catalog.published.keys():
            then, now = ours.get(table), catalog.published[table]
            if then is None:
                ours[table] = now
                self._is_reported = False
                fingerprints |= self._published(rows.get(table), catalog)
            elif then.membership and now.membership not in {None, then.membership}:
                ours[table] = now
                self._is_reported = False
                if is_replaced or now.columns != then.columns:
                    self._replaced.add(now.membership)
        before, publication = self._catalog.publication, catalog.publication
        is_ours = is_replaced or (before is not None and not before.is_complete)
        if before is not None and publication is not None and is_ours:
            self._is_reported &= publication == before
            self._publication_as_altered = publication.altered
        self._catalog = replace(self._catalog, published=ours)
        self._definitions.take_publication(catalog)
        return not self._is_reported, fingerprints

    def _published(self, row: TableRow | None, catalog: Catalog) -> dict[TableId, str]:
        """Return the fingerprint of a table that is now published; nothing if it was replaced."""
        last = None if row is None else self._tracker.last(row.oid, None)
        if row is None or last is None:
            return {}
        read = catalog.fingerprint(row)
        now = replace(last, membership=read.membership, publication=read.publication)
        self._tracker.record({row.oid: now})
        return {row.id: str(self._awaited.settled(row.oid, now))}

    async def of_relation(
        self, connection: AsyncConnection[Any], relation: Relation, name: TableId
    ) -> Table:
        """Describe the table `name` with the columns of a RELATION message. Raises TableError."""
        if not self._catalog.rows:  # another capture discovered them
            await self._definitions.use_catalog(
                connection, await self._read_catalog(self._settings, self._catalog.published), {}
            )
        self.evidence.record_columns(relation, self._tracker.last(relation.oid, None))
        return await self._definitions.of_relation(connection, relation, name)

    def note_delivered(self, change_set: ChangeSet) -> tuple[ChangeSet, bool]:
        """Record what the stream delivered.

        Return it with the doubts about its tables, and whether the catalog must be read again.
        """
        self._awaited.reach(change_set.position)
        found = unknown_labels(change_set, self._enums)
        has_news = [
            self.evidence.record_labels(oid, new, change_set.position) for oid, new in found.items()
        ]
        doubts = self._doubts()
        return replace(change_set, doubts=doubts) if doubts else change_set, any(has_news)

    def _doubts(self) -> dict[TableId, str]:
        """Return the `_tables` entries of tables that the stream makes doubtful."""
        doubted = self.evidence.unjudged()
        return {
            row.id: str(replace(last, is_doubted=True))
            for row in (self._catalog.rows if doubted else ())
            if row.oid in doubted and (last := self._tracker.last(row.oid, None)) is not None
        }

    # --- one table ---------------------------------------------------------------------------

    async def _judge(
        self, connection: AsyncConnection[Any], row: TableRow, read: _Readings, result: _Found
    ) -> None:
        """Add to the result whether and how a table is captured. Raises TableError."""
        catalog = read.catalog
        described = self._described(row, catalog, read.role)
        if isinstance(described, Refused):
            result.refused.append(described)
            return
        known, pending, comparison = read.known.get(row.id), read.pending, read.comparison
        then, now = read.last[row.oid], catalog.fingerprint(row)
        if gap := self._gap(described, catalog, then, now, known):
            result.interrupted[row.id] = gap
        now = _first(now, known) if then is None else now.after(then)
        now = pending.without_changed(row.oid, await comparison.with_empty(now, then))
        makers = await read_makers(connection, now.partitions_since(then, row.oid))
        lsn, pg_snapshot = catalog.lsn, catalog.pg_snapshot
        quiet = self._awaited.expect(row.oid, then, now, makers, lsn=lsn, pg_snapshot=pg_snapshot)
        reason = read.by_ddl.get(row.oid) if row.id in read.known else None
        reason = reason or _rekeyed(described, then, known)
        then = then and replace(then, files={**then.files, **quiet})
        reason = reason or await comparison.difference(row.oid, then, now)
        reason = reason or pending.difference(row.oid, now, then)
        reason = reason or self.evidence.loaded_when_made(row.oid)
        reason = reason or self.texts.difference(row.oid, now.texts, catalog.pg_snapshot)
        if reason is not None:
            result.rewritten[row.id] = reason
            self._rewritten.add(row.oid)
        now = result.fingerprints[row.oid] = pending.with_streamed_names(row.oid, now)
        fingerprint = self._fingerprint_to_record(row, now, known)
        result.accepted.append(replace(described, fingerprint=fingerprint))

    def _last(self, row: TableRow, known: RegisteredTable | None) -> TableFingerprint | None:
        """Return its fingerprint at the last discovery, of this run or of an earlier one."""
        last = self._tracker.last(row.oid, known)
        if last is not None and known is not None and not self._tracker.has_seen(row.oid):
            names = [c.source_name for c in known.lake_columns.values()]
            self.evidence.record_lake_names(row.oid, names, last)
        return last

    def _fingerprint_to_record(
        self, row: TableRow, now: TableFingerprint, known: RegisteredTable | None
    ) -> str:
        # Otherwise the next run would again find files that differ from the recorded ones.
        with_files = row.oid in self._rewritten
        return to_record(self._awaited.settled(row.oid, now), row.oid, known, files=with_files)

    def _rows_to_describe(self, catalog: Catalog) -> Iterator[TableRow]:
        """Yield the tables, except those without columns that only a pattern matches."""
        for row in catalog.rows:
            if not is_left_out(self._settings, row.id, catalog.columns.get(row.oid, ())):
                yield row

    def _of_catalog(self, catalog: Catalog, row: TableRow) -> Table:
        return self._definitions.table(row, catalog.columns.get(row.oid, ()))

    def _described(self, row: TableRow, catalog: Catalog, role: str) -> Table | Refused:
        """Return the table, or the reason why it can't be captured."""
        settings = self._settings
        published = catalog.published.get(row.id)
        try:
            # From this catalog: a RELATION message may have been described by a later one.
            table = self._of_catalog(catalog, row)
        except TableError as error:
            return Refused(Table(row.id, row.oid, ()), error)
        no = refusal(row, table, role)
        if no is not None:
            return no
        is_ours = settings.manage and (catalog.publication is None or catalog.publication.owned)
        sending = catalog.sending(row)
        plain = table_of(row, catalog.columns.get(row.oid, ()), BUILT_IN)
        fault = incomplete(plain, published, manage=is_ours, sending=sending)
        if fault is not None:
            return Refused(table, fault)
        if published is None:
            fault = unpublishable(settings, row, catalog.publication)
            if fault is not None:
                return Refused(table, fault)
        kept_out = self._decode_gap.table_error(row) or self.refusals.reasons.get(row.id)
        return table if kept_out is None else Refused(table, kept_out)

    def _gap(
        self,
        table: Table,
        catalog: Catalog,
        then: TableFingerprint | None,
        now: TableFingerprint,
        known: RegisteredTable | None,
    ) -> str | None:
        """Return why some changes are not sent, or were not for a time; None if there is no gap."""
        sent, was_sent = catalog.published.get(table.id), self._catalog.published.get(table.id)
        if sent is None:
            return "the publication lacked it"
        # 0: not published at that reading. Older lakes have 0 where that was not known.
        unknown = {now.membership} if then is None or then.key is not None else {0, now.membership}
        is_another = then is not None and then.membership not in unknown
        is_another &= now.membership not in self._replaced
        if is_another or (was_sent is not None and was_sent.entry != sent.entry):
            return "the publication lacked it for a time"
        is_altered = then is not None and _was_altered(then.publication, now.publication)
        if is_altered and now.publication != self._publication_as_altered:
            return "the publication or its owner was changed"
        if sent.columns is not None and not sent.columns.issuperset(c.name for c in table.columns):
            return "the publication lacked columns of it"
        if is_wider(table, catalog.columns.get(table.oid, ()), known):
            return "columns were not captured before"
        return None


def _was_altered(then: str, now: str) -> bool:
    """Return whether a publication was altered between two marks: it may have sent less.

    Each mark is its `altered`, which earlier releases recorded with the owner, or "" if unknown. A
    new owner counts, too: it may not be the only change between two catalog polls.
    """
    return bool(then and now) and then.partition(":")[0] != now


def _enums_of(
    catalog: Catalog, fingerprints: Mapping[int, TableFingerprint], types: Types
) -> dict[int, EnumColumns]:
    return {
        oid: enum_columns(now, [c.type_oid for c in catalog.columns[oid]], types)
        for oid, now in fingerprints.items()
        if now.types
    }


def _rekeyed(
    table: Table, then: TableFingerprint | None, known: RegisteredTable | None
) -> str | None:
    """Return why to re-read a table whose key an older lake recorded by its columns only."""
    if then is None or then.key is not None or known is None or known.oid != table.oid:
        return None
    key = {c.source_name for c in known.columns if c.key}
    return None if key == set(table.captured_key) else "its key or replica identity changed"


def _first(now: TableFingerprint, known: RegisteredTable | None) -> TableFingerprint:
    """Return the fingerprint of a table found for the first time; `known`: its predecessor by name.

    The predecessor's columns are in the lake, and no discovery of this table has seen them.
    """
    names = () if known is None else known.lake_columns.values()
    return now.after(replace(now, former=frozenset(digest(c.source_name) for c in names)))
