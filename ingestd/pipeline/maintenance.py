"""Schedules the maintenance of a source's lake, alongside its pipeline and never blocking it.

====================  ===========================================================================
task                  when
====================  ===========================================================================
joining small files   every `join_interval_s`, all tables; a table with MANY new files at once
cleaning logs         every CLEAN_INTERVAL_S; also counts small files, even if none are joined
====================  ===========================================================================

Only while the source's pipeline runs: only the holder of its claim maintains the lake. Maintenance
moves no position. Its faults do not affect the source: they are reported once, and retried at the
next due time. One source at a time (`turn`), which bounds memory and CPU.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import aclosing
from dataclasses import dataclass

from ingestd.model.changes import CommittedEpoch
from ingestd.model.errors import IngestdError
from ingestd.pipeline.telemetry.maintenance import MaintenanceTelemetry, Totals
from ingestd.ports import LakeMaintenance

CLEAN_INTERVAL_S = 3600.0
FIRST_AFTER_S = 60.0
"""A start has more urgent work."""
MANY = 1000
"""New files of a table that trigger an early run: readers and checkpoints list every file.

A checkpoint takes 4 us for each.
"""


@dataclass(frozen=True, slots=True)
class MaintenanceSchedule:
    """How often each task runs; None: never."""

    join_interval_s: float | None
    clean_interval_s: float | None = CLEAN_INTERVAL_S
    first_after_s: float = FIRST_AFTER_S


class Maintainer:
    """Maintains one source's lake."""

    def __init__(
        self,
        lake: LakeMaintenance,
        schedule: MaintenanceSchedule,
        telemetry: MaintenanceTelemetry,
        turn: asyncio.Semaphore,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lake = lake
        self._schedule = schedule
        self._telemetry = telemetry
        self._turn = turn
        self._monotonic = monotonic
        self._new: Counter[str] = Counter()
        self._woken = asyncio.Event()
        first = monotonic() + schedule.first_after_s
        self._join_due_s = None if schedule.join_interval_s is None else first
        self._clean_due_s = None if schedule.clean_interval_s is None else first

    async def run(self) -> None:
        """Run until cancelled; nothing of it continues then."""
        self._telemetry.telemetry.epoch_listeners.append(self._committed)
        self._telemetry.telemetry.listeners.append(self._woken.set)
        try:
            while True:
                self._woken.clear()
                delay_s = self._delay_s()
                if self._telemetry.is_running and delay_s == 0:
                    await self._maintain()
                    continue
                await self._wait(delay_s if self._telemetry.is_running else None)
        finally:
            self._telemetry.telemetry.epoch_listeners.remove(self._committed)
            self._telemetry.telemetry.listeners.remove(self._woken.set)

    async def maintain(self) -> None:
        """Run all tasks that the schedule has, now."""
        now = self._monotonic()
        self._join_due_s = None if self._join_due_s is None else now
        self._clean_due_s = None if self._clean_due_s is None else now
        await self._maintain()

    def _committed(self, epoch: CommittedEpoch) -> None:
        names = ["_epochs", *(str(entry.table) for entry in epoch.tables)]
        self._new.update(names)
        self._telemetry.added(names)

    def _tables_due(self) -> frozenset[str]:
        if self._join_due_s is None:
            return frozenset()
        return frozenset(name for name, count in self._new.items() if count >= MANY)

    def _delay_s(self) -> float | None:
        """Return the time until a task is due; None: never."""
        if self._tables_due():
            return 0.0
        due = [at for at in (self._join_due_s, self._clean_due_s) if at is not None]
        return max(0.0, min(due) - self._monotonic()) if due else None

    async def _wait(self, delay_s: float | None) -> None:
        """Wait for the delay, or until the source changes."""
        try:
            async with asyncio.timeout(delay_s):
                await self._woken.wait()
        except TimeoutError:
            return

    async def _maintain(self) -> None:
        async with self._turn:
            if not self._telemetry.is_running:
                return  # another daemon may have the claim now
            began_s = self._monotonic()
            joins = self._join_due_s is not None and began_s >= self._join_due_s
            cleans = self._clean_due_s is not None and began_s >= self._clean_due_s
            pressing = self._tables_due()
            only = None if joins or cleans else pressing
            taken = self._reset_counts(only)
            error: IngestdError | None = None
            totals = Totals()
            try:
                totals = await self._run(joins=joins or bool(pressing), cleans=cleans, only=only)
            except IngestdError as fault:
                error = fault
            if joins and self._schedule.join_interval_s is not None:
                self._join_due_s = began_s + self._schedule.join_interval_s
            if cleans and self._schedule.clean_interval_s is not None:
                self._clean_due_s = began_s + self._schedule.clean_interval_s
            self._telemetry.done(totals, error or totals.error, self._monotonic() - began_s, taken)

    def _reset_counts(self, only: Collection[str] | None) -> Counter[str]:
        """Take the count of new files; later ones belong to the next run."""
        taken = Counter({n: c for n, c in self._new.items() if only is None or n in only})
        for name in taken:
            del self._new[name]
        return taken

    async def _run(self, *, joins: bool, cleans: bool, only: Collection[str] | None) -> Totals:
        totals = Totals()
        async with aclosing(self._lake.run(joins=joins, cleans=cleans, only=only)) as tables:
            async for table in tables:
                totals.add_table(table)
                self._telemetry.maintained(table, since=self._new[table.table])
        return totals
