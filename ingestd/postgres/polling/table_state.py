"""The state of a table that is polled."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pyarrow as pa

from ingestd.model.lsn import ZERO, Lsn
from ingestd.postgres.polling.intervals import PollSchedule
from ingestd.postgres.polling.keys.key_set import KeySet
from ingestd.postgres.polling.keys.lake_keys import WHOLE, KeyPartition
from ingestd.postgres.polling.polled_table import PolledTable
from ingestd.postgres.polling.progress import PollProgress

NEVER = Lsn((1 << 63) - 1)


@dataclass(slots=True)
class PolledState:
    """A table that is polled. `progress`: None before it has been read.

    `keys`: those that the lake holds; None if they are too many, or (`knows_keys`) not loaded yet.
    `forgotten`: how often they had to be loaded again. `missing`: keys that a sweep did not find,
    for the next poll to look up (`swept`: it has, or they were dropped: `unlooked`).
    `key_partition`: where the current or interrupted sweep is. `deleted_at`: position of the last
    rows that a sweep led to. `resumes_at`: position of the first rows that carried the progress.
    `peak`: the highest cursor at the last poll, which began at `polled_at` (monotonic).

    While snapshots read it (`readings`) it is not polled: the rows that they see would be a `c`.
    Polling continues, and its keys are loaded, once everything up to `load_above` is durable.
    """

    polled: PolledTable
    turn: PollSchedule
    progress: PollProgress | None = None
    keys: KeySet | None = None
    knows_keys: bool = False
    missing: list[pa.RecordBatch] = field(default_factory=list)
    swept: asyncio.Event = field(default_factory=asyncio.Event)
    unlooked: bool = False
    key_partition: KeyPartition = WHOLE
    deleted_at: Lsn = ZERO
    resumes_at: Lsn = NEVER
    readings: int = 0
    load_above: Lsn = ZERO
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    forgotten: int = 0
    peak: str | None = None
    polled_at: float = 0.0

    @property
    def sweep_s(self) -> float:
        """The time from the end of a sweep to the start of the next."""
        return self.polled.sweep_s or 0.0

    @property
    def sweep_at(self) -> float:
        """When its keys must be swept next (monotonic)."""
        return self.turn.swept_at + self.sweep_s

    def begin_partition(self, partition: KeyPartition) -> None:
        """Record that a sweep has completed all partitions before this one."""
        self.key_partition = partition

    def forget_missing(self) -> None:
        """Drop what a sweep found: the sweep restarts its partition."""
        self.unlooked = self.unlooked or bool(self.missing)
        self.missing.clear()
        self.swept.set()

    def forget_keys(self, above: Lsn) -> None:
        """Load the keys again, once the lake is durable above this position."""
        self.keys, self.knows_keys, self.load_above = None, False, above
        self.key_partition = WHOLE
        self.forgotten += 1
