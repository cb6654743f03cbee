"""What the config says about a source's pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from ingestd.pipeline.filling_epoch import EpochPolicy


@dataclass(frozen=True, slots=True)
class PipelinePolicy:
    """What the config says about a source's pipeline.

    `idle_interval_s`: the longest time for which a position without captured changes is neither
    recorded nor confirmed. The first such position after an epoch is recorded after the epoch's
    delay, the next after twice that, and so on, because a client that waits for the lake to catch
    up has usually just written. `drain_limit_s`: how long a stop may take to finish the open epoch,
    and a fault to finish the one that is being committed.
    """

    epoch: EpochPolicy
    snapshot: bool = True
    resnapshot_when_lost: bool = True
    resnapshot_when_lake_lost: bool = False
    resnapshot_rewritten: bool = True
    idle_interval_s: float = 10.0
    drain_limit_s: float = 8.0

    @property
    def may_read(self) -> bool:
        """True if all tables may be re-read after changes were lost."""
        return self.resnapshot_when_lost and self.snapshot
