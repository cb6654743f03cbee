"""What the config says about a source's pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from ingestd.pipeline.filling_epoch import EpochPolicy

MONITOR_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """How tables are read while the stream runs.

    `at_once`: concurrent reads, so that a new small table need not wait for a large one.
    `patience_s`: how long the stream may take to pass a chunk's position before it is nudged.
    `advance_interval_s`: how often the source's position is advanced while rows are read, because
    an epoch with snapshot rows needs a greater position than the previous one. `keys_at_once`: how
    many rows are read by their keys in one query.
    """

    at_once: int = 2
    patience_s: float = 0.02
    advance_interval_s: float = 1.0
    keys_at_once: int = 500


@dataclass(frozen=True, slots=True)
class PipelinePolicy:
    """What the config says about a source's pipeline.

    `reads_existing_rows`: whether tables get snapshots, which read them as `snapshots` says.
    `idle_interval_s`: the longest time for which a position without captured changes is neither
    recorded nor confirmed. The first such position after an epoch is recorded after the epoch's
    delay, the next after twice that, and so on, because a client that waits for the lake to catch
    up has usually just written. `finish_limit_s`: how long a stop may take to finish the open
    epoch, and a fault to finish the one that is being committed. `monitor_interval_s`: how often
    lag and health are measured. `standby_patience_s`: how long a standby may take to receive what a
    table in the lake has, before that table is stopped.
    """

    epoch: EpochPolicy
    reads_existing_rows: bool = True
    resnapshot_when_lost: bool = True
    resnapshot_when_lake_lost: bool = False
    resnapshot_rewritten: bool = True
    idle_interval_s: float = 10.0
    finish_limit_s: float = 8.0
    monitor_interval_s: float = MONITOR_INTERVAL_S
    standby_patience_s: float = 30.0
    snapshots: SnapshotPolicy = SnapshotPolicy()

    @property
    def may_read(self) -> bool:
        """True if all tables may be re-read after changes were lost."""
        return self.resnapshot_when_lost and self.reads_existing_rows
