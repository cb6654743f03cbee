"""What has become of the tables that the lake knows, since they were looked at last."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence

from ingestd.capture.catalog import ColumnRow
from ingestd.capture.session import connect
from ingestd.capture.storage import Storage
from ingestd.capture.storage_queries import difference
from ingestd.capture.watched import WatchedConnection
from ingestd.recorded import RegisteredTable
from ingestd.schema import Table

LOCK_TIMEOUT_S = 2.0
"""How long a look at a table waits for somebody who holds it."""

Difference = Callable[[int, Storage | None, Storage], Awaitable[str | None]]
"""Says, of the OID of a table and of how it was stored then and is now, why its rows have other
values than the changes told; None if they have not. Raises psycopg.Error."""


class Looks:
    """How tables were stored when they were looked at, by OID. Used on the event loop only."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._seen: dict[int, Storage] = {}

    def last(self, oid: int, known: RegisteredTable | None) -> Storage | None:
        """Give how it was stored at the last look in this run, or what `_tables` says."""
        then = self._seen.get(oid)
        if then is None and known is not None and known.oid == oid:
            then = Storage.parse(known.storage)
        return then

    def has_seen(self, oid: int) -> bool:
        """Whether a table was looked at in this run."""
        return oid in self._seen

    def keep(self, seen: Mapping[int, Storage]) -> None:
        """Take that this was looked at, and that what differed is told of."""
        self._seen |= seen

    @contextlib.asynccontextmanager
    async def looking(self) -> AsyncIterator[Difference]:
        """Give `Difference`, which looks at all tables on one connection, if it has to look at any.

        It may look through a table or partition: nobody else waits for that connection.
        """
        async with contextlib.AsyncExitStack() as stack:
            own: WatchedConnection | None = None

            async def look(oid: int, then: Storage | None, now: Storage) -> str | None:
                nonlocal own
                if then is None or then == now:
                    return None
                if own is None:
                    connection = await connect(self._dsn, lock_timeout_s=LOCK_TIMEOUT_S)
                    own = await stack.enter_async_context(connection)
                return await difference(own, oid, then, now)

            yield look


def to_record(now: Storage, oid: int, known: RegisteredTable | None, *, files: bool = False) -> str:
    """Give what `_tables` is to say: what it says already, if nothing but the files is new.

    With `files` they count as well.
    """
    if known is not None and known.oid == oid:
        then = Storage.parse(known.storage)
        if then is not None and not (then != now if files else now.differs_durably(then)):
            return known.storage
    return str(now)


def is_wider(table: Table, columns: Sequence[ColumnRow], known: RegisteredTable | None) -> bool:
    """Whether it has a column that was there before and not captured: the config, a column list.

    Not one with another name than before, which pg_attribute shows by its xmin. A generated column
    is never without values.
    """
    then = None
    if known is not None and known.oid == table.oid:
        then = Storage.parse(known.storage)
    if known is None or then is None:
        return False
    present = {(c.number, c.xmin) for c in then.columns}
    captured: Collection[str] = {c.name for c in table.columns} - {
        c.source_name for c in known.columns
    }
    return any(
        c.name in captured and (c.generated or (c.number, c.xmin) in present) for c in columns
    )
