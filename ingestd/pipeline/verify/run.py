"""Runs a verification: at one point if that is exact, otherwise at several until it settles.

The lake of a polled source combines the results of several polls, between which the source has
changed: no position determines the source's state. So a difference counts only if it stays the
same, in source and lake, from the first comparison to the last.
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
from ingestd.pipeline.verify.compare import TableCompared
from ingestd.pipeline.verify.table import TableVerification, VerifySettings, gather_fail_fast
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
_RESTS_TO_CHECKS = 9
_MAX_REST_S = 30.0
_POLL_SLACK = 1.1
"""A poll takes time, too."""
OpenPoint = Callable[[Sequence[Table]], AbstractAsyncContextManager[VerifiedSource]]
"""Opens the source at the current point, for these tables."""


@dataclass(frozen=True, slots=True)
class PollingTolerance:
    """How often a polled table is polled while quiet, and for deletes (None: never)."""

    poll_s: float
    sweep_s: float | None


class Verification:
    """Verifies tables of one source, one after the other.

    `polling`: of each polled table; the lake gets the changes of others as they happen. `where`
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
        polling: Mapping[TableId, PollingTolerance],
    ) -> None:
        self._where = where
        self._open_point = open_point
        self._lake = lake
        self._settings = settings
        self._progress = progress
        self._polling = polling
        self._prints: dict[TableId, Hashes] = {}
        self._stayed: dict[TableId, Hashes] = {}
        self._outcomes: dict[TableId, VerifyOutcome] = {}
        self._now = asyncio.get_running_loop().time
        self._began = self._now()
        self._at: Table | None = None
        self.point: VerifyPoint | None = None

    async def run(self, tables: Sequence[Table]) -> list[VerifyOutcome]:
        """Verify tables. A fault ends the run; the outcomes so far are returned all the same.

        Raises OperatorError, TransientError if nothing was begun.
        """
        waiting, rest_s = list(tables), self._settings.first_rest_s
        deadline = self._began + self._settings.wait_s
        while waiting:
            try:
                waiting = await self._compare_at_point(waiting, deadline - rest_s)
            except IngestdError as fault:
                if self.point is None:
                    raise
                self._end(waiting, fault)
                break
            if waiting:
                await asyncio.sleep(min(rest_s, max(POLL_S, deadline - self._now())))
                rest_s = min(2 * rest_s, _MAX_REST_S)
        return [self._outcomes[t.id] for t in tables]

    async def _compare_at_point(self, tables: Sequence[Table], late: float) -> list[Table]:
        """Compare at the current point; return the tables to compare again, none after `late`."""
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
        """Record the fault for the table being compared; the others were not reached."""
        left = [t for t in tables if t.id not in self._outcomes]
        if not left:
            return
        at = left[0] if self._at is None or self._at not in left else self._at
        # A fault that needs an operator must not be retried unchanged.
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
        remedy = "allow more time: --wait"
        quiet_s = min((one.poll_s for one in self._polling.values()), default=0.0)
        if quiet_s > self._settings.wait_s:
            remedy = f"quiet tables are polled every {quiet_s:g} s: --wait {2 * quiet_s:g}s"
        if first == position:
            running = "is the daemon running, and the source delivering? See `ingestd status`"
            remedy = f"{running}; {remedy}" if quiet_s > self._settings.wait_s else running
        return TransientError(
            f"{self._where}: the lake is at {position} and did not reach the source's {point.lsn}"
            f" within {self._settings.wait_s:g} s; {moved}",
            reason="lake_behind",
            remedy=remedy,
        )

    async def _verify(
        self, source: VerifiedSource, table: Table, limit: float, late: float
    ) -> VerifyOutcome | None:
        """Compare a table; return None if it must be compared again: never from `late` on."""
        with TableVerification(source, self._lake, table, self._settings, self._progress) as one:
            try:
                await gather_fail_fast(one.read(), self._await_lake(source.point, limit))
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
                            notes.append(
                                f"more differ; only {self._settings.tracked:,} are tracked to see"
                                " which of them stay different"
                            )
                        if not is_settled and not comparison.retain_differences(
                            self._stayed[table.id]
                        ):
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
        """Keep the differences that existed before, unchanged; return whether that is possible.

        It is not if more rows differ than are kept: the others may have existed before, too. A
        difference that is kept each time did stay, though.
        """
        found = comparison.prints()
        stayed = self._stayed.get(table.id, found)
        self._stayed[table.id] = np.intersect1d(found, stayed)
        if not comparison.is_complete:
            return False
        before = self._prints.get(table.id)
        if before is not None:
            comparison.retain_differences(before)
        self._prints[table.id] = comparison.prints()
        return before is not None

    def _unsettled(self, table: Table) -> VerifyOutcome:
        fault = TransientError(
            f"table {table.id}: more than {self._settings.tracked:,} rows differ each time, and the"
            " tracked ones vary: whether any of them stays different is unknown",
            reason="not_settled",
            remedy="compare it while less is written, or when the daemon keeps up with it",
        )
        return VerifyOutcome(str(table.id), VerifyState.NOT_REACHED, fault=fault)

    def _without_unswept(self, table: Table, comparison: TableCompared) -> str | None:
        """Leave out rows that exist only in the lake if deletes are not detected; return a note."""
        extra = comparison.counts.get(Kind.EXTRA, 0)
        tolerance = self._polling.get(table.id)
        if not extra or (tolerance is not None and tolerance.sweep_s is not None):
            return None
        comparison.without(Kind.EXTRA)
        return (
            f"{extra:,} rows are in the lake only: deleted in the source, or written since it was"
            " read (detect_deletes is off)"
        )

    def _without_early(self, table: Table, comparison: TableCompared, taken_s: float) -> str | None:
        """Leave out rows that a sweep may still find deleted; return a note."""
        extra = comparison.counts.get(Kind.EXTRA, 0)
        tolerance = self._polling.get(table.id)
        every_s = (tolerance.sweep_s if tolerance is not None else None) or 0.0
        if not extra or taken_s >= every_s:
            return None
        comparison.without(Kind.EXTRA)
        return (
            f"{extra:,} more rows may have been deleted in the source since the last sweep of its"
            f" keys (detect_deletes: {every_s:g} s)"
        )

    def _too_early(
        self, table: Table, comparison: TableCompared, taken_s: float
    ) -> VerifyOutcome | None:
        """Return the outcome if the next poll or sweep may resolve the difference, else None.

        `taken_s`: from the start of the verification until the lake's state was taken.
        """
        tolerance = self._polling.get(table.id)
        if tolerance is None:
            return None
        rows = f"table {table.id}: {comparison.counts.total():,} rows"
        if set(comparison.counts) == {Kind.EXTRA} and taken_s < (
            every_s := tolerance.sweep_s or 0.0
        ):
            fault = TransientError(
                f"{rows} may have been deleted in the source since the last sweep of its keys",
                reason="not_swept",
                remedy=f"wait longer than detect_deletes: --wait {2 * every_s:g}s",
            )
        elif taken_s < _POLL_SLACK * tolerance.poll_s:
            fault = TransientError(
                f"{rows} may differ only since the last poll: while quiet, the table is polled"
                f" every {tolerance.poll_s:g} s",
                reason="not_polled",
                remedy=f"wait longer than that: --wait {2 * tolerance.poll_s:g}s",
            )
        else:
            return None
        return VerifyOutcome(str(table.id), VerifyState.NOT_REACHED, fault=fault)


def rest_between(rest_s: float, *, took_s: float) -> float:
    """Return how long to rest before the next check of the lake: each opens `_epochs` again.

    Longer each time, and longer where a check is slow, as in an object store.
    """
    return max(min(2 * rest_s, _MAX_POLL_S), _RESTS_TO_CHECKS * took_s)


def _outcome(table: Table, comparison: TableCompared) -> VerifyOutcome:
    return VerifyOutcome(
        str(table.id),
        VerifyState.EQUAL if comparison.is_equal else VerifyState.DIFFERENT,
        comparison.source_rows,
        comparison.lake_rows,
        counts=dict(comparison.counts),
    )
