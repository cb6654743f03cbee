"""A verification of a source: at one point where that is exact, else at several until it settles.

A polled source's lake is as of its last looks, each of them at rows that differ from the last: no
position says what the source was then. So differences count there that stay the same, in the source
and in the lake, from the first comparison to the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

import numpy as np

from ingestd.digests.value_hashes import Hashes
from ingestd.model.errors import FolderError, IngestdError, TableError, TransientError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table, TableId
from ingestd.pipeline.verify.compare import KEPT, TableCompared
from ingestd.pipeline.verify.table import TableVerification, VerifySettings, together
from ingestd.ports.verify import (
    Kind,
    VerifiedLake,
    VerifiedSource,
    VerifyOutcome,
    VerifyPoint,
    VerifyProgress,
    VerifyState,
)

POLL_S, _MAX_POLL_S = 0.125, 2.0
_RESTS_TO_LOOKS = 9
_FIRST_REST_S, _MAX_REST_S = 1.0, 30.0
_POLL_SLACK = 1.1
"""A poll takes its time, too."""
_MORE_DIFFER = f"more differ: of {KEPT:,} rows it is known whether they stay"
OpenPoint = Callable[[Sequence[Table]], AbstractAsyncContextManager[VerifiedSource]]
"""Opens the source at a point of now, for these tables."""


@dataclass(frozen=True, slots=True)
class PollingTolerance:
    """How often a polled table is looked at: while it is quiet; for deletes, None for never."""

    poll_s: float
    sweep_s: float | None


class Verification:
    """Verifies tables of one source, one after the other.

    `looks`: of those that are polled; the lake has the changes of others as they happen. `where`
    begins an error's text.
    """

    def __init__(
        self,
        where: str,
        open_point: OpenPoint,
        lake: VerifiedLake,
        settings: VerifySettings,
        progress: VerifyProgress,
        *,
        looks: Mapping[TableId, PollingTolerance],
    ) -> None:
        self._where = where
        self._open_point = open_point
        self._lake = lake
        self._settings = settings
        self._progress = progress
        self._looks = looks
        self._prints: dict[TableId, Hashes] = {}
        self._stayed: dict[TableId, Hashes] = {}
        self._outcomes: dict[TableId, VerifyOutcome] = {}
        self._now = asyncio.get_running_loop().time
        self._began = self._now()
        self._at: Table | None = None
        self.point: VerifyPoint | None = None

    async def run(self, tables: Sequence[Table]) -> list[VerifyOutcome]:
        """Verify them. A fault ends it: what was found until then is given all the same.

        Raises OperatorError, TransientError if nothing was begun.
        """
        waiting, rest_s = list(tables), _FIRST_REST_S
        deadline = self._began + self._settings.wait_s
        while waiting:
            try:
                waiting = await self._look(waiting, deadline - rest_s)
            except IngestdError as fault:
                if self.point is None:
                    raise
                self._end(waiting, fault)
                break
            if waiting:
                await asyncio.sleep(min(rest_s, max(POLL_S, deadline - self._now())))
                rest_s = min(2 * rest_s, _MAX_REST_S)
        return [self._outcomes[t.id] for t in tables]

    async def _look(self, tables: Sequence[Table], late: float) -> list[Table]:
        """Compare at a point of now; give the tables to compare once more. From `late` on: none."""
        self._at = None
        async with self._open_point(tables) as source:
            if self.point is None:
                self.point = source.point
            limit = self._now() + self._settings.wait_s
            left = []
            for table in tables:
                self._at = table
                outcome = await self._verify(source, table, limit, late)
                if outcome is None:
                    left.append(table)
                else:
                    self._outcomes[table.id] = outcome
        return left

    def _end(self, tables: Sequence[Table], fault: IngestdError) -> None:
        """Give the table that was compared the fault; the others were not come to."""
        left = [t for t in tables if t.id not in self._outcomes]
        if not left:
            return
        at = left[0] if self._at is None or self._at not in left else self._at
        # What needs a person is not to be tried again as it is.
        state = (
            VerifyState.NOT_REACHED
            if isinstance(fault, TransientError)
            else VerifyState.NOT_COMPARED
        )
        for table in left:
            note = f"the verification ended at table {at.id}"
            self._outcomes[table.id] = VerifyOutcome(str(table.id), state, note=note)
        self._outcomes[at.id] = VerifyOutcome(str(at.id), state, fault=fault)

    async def _await_lake(self, point: VerifyPoint, limit: float) -> None:
        began = self._now()
        first = await self._lake.position()
        position, rest_s = first, POLL_S
        while position is None or position < point.lsn:
            now = self._now()
            if now > limit:
                raise self._behind(first, position, point)
            self._progress.waiting(position, point.lsn)
            rest_s = rest_between(rest_s, took_s=now - began)
            await asyncio.sleep(min(rest_s, max(POLL_S, limit - now)))
            began = self._now()
            position = await self._lake.position()

    def _behind(
        self, first: Lsn | None, position: Lsn | None, point: VerifyPoint
    ) -> TransientError:
        moved = "it did not move meanwhile" if first == position else f"it was at {first} before"
        remedy = "give it longer: --wait"
        quiet_s = min((looks.poll_s for looks in self._looks.values()), default=0.0)
        if quiet_s > self._settings.wait_s:
            remedy = f"quiet tables are polled every {quiet_s:g} s: --wait {2 * quiet_s:g}s"
        if first == position:
            running = "is the daemon running, and the source delivering? `ingestd status` tells"
            remedy = f"{running}; {remedy}" if quiet_s > self._settings.wait_s else running
        return TransientError(
            f"{self._where}: the lake is at {position}, the source at {point.lsn}: not reached"
            f" within {self._settings.wait_s:g} s; {moved}",
            reason="lake_behind",
            remedy=remedy,
        )

    async def _verify(
        self, source: VerifiedSource, table: Table, limit: float, late: float
    ) -> VerifyOutcome | None:
        """Compare a table; None if it has to be compared once more: never from `late` on."""
        with TableVerification(source, self._lake, table, self._settings, self._progress) as one:
            try:
                await together(one.read(), self._await_lake(source.point, limit))
                taken_s = self._now() - self._began  # the lake is as it is now
                comparison = await one.compare()
                notes = [one.digested.note]
                if not source.point.is_exact:
                    notes.append(self._without_unswept(table, comparison))
                    is_last = table.id in self._stayed and self._now() > late
                    is_settled = self._settle(table, comparison)
                    if not comparison.is_equal:
                        if not is_last:
                            return None
                        if not comparison.is_complete:
                            notes.append(_MORE_DIFFER)
                        if not is_settled and not comparison.keep(self._stayed[table.id]):
                            return self._unsettled(table)
                        if (early := self._too_early(table, comparison, taken_s)) is not None:
                            return early
                        notes.append(self._without_early(table, comparison, taken_s))
                differences = () if comparison.is_equal else await one.named(comparison)
            except (TableError, FolderError) as error:
                return VerifyOutcome(str(table.id), VerifyState.NOT_COMPARED, fault=error)
            found = replace(_outcome(table, comparison), differences=differences)
            note = "; ".join(filter(None, notes))
            return replace(found, changes=one.digested.changes, note=note or None)

    def _settle(self, table: Table, comparison: TableCompared) -> bool:
        """Leave the differences that were there before, just the same; say whether that can be.

        It can't where more differ than are kept: the others may have been there, too. What is among
        the kept ones each time did stay, though.
        """
        found = comparison.prints()
        stayed = self._stayed.get(table.id, found)
        self._stayed[table.id] = np.intersect1d(found, stayed)
        if not comparison.is_complete:
            return False
        before = self._prints.get(table.id)
        if before is not None:
            comparison.keep(before)
        self._prints[table.id] = comparison.prints()
        return before is not None

    def _unsettled(self, table: Table) -> VerifyOutcome:
        fault = TransientError(
            f"table {table.id}: more than {KEPT:,} rows differ each time, of those that are kept"
            " other ones each time: whether any stays different can't be told",
            reason="not_settled",
            remedy="compare it while less is written, or when the daemon keeps up with it",
        )
        return VerifyOutcome(str(table.id), VerifyState.NOT_REACHED, fault=fault)

    def _without_unswept(self, table: Table, comparison: TableCompared) -> str | None:
        """Leave out what only the lake has, if nobody looks for deletes; give a note of it."""
        extra = comparison.counts.get(Kind.EXTRA, 0)
        looks = self._looks.get(table.id)
        if not extra or (looks is not None and looks.sweep_s is not None):
            return None
        comparison.without(Kind.EXTRA)
        return (
            f"{extra:,} rows are in the lake only: gone from the source, or written since it was"
            " read (detect_deletes is off)"
        )

    def _without_early(self, table: Table, comparison: TableCompared, taken_s: float) -> str | None:
        """Leave out of what differs what a sweep may yet find to be gone; give a note of it."""
        extra = comparison.counts.get(Kind.EXTRA, 0)
        looks = self._looks.get(table.id)
        every_s = (looks.sweep_s if looks is not None else None) or 0.0
        if not extra or taken_s >= every_s:
            return None
        comparison.without(Kind.EXTRA)
        return (
            f"{extra:,} more rows may be gone from the source only since the last sweep of its keys"
            f" (detect_deletes: {every_s:g} s)"
        )

    def _too_early(
        self, table: Table, comparison: TableCompared, taken_s: float
    ) -> VerifyOutcome | None:
        """Return what must be told where the next poll, or sweep, may find what differs.

        `taken_s`: from when the verification began to when the lake was taken as it is.
        """
        looks = self._looks.get(table.id)
        if looks is None:
            return None
        rows = f"table {table.id}: {comparison.counts.total():,} rows"
        if set(comparison.counts) == {Kind.EXTRA} and taken_s < (every_s := looks.sweep_s or 0.0):
            fault = TransientError(
                f"{rows} may be gone from the source only since the last sweep of its keys",
                reason="not_swept",
                remedy=f"wait longer than detect_deletes: --wait {2 * every_s:g}s",
            )
        elif taken_s < _POLL_SLACK * looks.poll_s:
            fault = TransientError(
                f"{rows} may differ only since the last poll: while it is quiet it is polled"
                f" every {looks.poll_s:g} s",
                reason="not_polled",
                remedy=f"wait longer than that: --wait {2 * looks.poll_s:g}s",
            )
        else:
            return None
        return VerifyOutcome(str(table.id), VerifyState.NOT_REACHED, fault=fault)


def rest_between(rest_s: float, *, took_s: float) -> float:
    """Return how long to rest before the next look at the lake: each opens `_epochs` again.

    Longer each time, and where a look takes long, as in an object store.
    """
    return max(min(2 * rest_s, _MAX_POLL_S), _RESTS_TO_LOOKS * took_s)


def _outcome(table: Table, comparison: TableCompared) -> VerifyOutcome:
    return VerifyOutcome(
        str(table.id),
        VerifyState.EQUAL if comparison.is_equal else VerifyState.DIFFERENT,
        comparison.source_rows,
        comparison.lake_rows,
        counts=dict(comparison.counts),
    )
