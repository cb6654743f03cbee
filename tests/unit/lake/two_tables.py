"""A source of two tables, good and bad, whose lake one attempt of a daemon writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ingestd.lake.delta_lake import DeltaLake
from ingestd.model.errors import TableError
from ingestd.process.clock import utc_now
from tests.unit.lake import rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime
    from pathlib import Path

    from ingestd.lake.fencing import WriterIdentity
    from ingestd.lake.store.store import Store
    from ingestd.model.schema import Table

GOOD, BAD = rows.make_table("good"), rows.make_table("bad")


def log_of(lake: Path, table: str = "bad") -> Path:
    """Return the log of a table."""
    return lake / "shop/public" / table / "_delta_log"


class Attempt:
    """One attempt of a daemon. `stopped`: the tables that stopped, by name."""

    def __init__(
        self,
        store: Store,
        writer: WriterIdentity | None = None,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.lake = DeltaLake(store.uri(""), "shop", store=store, writer=writer, now=now)
        self.stopped: dict[str, TableError] = {}

    async def start(self) -> None:
        """Open the lake, and take it over."""
        self._record([*(await self.lake.open()).damaged.values()])
        await self.fence()

    async def fence(self) -> None:
        """Take the lake over once it is open."""
        self._record([*(await self.lake.fence()).values()])
        await self.lake.adopt("server")

    async def append(self, lsn: int, *, bad: Table | None = BAD) -> None:
        """Commit an epoch with a row of each table, whose id is the LSN.

        `bad`: the bad table's definition; None if it has no row.
        """
        writer = self.lake.begin_epoch()
        for table in filter(None, (GOOD, bad)):
            try:
                await writer.append_batch(rows.inserts(table, lsn, lsn))
            except TableError as error:
                self._record([error])
        await writer.commit(rows.summary(lsn, lsn + 5), self._stop)

    async def _stop(self, errors: Sequence[TableError]) -> None:
        self._record(errors)

    def _record(self, errors: Sequence[TableError]) -> None:
        self.stopped |= {error.table.name: error for error in errors}
