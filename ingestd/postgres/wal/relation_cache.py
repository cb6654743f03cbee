"""The tables that a stream may send, by OID, and what a RELATION message means for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable

from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.decode.pgoutput.relation import Relation
from ingestd.model.errors import TableError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table, TableId
from ingestd.postgres.rewrites.ddl_log import DdlEvent, parse
from ingestd.postgres.wal.slots.decode_gap import RowSuspects
from ingestd.postgres.wal.slots.row_filters import can_fail

Describe = Callable[[Relation, TableId], Awaitable[Table]]
"""Returns the captured table of that name with the message's columns. Raises TableError."""

TakePartition = Callable[[Relation, int], bool]
"""Takes the arguments of `ReportPartition`. Returns whether the catalog must be checked."""

TakeDdl = Callable[[DdlEvent, Lsn, int], bool]
"""Takes an event, its transaction's commit position and id; returns the same."""


class Relations:
    """Resolves RELATION messages to the captured tables.

    Created on the event loop. `resolve` is for the decoder's thread: it asks the loop to describe
    a relation that it has not resolved yet. `noticed` is set when a message shows something that
    the last reading of the catalog did not: another name, other columns, a table that is not
    captured, a partition. (In a backlog the message may be older than the catalog; only the catalog
    can decide.)
    """

    def __init__(
        self,
        describe: Describe,
        is_selected: Callable[[TableId], bool],
        take_partition: TakePartition,
        take_ddl: TakeDdl = lambda *_: False,
    ) -> None:
        self._describe = describe
        self._take_partition = take_partition
        self._take_ddl = take_ddl
        self._is_wanted = is_selected
        self._loop: asyncio.AbstractEventLoop | None = None
        self._kept: dict[int, Table] = {}
        self._dropped: Collection[tuple[int, TableId]] = ()
        self._resolved: dict[int, tuple[Relation, Table | None]] = {}
        self._looking_up: set[asyncio.Task[Table | None]] = set()
        self.noticed = asyncio.Event()
        self._interrupted: set[TableId] = set()

    def use_tables(
        self, tables: Iterable[Table], dropped: Collection[tuple[int, TableId]] = ()
    ) -> None:
        """Resolve to these tables from now on. Call it on the loop that will describe them.

        `dropped`: OIDs and names of other tables whose last changes may still arrive.
        """
        self._loop = asyncio.get_running_loop()
        self._dropped = dropped
        self._kept = {t.oid: t for t in tables}
        self._resolved = {}

    def take_interrupted(self) -> frozenset[TableId]:
        """Return, once, the captured tables whose changes are missing from some message on.

        Their columns at that message don't satisfy the config.
        """
        interrupted, self._interrupted = frozenset(self._interrupted), set()
        return interrupted

    def resolve(self, relation: Relation) -> Table | None:
        """Return the table with the message's columns; None if it is not captured. Blocks."""
        known = self._resolved.get(relation.oid)
        if known is not None and known[0] == relation:
            return known[1]
        if self._loop is None:
            return None
        return asyncio.run_coroutine_threadsafe(self._look_up(relation), self._loop).result()

    def suspects(self, decoder: PgoutputDecoder) -> RowSuspects:
        """Return the relations one of which has the row that the server failed to send.

        `decoder`: of a stream that began with that row's transaction. A relation is sent before its
        first row, but after the row passed a filter. So it is the last relation if no row follows;
        otherwise one of those that were sent, if no filter can fail.
        """
        sent, last = decoder.relations()
        if last:
            return RowSuspects({oid: sent[oid] for oid in last}, is_certain=True)
        is_complete = bool(sent) and not any(map(can_fail, self._kept.values()))
        return RowSuspects(sent, is_certain=is_complete and len(sent) == 1, is_complete=is_complete)

    def report_partition(self, partition: Relation, table: int) -> None:
        """Report to the loop the partition of a change. For the decoder's thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._note_partition, partition, table)

    def report_ddl(self, content: bytes, lsn: Lsn, xid: int) -> bool:
        """Pass an event to the loop; False if the message is none. For the decoder's thread."""
        event = parse(content)
        if event is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._note_ddl, event, lsn, xid)
        return event is not None

    async def close(self) -> None:
        """Cancel the pending lookups: their waiters get CancelledError. May be called twice."""
        self._loop = None
        for task in list(self._looking_up):
            task.cancel()
        await asyncio.gather(*self._looking_up, return_exceptions=True)

    def _note_partition(self, partition: Relation, table: int) -> None:
        if self._take_partition(partition, table):
            self.noticed.set()

    def _note_ddl(self, event: DdlEvent, lsn: Lsn, xid: int) -> None:
        if self._take_ddl(event, lsn, xid):
            self.noticed.set()

    async def _look_up(self, relation: Relation) -> Table | None:
        if self._loop is None:
            return None
        task = asyncio.create_task(self._find_table(relation))
        self._looking_up.add(task)
        task.add_done_callback(self._looking_up.discard)
        kept = self._kept
        table = await task
        if self._kept is kept:  # else the tables have changed meanwhile
            self._resolved[relation.oid] = (relation, table)
        return table

    async def _find_table(self, relation: Relation) -> Table | None:
        kept = self._kept.get(relation.oid)
        if (relation.oid, relation.id) in self._dropped:
            return await self._describe_dropped(relation)
        if kept is None:
            if self._is_wanted(relation.id):
                self.noticed.set()
            return None
        try:
            table = await self._describe(relation, kept.id)
        except TableError:  # the config can't be satisfied now: the next discovery reports it
            self._interrupted.add(kept.id)
            self.noticed.set()
            return None
        if relation.id != kept.id or _definition(table) != _definition(kept):
            self.noticed.set()
        return table

    async def _describe_dropped(self, relation: Relation) -> Table | None:
        try:
            return await self._describe(relation, relation.id)
        except TableError:  # it can't be re-read
            return None


def _definition(table: Table) -> tuple[object, ...]:
    return table.columns, table.replica_identity
