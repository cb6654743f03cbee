"""Snapshots of an in-memory source: at a consistent point, or incremental."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from ingestd.model.changes import TableBatch
from ingestd.model.errors import TableError, TableReplacedError
from ingestd.model.keys import Key, new_keys
from ingestd.model.lsn import Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.schema import Table, TableId
from ingestd.ports import SnapshotItem, SnapshotPage, SplitRead, TableRead
from ingestd.process.clock import utc_now
from ingestd.testing.fakes.database import RECORD_BYTES, FakeDatabase, Version
from ingestd.testing.fakes.rows import read_batch


@dataclass(frozen=True, slots=True)
class Reach:
    """The sizes of a fake's reads: `blocks` of a split; `splits` read before any is returned.

    Those are returned in reverse order, the latest first, as with several workers.
    """

    blocks: int = 1000
    splits: int = 1


@dataclass(frozen=True, slots=True)
class FakeRemainder:
    """The rest of a table after a snapshot at `point`: blocks of one file, as splits."""

    point: Lsn
    file: int
    splits: tuple[str, ...]

    def __str__(self) -> str:
        """Return the text for `_tables`."""
        return json.dumps([int(self.point), self.file, self.splits])

    @classmethod
    def parse(cls, text: str) -> FakeRemainder:
        """Parse the text of `str`."""
        point, file, splits = json.loads(text)
        return cls(Lsn(point), file, tuple(splits))


class FakeSnapshot:
    """See `ingestd.ports.Snapshot`. `remainder`: of one table, what must still be read."""

    def __init__(
        self,
        database: FakeDatabase,
        tables: Sequence[Table],
        reach: Reach,
        *,
        is_incremental: bool,
        remainder: FakeRemainder | None = None,
        where: str | None = None,
    ) -> None:
        self.is_incremental = is_incremental
        if is_incremental:
            database.write_elsewhere(RECORD_BYTES)
        self.point = database.current if remainder is None else remainder.point
        self.at = utc_now()
        self._database = database
        self._tables = {t.id: t for t in tables}
        self._reach = reach
        self._remainder = remainder
        self._where = where
        self._files = {t.id: database.filenode(t.id) for t in tables}
        self._splits: dict[TableId, list[str]] = {}
        self._given: Counter[TableId] = Counter()
        self._abandoned: set[TableId] = set()
        self._taken: list[PgSnapshot] = []
        self._newest = database.visibility()

    async def items(self) -> AsyncGenerator[SnapshotItem, None]:
        """Yield the tables one after another."""
        for table in self._tables.values():
            try:
                splits = self._cut(table)
                for first in range(0, len(splits), self._reach.splits):
                    several = splits[first : first + self._reach.splits]
                    taken = [(split, self._read_split(table, split)) for split in several]
                    for split, page in reversed(taken):
                        if table.id not in self._abandoned:
                            yield page
                            self._given[table.id] += 1
                            self._taken = self._taken[:-1]
                            yield SplitRead(table.id, split)
            except TableError as error:
                self._abandoned.add(table.id)
                yield error
            if table.id not in self._abandoned:
                yield TableRead(table.id)

    async def rows_of(
        self, table: Table, keys: Collection[Key]
    ) -> AsyncGenerator[SnapshotPage, None]:
        """Search all rows."""
        seen, rows = self._rows_at(table)
        self._taken = self._taken[:-1]
        page = self._page(table, rows, seen, self._own_position())
        wanted = [key in keys for key in new_keys(table, page.batch.rows)]
        found = page.batch.rows.filter(pa.array(wanted, pa.bool_()))
        yield replace(page, batch=TableBatch(table, found, RECORD_BYTES * found.num_rows))

    def oldest(self) -> PgSnapshot | None:
        """Return the oldest visibility of pages read but not returned, or the newest."""
        return (
            min([*self._taken, self._newest], key=lambda s: s.age) if self.is_incremental else None
        )

    def abandon(self, table: TableId) -> None:
        """Stop returning pages of a table."""
        self._abandoned.add(table)

    def ratio_read(self, table: TableId) -> float:
        """Return the share of splits that were returned."""
        return self._given[table] / max(1, len(self._splits.get(table, ())))

    def remainder(self, table: TableId, done: Collection[str]) -> str:
        """Return the splits that are not done; empty for a partial snapshot."""
        if self._where is not None or table not in self._splits:
            return ""
        splits = tuple(split for split in self._splits[table] if split not in done)
        return str(FakeRemainder(self.point, self._files[table], splits))

    async def advance_source(self) -> None:
        """Write WAL."""
        self._database.write_elsewhere(RECORD_BYTES)

    async def close(self) -> None:
        """Do nothing."""

    # --- reading ------------------------------------------------------------------------------

    def _cut(self, table: Table) -> list[str]:
        """Return the table's splits ``first:end``; the last one has no end."""
        failed = self._database.unreadable.get(table.id)
        if failed is not None:
            raise failed
        if self._remainder is None:
            if self.is_incremental:
                self._files[table.id] = self._database.filenode(table.id)
            firsts = range(0, max(1, self._database.blocks(table)), self._reach.blocks)
            ends = [*(str(first) for first in firsts[1:]), ""]
            splits = [f"{first}:{end}" for first, end in zip(firsts, ends, strict=True)]
        else:
            splits = list(self._remainder.splits)
        self._splits[table.id] = splits
        return splits

    def _read_split(self, table: Table, split: str) -> SnapshotPage:
        first, end = split.split(":")
        seen, rows = self._rows_at(table)
        inside = [v for v in rows if int(first) <= v.block and (not end or v.block < int(end))]
        position = self.point
        if self.is_incremental:
            is_partial = self._where is not None
            position = self._own_position() if is_partial else self._database.current
        return self._page(table, inside, seen, position)

    def _own_position(self) -> Lsn:
        """Write WAL, and return a position inside it."""
        self._database.write_elsewhere(RECORD_BYTES)
        return Lsn(self._database.current - 1)

    def _rows_at(self, table: Table) -> tuple[PgSnapshot | None, list[Version]]:
        """Return the rows at the point, or those that a new snapshot sees."""
        if not self.is_incremental:
            return None, self._database.versions(table, self.point)
        if self._files[table.id] != self._database.filenode(table.id):
            raise TableReplacedError(table.id, "was rewritten or truncated while it was read")
        seen = self._newest = self._database.visibility()
        self._taken.append(seen)
        return seen, self._database.seen_rows(table, seen)

    def _page(
        self,
        table: Table,
        versions: Sequence[Version],
        seen: PgSnapshot | None,
        position: Lsn,
    ) -> SnapshotPage:
        holds = self._database.condition(self._where)
        rows = [version.row for version in versions if holds(version.row)]
        return SnapshotPage(read_batch(table, rows, position, self.at), position, seen)


def remainder_of(database: FakeDatabase, table: Table, text: str) -> FakeRemainder:
    """Parse the rest of a snapshot. Raise TableReplacedError if it is no longer valid."""
    remainder = FakeRemainder.parse(text)
    if remainder.file != database.filenode(table.id):
        raise TableReplacedError(table.id, "was rewritten or truncated since")
    return remainder
