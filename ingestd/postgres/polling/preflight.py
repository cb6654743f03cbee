"""`ingestd check` for kind `polling`: finds all that would fail or be expensive, beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql

from ingestd.decode.type_mapping import BUILT_IN
from ingestd.model.check import CheckLine
from ingestd.model.errors import IngestdError, OperatorError, TableError
from ingestd.model.schema import TableId
from ingestd.ports import Refused, TableInfo
from ingestd.postgres.captured.catalog import read_catalog
from ingestd.postgres.captured.definition import TableDefinitions
from ingestd.postgres.captured.selection import is_left_out, missing_tables, unmatched_notices
from ingestd.postgres.catalog.indexes import IndexRow
from ingestd.postgres.catalog.metadata import PostgresMetadata
from ingestd.postgres.catalog.relation_lock import lock_table, whole
from ingestd.postgres.catalog.tables import NO_COLUMNS, ColumnRow, TableRow, qualified, table_of
from ingestd.postgres.check import CheckFindings, column_notes, lasting, sized
from ingestd.postgres.connection.authentication import check_lines
from ingestd.postgres.connection.dsn import read_dsn
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.quoting import printed
from ingestd.postgres.connection.session import connect
from ingestd.postgres.connection.tls import check_line
from ingestd.postgres.polling.cursors import at, is_indexed, likely_cursors
from ingestd.postgres.polling.discovery import describe
from ingestd.postgres.polling.polled_table import PolledTable
from ingestd.postgres.polling.server import (
    PolledServer,
    claim_of_polling,
    detect_transaction_pooler,
    inspect_polled_server,
)
from ingestd.postgres.server_capacity import demand_of, room_lines
from ingestd.postgres.settings import PollingSettings
from ingestd.postgres.snapshot.errors import read_error
from ingestd.process.clock import utc_now

CLOCK_S = 60.0
"""The difference of clocks above which to warn."""
SCAN_BYTES_PER_S = 200_000_000
"""About what a table scan reads in a second, for an estimate."""
SHOWN_UUIDS = 100
"""How many values of a uuid cursor are checked."""
TIMEOUT_S = 30.0

_UUIDS = """
SELECT bool_and(substr(v::text, 15, 1) = '7')
  FROM (SELECT {column} AS v FROM {table} WHERE {column} IS NOT NULL LIMIT {limit}) AS sample
"""


async def preflight(
    source: str, settings: PollingSettings, *, now: Callable[[], datetime] = utc_now
) -> list[CheckLine]:
    """Check the server, the role, poolers and the tables. Changes nothing."""
    found = CheckFindings(source)
    dsn = settings.dsn.get_secret_value()
    try:
        found.add_line(check_line(source, read_dsn(dsn)))
        found.lines += check_lines(source, read_dsn(dsn))
        await detect_transaction_pooler(dsn)
        async with await connect(
            dsn, statement_timeout_s=TIMEOUT_S, reads_names=True
        ) as connection:
            await _check_server(connection, source, settings, found, now)
    except IngestdError as error:
        found.fault("connection", error)
    except psycopg.Error as error:
        found.fault("connection", classify(error, f"source {source}, check", dsn))
    return found.lines


async def _check_server(
    connection: AsyncConnection[Any],
    source: str,
    settings: PollingSettings,
    findings: CheckFindings,
    clock: Callable[[], datetime],
) -> None:
    server = await inspect_polled_server(connection)
    now = clock()
    info = connection.info
    findings.note("connection", "ok", f"{server.role}@{info.host}:{info.port}/{server.database}")
    _server(server, settings, now, findings)
    catalog = await read_catalog(settings)
    for missing in missing_tables(settings, catalog.present, catalog.not_tables):
        error = missing.error
        findings.note(f"table {missing.table.id}", "fail", error.reason, error.remedy)
    definitions = TableDefinitions(settings)
    await definitions.use_catalog(connection, catalog, {})
    sizes = await _sizes(settings)
    for row in catalog.rows:
        if is_left_out(settings, row.id, catalog.columns.get(row.oid, ())):
            findings.note(f"table {row.id}", "ok", f"{NO_COLUMNS}: left out")
            continue
        polled = describe(row, catalog, definitions, settings, server.role)
        if isinstance(polled, Refused):
            findings.note(f"table {row.id}", "fail", polled.error.reason, polled.error.remedy)
            continue
        reading = _PolledReading(
            row,
            {c.name: c for c in catalog.columns.get(row.oid, ())},
            catalog.indexes.get(row.oid, ()),
            row.oid not in catalog.files.get(row.oid, {}),
            polled,
            sizes.get(row.id),
        )
        _captured(reading, findings)
        await _cursor(connection, settings.dsn.get_secret_value(), reading, findings)
        _deletes(polled, findings)
    for notice in unmatched_notices(settings, catalog.present, catalog.not_tables):
        findings.notice(notice)
    findings.lines += room_lines(
        {source: await demand_of(connection, claim_of_polling(source), {})}
    )


def _server(
    server: PolledServer, settings: PollingSettings, now: datetime, findings: CheckFindings
) -> None:
    faults = server.faults()
    for fault in faults:
        findings.fault("server", fault)
    if not faults:
        what = ", a standby" if server.in_recovery else ""
        findings.note("server", "ok", f"PostgreSQL {server.version_text}{what}")
    if server.in_recovery and server.streaming_delay != "-1":
        _standby(server, findings)
    if server.in_recovery and settings.listen is not None:
        findings.fault(
            "listen",
            OperatorError("a standby does not support LISTEN", remedy="remove `listen`"),
        )
    apart_s = abs((server.clock - now).total_seconds())
    if apart_s > CLOCK_S:
        findings.note(
            "clock",
            "warn",
            f"the server's clock and this machine's differ by {lasting(apart_s)}: reported "
            "lag and freshness are wrong by that much",
            "synchronize both with NTP",
        )


def _standby(server: PolledServer, findings: CheckFindings) -> None:
    if server.feedback:
        findings.note(
            "standby",
            "ok",
            "hot_standby_feedback is on; a query may still be cancelled for a lock that the "
            "primary took, and is then retried",
        )
        return
    findings.note(
        "standby",
        "warn",
        f"a query that is older than max_standby_streaming_delay ({server.streaming_delay}) is "
        "cancelled when replay removes rows that it may need: long queries may never complete",
        "ALTER SYSTEM SET hot_standby_feedback = on; SELECT pg_catalog.pg_reload_conf();  "
        "-- here, or raise "
        "max_standby_streaming_delay",
    )


async def _sizes(settings: PollingSettings) -> dict[TableId, TableInfo]:
    metadata = PostgresMetadata(settings.dsn.get_secret_value(), timeout_s=TIMEOUT_S)
    return {info.id: info for info in await metadata.tables()}


@dataclass(frozen=True, slots=True)
class _PolledReading:
    """A table that can be polled; `size`: the server's estimates, None if it was dropped since."""

    row: TableRow
    columns: Mapping[str, ColumnRow]
    indexes: Sequence[IndexRow]
    is_partitioned: bool
    polled: PolledTable
    size: TableInfo | None

    @property
    def cost(self) -> str:
        """The cost of a full scan of the table; empty if not known."""
        if self.size is None:
            return ""
        rows = "" if self.size.rows is None else f"{self.size.rows:,} rows, "
        seconds = lasting((self.size.bytes or 0) / SCAN_BYTES_PER_S)
        return f": {rows}{sized(self.size.bytes or 0)}, about {seconds} of the server"

    @property
    def is_small(self) -> bool:
        """True if a full scan takes about a second at most."""
        return self.size is not None and (self.size.bytes or 0) < SCAN_BYTES_PER_S


def _captured(reading: _PolledReading, findings: CheckFindings) -> None:
    """Report what is captured of a table, by which columns and how often."""
    polled = reading.polled
    plain = table_of(reading.row, tuple(reading.columns.values()), BUILT_IN)
    cursor = "none" if polled.cursor is None else ", ".join(polled.cursor.columns)
    parts = [
        f"{len(polled.table.columns)} columns, key: {', '.join(polled.table.key)}",
        f"cursor: {cursor}",
        f"polled every {lasting(polled.interval_s)}",
        *column_notes(plain, polled.table),
    ]
    if polled.deleted is not None:
        parts.append(f"deleted where {polled.deleted} is set")
    if polled.sweep_s is not None:
        parts.append(f"deletes detected every {lasting(polled.sweep_s)}")
    findings.note(f"table {reading.row.id}", "ok", "; ".join(parts))


async def _cursor(
    connection: AsyncConnection[Any], dsn: str, reading: _PolledReading, findings: CheckFindings
) -> None:
    """Report what a table's cursor, or the lack of one, costs or misses."""
    table, cursor = reading.row.id, reading.polled.cursor
    subject = f"table {table}, cursor"
    if cursor is None:
        likely = likely_cursors(reading.columns.values())
        hint = f", such as {likely[0].name!r}" if likely else ""
        findings.note(
            subject,
            "ok" if reading.is_small else "warn",
            f"none: every poll scans the entire table{reading.cost}",
            f"set {at(table, 'cursor')} to an indexed column that increases with every write{hint}",
        )
        return
    column = reading.columns[cursor.columns[0]]
    quoted = printed(sql.Identifier(column.name))
    if not is_indexed(reading.indexes, column.number):
        how = "CREATE INDEX" if reading.is_partitioned else "CREATE INDEX CONCURRENTLY"
        findings.note(
            subject,
            "warn",
            f"no index begins with {column.name!r}: every poll scans the entire table"
            f"{reading.cost}",
            f"{how} ON {qualified(table)} ({quoted});",
        )
    if column.nullable:
        findings.note(
            subject,
            "warn",
            f"{column.name!r} may be null: rows without a value are found only by scanning "
            f"the entire table{reading.cost}",
            f"ALTER TABLE {qualified(table)} ALTER COLUMN {quoted} SET NOT NULL;",
        )
    if cursor.kind != "uuid":
        return
    try:
        is_growing = await _is_growing_uuid(connection, reading.polled, column.name)
    except TableError as error:
        findings.fault(subject, error)
        return
    except psycopg.Error as error:
        if connection.closed:
            raise
        findings.fault(subject, read_error(error, table, dsn))
        return
    if not is_growing:
        findings.note(
            subject,
            "warn",
            f"values of {column.name!r} are not of version 7: they do not increase, and changes "
            "are found late or at the cost of a full scan",
            "name a column that increases with every write, or write uuids of version 7",
        )


async def _is_growing_uuid(
    connection: AsyncConnection[Any], polled: PolledTable, name: str
) -> bool:
    blocks = whole(polled.table, is_partitioned=True)
    query = sql.SQL(_UUIDS).format(
        column=sql.Identifier(name),
        table=blocks.relation,
        limit=SHOWN_UUIDS,
    )
    async with connection.transaction():
        await lock_table(connection, polled.table, blocks, polled.others)
        row = await (await connection.execute(query)).fetchone()
    return row is None or row[0] is not False


def _deletes(polled: PolledTable, findings: CheckFindings) -> None:
    table = polled.table.id
    if polled.sweep_s is None and polled.deleted is None:
        findings.note(
            f"table {table}, deletes",
            "warn",
            "are not detected: rows that are deleted stay in the lake",
            f'set {at(table, "detect_deletes")} = "1h" or so, or {at(table, "deleted")} to the '
            "column that marks deleted rows",
        )
