"""The tables that a polled source captures, and what changed in those that the lake knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from psycopg import AsyncConnection

from ingestd.model.errors import TableError
from ingestd.model.lake_state import RegisteredTable, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table, TableId
from ingestd.ports import Discovery, Refused
from ingestd.postgres.captured.catalog import Catalog, read_catalog
from ingestd.postgres.captured.definition import TableDefinitions
from ingestd.postgres.captured.selection import is_left_out, missing_tables, unmatched_notices
from ingestd.postgres.catalog.table_faults import own_lock
from ingestd.postgres.catalog.tables import TableRow, refusal
from ingestd.postgres.catalog.user_types import FIRST_USER_OID
from ingestd.postgres.connection.errors import identifier
from ingestd.postgres.connection.wal_position import flush_position
from ingestd.postgres.polling.cursors import at, cursor_of, named
from ingestd.postgres.polling.keys.unique_keys import key_of
from ingestd.postgres.polling.polled_table import PolledTable
from ingestd.postgres.polling.progress import PollProgress
from ingestd.postgres.polling.server import inspect_polled_server
from ingestd.postgres.rewrites.fingerprint import TableFingerprint
from ingestd.postgres.rewrites.streamed_texts import StreamedTexts, read_at
from ingestd.postgres.rewrites.tracker import FingerprintTracker, is_wider, to_record
from ingestd.postgres.settings import PollingSettings


class PolledTables:
    """The tables that the config asks for, as of the last discovery.

    Used on the event loop only. Needs no privileges except CONNECT and SELECT on the tables; works
    on a standby. Raises psycopg.Error. `ahead`: the tables of which the lake records more than the
    server shows; what it records of them is void.
    """

    def __init__(self, settings: PollingSettings) -> None:
        self._settings = settings
        self._definitions = TableDefinitions(settings)
        self._catalog = Catalog()
        self._tracker = FingerprintTracker(settings.dsn.get_secret_value())
        self._polled: dict[TableId, PolledTable] = {}
        self.ahead: dict[TableId, PollProgress] = {}
        self.texts = StreamedTexts()

    async def discover(
        self, connection: AsyncConnection[Any], known: Mapping[TableId, RegisteredTable]
    ) -> Discovery:
        """See `ingestd.ports.ChangeCapture.discover`.

        Interrupted are tables that are live in the lake without a record of where polling stood,
        and tables with another key, or with columns that were not captured before. A TRUNCATE,
        which no poll detects, counts as a rewrite. A table of which the lake records more than the
        server shows is interrupted, or refused while a standby may still replay that.
        """
        known = dict(known)
        server = await inspect_polled_server(connection)
        catalog = await read_catalog(self._settings)
        # A standby has received more than it shows.
        shown = await flush_position(connection) if server.in_recovery else catalog.lsn
        listed = {row.id for row in catalog.rows} if server.in_recovery else set()
        self.ahead = {name: p for name, p in self.ahead.items() if name in listed}
        await self._definitions.use_catalog(connection, catalog, known)
        polled: dict[TableId, PolledTable] = {}
        refused = missing_tables(self._settings, catalog.present, catalog.not_tables)
        interrupted, rewritten, fingerprints = {}, {}, {}
        async with self._tracker.comparing() as comparison:
            for row in catalog.rows:
                if is_left_out(self._settings, row.id, catalog.columns.get(row.oid, ())):
                    continue
                try:
                    with own_lock(row.id):
                        found = describe(
                            row, catalog, self._definitions, self._settings, server.role
                        )
                        if isinstance(found, Refused):
                            refused.append(found)
                            continue
                        was = known.get(row.id)
                        recorded = self._recorded(row, was)
                        if self._is_ahead(row.id, recorded, catalog, shown) and server.in_recovery:
                            refused.append(Refused(found.table, _not_replayed(row.id)))
                            continue
                        then, now = self._tracker.last(row.oid, was), catalog.fingerprint(row)
                        now = fingerprints[row.oid] = now if then is None else now.after(then)
                        reason = await comparison.difference(row.oid, then, now)
                        reason = reason or self.texts.difference(
                            row.oid, now.texts, catalog.pg_snapshot
                        )
                        if reason is not None:
                            rewritten[row.id] = reason
                        gap = self._gap(found, catalog, was, recorded)
                        if gap is not None:
                            interrupted[row.id] = gap
                        fingerprint = to_record(now, row.oid, was, files=True)
                        polled[row.id] = replace(
                            found, table=replace(found.table, fingerprint=fingerprint)
                        )
                except TableError as error:
                    refused.append(Refused(Table(row.id, row.oid, ()), error))
                    for found_of in (interrupted, rewritten, polled):
                        found_of.pop(row.id, None)
                    fingerprints.pop(row.oid, None)
        # Not earlier: a failed comparison would otherwise lose the difference.
        self._tracker.record(fingerprints)
        voided = [polled[name].table.oid for name in {*rewritten, *interrupted} & polled.keys()]
        texts = {oid: now.texts for oid, now in fingerprints.items()}
        self.texts.record_poll(texts, catalog.pg_snapshot, voided, read_at(known.values()))
        self._catalog, self._polled = catalog, polled
        return Discovery(
            tuple(p.table for p in polled.values()),
            tuple(refused),
            server.server_id,
            interrupted,
            rewritten,
            catalog.lsn,
            notices=unmatched_notices(self._settings, catalog.present, catalog.not_tables),
        )

    async def have_changed(self) -> bool:
        """Return whether the catalog differs from the last discovery, or a standby may by now."""
        if any(name not in self._polled for name in self.ahead):
            return True
        return await read_catalog(self._settings) != self._catalog

    def polled(self, table: TableId) -> PolledTable:
        """Return a table of the last discovery. Raises KeyError if it was not accepted."""
        return self._polled[table]

    def _recorded(self, row: TableRow, known: RegisteredTable | None) -> PollProgress | None:
        """Return how far an earlier run polled a table that is live, as the lake records it."""
        is_earlier = known is not None and self._is_of_earlier_run(row.oid, known)
        return PollProgress.parse(known.resume) if known is not None and is_earlier else None

    def _is_ahead(
        self, name: TableId, recorded: PollProgress | None, catalog: Catalog, shown: Lsn
    ) -> bool:
        """Return whether the lake records more of a table than the server shows.

        Where the record is not that of this server, it says nothing about other tables.
        """
        awaited = self.ahead.pop(name, None)
        progress = recorded or awaited
        if progress is None or (progress.lsn <= shown and progress.end <= catalog.pg_snapshot.xmax):
            return False
        self.ahead[name] = progress
        return True

    def _is_of_earlier_run(self, oid: int, known: RegisteredTable) -> bool:
        """Return whether the lake's record of a live table is from before this run.

        Once in a run: what this run records has not been read from the lake.
        """
        is_live = known.state is TableState.LIVE and known.oid == oid
        return is_live and not self._tracker.has_seen(oid)

    def _gap(
        self,
        polled: PolledTable,
        catalog: Catalog,
        known: RegisteredTable | None,
        progress: PollProgress | None,
    ) -> str | None:
        """Return why polling would miss something that the lake lacks; None if it would not."""
        table = polled.table
        if known is None or known.oid != table.oid:
            return None
        if self._is_of_earlier_run(table.oid, known):
            gap = self._gap_before(polled, known, progress)
            if gap is not None:
                return gap
        key = {c.source_name for c in known.columns if c.identity}
        if known.columns and key != set(table.identity):
            return "its key has changed"
        if is_wider(table, catalog.columns.get(table.oid, ()), known):
            return "columns were not captured before"
        return None

    def _gap_before(
        self, polled: PolledTable, known: RegisteredTable, progress: PollProgress | None
    ) -> str | None:
        """Return why the progress of an earlier run can't be used; None if it can."""
        if polled.table.id in self.ahead:
            return "more of it was polled than the server has, or its record is another server's"
        if progress is not None and progress.deleted != polled.deleted:
            return "`deleted` names another column than before"
        stored = TableFingerprint.parse(known.fingerprint)
        if stored is not None and stored.is_streamed:
            return "another kind of source captured it since"
        # If nothing is ever snapshotted, polling begins with the first run that finds something.
        if progress is None and (known.resume or self._settings.snapshot != "never"):
            return "how far it was polled is not known"
        return None


def describe(
    row: TableRow,
    catalog: Catalog,
    definitions: TableDefinitions,
    settings: PollingSettings,
    role: str,
) -> PolledTable | Refused:
    """Return how a table is polled, or why it can't be. Its key is its identity."""
    columns = catalog.columns.get(row.oid, ())
    controls = settings.controls(row.id)
    try:
        # First without a key: any other fault matters more.
        plain = replace(row, replica_identity="n", primary_key=None, identity_key=None)
        no = refusal(row, definitions.table(plain, columns), role, also_read=["xmin"])
        if no is not None:
            raise no.error
        if row.oid in catalog.with_hidden_rows:
            raise _hidden(row.id, role)
        indexes = catalog.indexes.get(row.oid, ())
        is_partitioned = row.oid not in catalog.files.get(row.oid, {})
        key = key_of(row, controls, columns, indexes, is_partitioned=is_partitioned)
        keyed = replace(row, replica_identity="d", primary_key=key, identity_key=key)
        table = definitions.table(keyed, columns)
        cursor = None
        if controls.cursor is not None:
            cursor = cursor_of(row.id, controls.cursor, columns, definitions.base_type)
        if controls.deleted is not None:
            marked = named(row.id, "deleted", controls.deleted, columns)
            if marked.type_oid >= FIRST_USER_OID:
                raise _of_users_type(row.id, controls.deleted)
    except TableError as error:
        return Refused(Table(row.id, row.oid, ()), error)
    by = None if cursor is None else cursor.columns[0]
    return PolledTable(
        table,
        cursor,
        controls.deleted,
        settings.interval if controls.interval is None else controls.interval,
        controls.detect_deletes,
        {c.name: c.type_oid for c in columns if c.name in {by, controls.deleted}},
    )


def _of_users_type(table: TableId, name: str) -> TableError:
    """Return the error for a type whose owner may have defined the cast to text."""
    return TableError(
        table,
        f"column {name!r} has a user-defined type: its values can't be compared with false",
        remedy=f"name a column of a built-in type, such as boolean or timestamptz, in "
        f"{at(table, 'deleted')}",
    )


def _not_replayed(table: TableId) -> TableError:
    return TableError(
        table,
        "the standby has not replayed all that the lake has of it",
        remedy="wait, or find out what delays its replay: it is then re-read. If other tables are "
        "polled, its record in the lake may be another server's: restart ingestd to re-read it now",
    )


def _hidden(table: TableId, role: str) -> TableError:
    return TableError(
        table,
        f"row-level security hides rows from role {role!r}: they would count as deleted",
        remedy=f"ALTER ROLE {identifier(role)} BYPASSRLS;  (as a superuser)",
    )
