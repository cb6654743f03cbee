"""A table's current rows, read completely by COPY (ports.ReferenceTableSource).

The table is locked (ACCESS SHARE) and then read at one exported snapshot. Lock and snapshot are
both held until all rows are read. Commands that would empty or rewrite the table (TRUNCATE, ALTER
TABLE) wait; writers do not. Ordinary privileges are enough, and a hot standby can be read.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import AsyncConnection, sql

from ingestd.config import SourceSettings
from ingestd.decode.lake_columns import allocate
from ingestd.decode.type_mapping import BUILT_IN
from ingestd.model.check import CheckLine
from ingestd.model.errors import TableError, TransientError
from ingestd.model.lsn import ZERO
from ingestd.model.schema import Table, TableId
from ingestd.postgres.captured.columns import controlled
from ingestd.postgres.captured.selection import missing_table
from ingestd.postgres.catalog.relation_kinds import find_not_tables
from ingestd.postgres.catalog.relation_lock import lock_name
from ingestd.postgres.catalog.tables import (
    list_columns,
    list_generated,
    list_tables,
    list_types,
    refusal,
    table_of,
    their_names,
)
from ingestd.postgres.catalog.user_types import find_large, too_large
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.session import connect
from ingestd.postgres.snapshot.ctid_splits import split_table
from ingestd.postgres.snapshot.errors import read_error
from ingestd.postgres.snapshot.read_probe import LOCK_TIMEOUT_S as PROBE_TIMEOUT_S
from ingestd.postgres.snapshot.read_probe import read_fault
from ingestd.postgres.snapshot.read_view import ExportedView, ReadPoint
from ingestd.postgres.snapshot.table_pages import TablePages
from ingestd.process.clock import utc_now

LOCK_TIMEOUT_S = 10.0
"""How long to wait for a table that is being altered. Other sessions queue behind the wait."""
SPLIT_BYTES = 64_000_000
_REACHABLE = """
SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p')
   AND pg_catalog.has_schema_privilege(n.oid, 'USAGE')
"""


class CopiedReferenceSource:
    """See the module. Changes are not captured: read it again to see them.

    Raises TransientError, OperatorError; TableError for a table that is missing, can't be read, or
    has a value that its column can't hold. `progress`: fraction of the table returned, 0 to 1.
    """

    def __init__(
        self,
        source: str,
        settings: SourceSettings,
        table: TableId,
        *,
        row_limit_bytes: int,
        split_bytes: int = SPLIT_BYTES,
    ) -> None:
        self._where = f"source {source}, table {table}"
        self._settings = settings
        self._dsn = settings.dsn.get_secret_value()
        self._id = table
        self._row_limit_bytes = row_limit_bytes
        self._split_bytes = split_bytes
        self._keeper: AsyncConnection[Any] | None = None
        self._batches: AsyncGenerator[pa.RecordBatch, None] | None = None
        self._schema: pa.Schema | None = None
        self._has_begun = False
        self._is_complete = False
        self.progress = 0.0
        self.nbytes = 0

    @property
    def key(self) -> Sequence[str]:
        """Empty: no changes are returned."""
        return ()

    @property
    def position(self) -> int:
        """0: no changes are returned."""
        return 0

    async def poll_snapshot(self) -> pa.RecordBatch | None:
        """Return some rows; the first batch is empty. After an error it can't continue."""
        if self._is_complete:
            return None
        if self._batches is None:
            if self._has_begun:
                ended = f"{self._where}: its snapshot ended before all of it was read"
                raise TransientError(ended, reason="snapshot_gone")
            self._has_begun, self._batches = True, self._read_batches()
        batch = None
        try:
            batch = await anext(self._batches, None)
            self._is_complete = batch is None
        except psycopg.Error as error:
            raise classify(error, self._where, self._dsn) from error
        finally:
            if batch is None:
                await self.close()
        return batch

    def is_snapshot_complete(self) -> bool:
        """Return whether all rows have been returned."""
        return self._is_complete

    async def poll_changes(self) -> pa.RecordBatch | None:
        """Return an empty batch once the snapshot is complete."""
        if not self._is_complete or self._schema is None:
            return None
        schema = self._schema.append(pa.field("_cdc_op", pa.string()))
        return pa.RecordBatch.from_pylist([], schema)

    def checkpoint(self) -> bytes:
        """Return whether the snapshot is complete, as bytes."""
        return b"complete" if self._is_complete else b"begun" if self._has_begun else b""

    def restore(self, checkpoint: bytes) -> bool:
        """Restart unless all rows were returned: the session that held the snapshot has ended."""
        self._is_complete = checkpoint == b"complete"
        return checkpoint != b"begun"

    async def close(self) -> None:
        """Release the snapshot and the lock."""
        batches, self._batches = self._batches, None
        keeper, self._keeper = self._keeper, None
        try:
            if batches is not None:
                await batches.aclose()
        finally:
            if keeper is not None:
                await keeper.close()

    async def _read_batches(self) -> AsyncGenerator[pa.RecordBatch, None]:
        keeper = await connect(
            self._dsn, autocommit=False, lock_timeout_s=LOCK_TIMEOUT_S, reads_names=True
        )
        self._keeper = keeper
        # So that the snapshot is taken when it is exported, after the lock.
        await keeper.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED READ ONLY")
        await self._lock(keeper)
        table = await describe(keeper, self._settings, self._id)
        columns = [c.lake_name for c in table.columns]
        self._schema = pa.schema([pa.field(c.lake_name, c.type) for c in table.columns])
        yield pa.RecordBatch.from_pylist([], self._schema)
        cursor = await keeper.execute("SELECT pg_catalog.pg_export_snapshot()")
        row = await cursor.fetchone()
        assert row is not None
        snapshot = row[0]
        splits = await split_table(keeper, table, snapshot, self._split_bytes)
        view = ExportedView(self._dsn, snapshot, ReadPoint(ZERO, utc_now()))
        total = sum(s.estimated_bytes for s in splits)
        done = 0
        for split in splits:
            rows = TablePages(self._dsn, split, view, row_limit_bytes=self._row_limit_bytes)
            async with contextlib.aclosing(rows.pages()) as pages:
                async for page in pages:
                    self.nbytes += page.batch.nbytes
                    _refuse_unheld(table, page.batch.rows)
                    yield page.batch.rows.select(columns)
            done += split.estimated_bytes
            self.progress = done / total if total else 1.0

    async def _lock(self, connection: AsyncConnection[Any]) -> None:
        """Lock the table if it exists. Checked first, because the server logs each error."""
        found = await connection.execute(_REACHABLE, (self._id.schema, self._id.name))
        if await found.fetchone() is None:
            return
        try:
            await lock_name(connection, sql.Identifier(self._id.schema, self._id.name))
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
            await connection.rollback()  # `describe` reports it more precisely
        except psycopg.errors.InsufficientPrivilege as error:
            raise read_error(error, self._id, self._dsn) from error


async def describe(
    connection: AsyncConnection[Any], settings: SourceSettings, name: TableId
) -> Table:
    """Describe a table, as configured, with all columns that can be read.

    On a connection inside a transaction. Raises TableError, psycopg.Error.
    """
    rows = {row.id: row for row in await list_tables(connection)}
    row = rows.get(name)
    if row is None:
        raise missing_table(settings, name, rows, await find_not_tables(connection, [name]))
    generated = their_names(await list_generated(connection, [row.oid]))
    columns = (await list_columns(connection, [row.oid], generated)).get(row.oid, ())
    controls, key = settings.controls(name), settings.mask_key_bytes
    oids = {c.type_oid for c in columns if c.name not in controls.exclude_columns}
    for why in (await find_large(connection, {row.oid: oids})).values():
        raise too_large(name, why)
    types = {**BUILT_IN, **await list_types(connection, oids)}
    table = _without_identity(table_of(row, columns, types))
    table = controlled(table, controls, key, types, strict=True)
    readable = replace(row, persistence="p")  # unlogged tables can be read
    refused = refusal(readable, table, await _role(connection))
    if refused is not None:
        raise refused.error
    return replace(table, columns=allocate(table.columns, {}))


async def check_references(source: str, settings: SourceSettings) -> list[CheckLine]:
    """Check the source's reference tables for problems. Changes nothing."""
    names = {t: s.reference for t, s in settings.references().items()}
    if not names:
        return []
    dsn = settings.dsn.get_secret_value()
    try:
        async with await connect(
            dsn, autocommit=False, lock_timeout_s=PROBE_TIMEOUT_S, reads_names=True
        ) as connection:
            return [await _check(connection, source, settings, t, names[t]) for t in names]
    except psycopg.Error as error:
        fault = classify(error, f"source {source}, reference tables", dsn)
        return [CheckLine(source, "reference tables", "fail", fault.what, fault.remedy)]


async def _check(
    connection: AsyncConnection[Any],
    source: str,
    settings: SourceSettings,
    name: TableId,
    kind: str,
) -> CheckLine:
    subject = f"reference table {name}"
    try:
        table = await describe(connection, settings, name)
    except TableError as error:
        return CheckLine(source, subject, "fail", error.reason, error.remedy)
    fault = await read_fault(connection, table, settings.dsn.get_secret_value())
    await connection.rollback()  # an error has aborted the transaction
    if fault is not None:
        what = fault.reason if isinstance(fault, TableError) else fault.what
        return CheckLine(source, subject, "fail", what, fault.remedy)
    if kind == "snapshot_only":
        every_s = settings.controls(name).refresh_s
        return CheckLine(source, subject, "ok", f"read every {every_s:g} s")
    if kind == "manual":
        return CheckLine(source, subject, "ok", "read when asked for")
    return CheckLine(source, subject, "ok", "kept by its changes")


def _without_identity(table: Table) -> Table:
    """Return the table without an identity. Any column may then be masked or excluded."""
    columns = tuple(replace(c, identity=False) for c in table.columns)
    return replace(table, columns=columns, replica_identity="n", key=())


async def _role(connection: AsyncConnection[Any]) -> str:
    row = await (await connection.execute("SELECT current_user::text")).fetchone()
    assert row is not None
    return str(row[0])


def _refuse_unheld(table: Table, rows: pa.RecordBatch) -> None:
    raw = rows.column("_cdc_raw")
    if raw.null_count == len(raw):
        return
    names = pc.unique(raw.drop_null().keys)
    stored = names[0].as_py()
    column = next((c.name for c in table.columns if c.lake_name == stored), stored)
    raise TableError(
        table.id,
        f"column {column!r} has a value that its type in the lake can't hold",
        remedy=f'set types = {{ {column} = "string" }} in the table\'s section: its text is kept',
    )
