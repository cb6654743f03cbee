"""Changes of the lake's tables since the last catalog poll."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import replace

from ingestd.model.lake_state import RegisteredTable
from ingestd.model.schema import Table
from ingestd.postgres.catalog.tables import ColumnRow
from ingestd.postgres.connection.liveness import LivenessCheckedConnection
from ingestd.postgres.connection.session import connect
from ingestd.postgres.rewrites.dependent_text_queries import holds
from ingestd.postgres.rewrites.dependent_texts import doubts, reason_of
from ingestd.postgres.rewrites.fingerprint import TableFingerprint
from ingestd.postgres.rewrites.fingerprint_queries import difference, read_empty

LOCK_TIMEOUT_S = 2.0
"""How long a query on a table waits for a session that holds a lock on it."""


class FingerprintTracker:
    """The tables' fingerprints at the last poll, by OID. Used on the event loop only."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._fingerprints: dict[int, TableFingerprint] = {}

    def last(self, oid: int, known: RegisteredTable | None) -> TableFingerprint | None:
        """Return the last fingerprint of this run, or the one in `_tables`."""
        then = self._fingerprints.get(oid)
        if then is None and known is not None and known.oid == oid:
            then = TableFingerprint.parse(known.fingerprint)
        return then

    def has_seen(self, oid: int) -> bool:
        """Return whether a table was polled in this run."""
        return oid in self._fingerprints

    def record(self, fingerprints: Mapping[int, TableFingerprint]) -> None:
        """Record these fingerprints; their differences have been reported."""
        self._fingerprints |= fingerprints

    @contextlib.asynccontextmanager
    async def comparing(self) -> AsyncIterator[FingerprintComparison]:
        """Yield a comparison, which opens a connection if it needs one."""
        async with contextlib.AsyncExitStack() as stack:
            yield FingerprintComparison(self._dsn, stack)


class FingerprintComparison:
    """Compares two readings of tables. It may scan them, on a connection used for nothing else."""

    def __init__(self, dsn: str, stack: contextlib.AsyncExitStack) -> None:
        self._dsn = dsn
        self._stack = stack
        self._own: LivenessCheckedConnection | None = None

    async def difference(
        self, oid: int, then: TableFingerprint | None, now: TableFingerprint
    ) -> str | None:
        """Return why a table's rows differ from the streamed changes; None if they do not.

        Raises psycopg.Error.
        """
        if then is None:
            return None
        in_doubt = doubts(then.texts, now.texts)
        if then == now and not in_doubt:
            return None
        connection = await self._connection()
        reason = await difference(connection, oid, then, now)
        if reason is None and in_doubt and await holds(connection, oid, now.texts.uses, in_doubt):
            return reason_of(in_doubt)
        return reason

    async def with_empty(
        self, now: TableFingerprint, then: TableFingerprint | None
    ) -> TableFingerprint:
        """Return it with the partitions that have no blocks. Raises psycopg.Error."""
        if not now.attach_xids:
            return now
        empty = () if then is None else then.empty
        same = {p for p in empty if then is not None and then.files.get(p) == now.files.get(p)}
        return replace(now, empty=await read_empty(await self._connection(), now.files, same))

    async def _connection(self) -> LivenessCheckedConnection:
        if self._own is None:
            limit = LOCK_TIMEOUT_S
            connection = await connect(self._dsn, lock_timeout_s=limit, reads_names=True)
            self._own = await self._stack.enter_async_context(connection)
        return self._own


def to_record(
    now: TableFingerprint, oid: int, known: RegisteredTable | None, *, files: bool = False
) -> str:
    """Return the text for `_tables`: the recorded one, if nothing but the files has changed.

    With `files`, changed files count as well.
    """
    if known is not None and known.oid == oid:
        then = TableFingerprint.parse(known.fingerprint)
        if then is not None and not (then != now if files else now.differs_durably(then)):
            return known.fingerprint
    return str(now)


def is_wider(table: Table, columns: Sequence[ColumnRow], known: RegisteredTable | None) -> bool:
    """Return whether a column that existed before is newly captured, by config or column list.

    A renamed column does not count: its xmin in pg_attribute shows it. A generated column counts
    always, because it is never without values.
    """
    then = None
    if known is not None and known.oid == table.oid:
        then = TableFingerprint.parse(known.fingerprint)
    if known is None or then is None:
        return False
    present = {(c.number, c.xmin) for c in then.columns}
    captured: Collection[str] = {c.name for c in table.columns} - {
        c.source_name for c in known.columns
    }
    return any(
        c.name in captured and (c.generated or (c.number, c.xmin) in present) for c in columns
    )
