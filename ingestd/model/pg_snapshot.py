"""Which transactions a snapshot of the source sees.

Source: PostgreSQL documentation, "Transaction ID and Snapshot Information Functions"
(pg_current_snapshot, xid8), "Transactions and Identifiers".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Xids = NDArray[np.int64]

_XIDS = 1 << 32


@dataclass(frozen=True, slots=True)
class PgSnapshot:
    """A snapshot, by 64-bit transaction ids: seen is what is below `xmax` and not in `running`.

    `running`: ids of transactions below `xmax` that have not ended for this snapshot, however far
    their commits are: one is in the WAL for a moment before others see it, and for as long as its
    session waits for a synchronous standby.
    """

    xmin: int
    xmax: int
    running: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str) -> PgSnapshot:
        """Read the text of a pg_snapshot: ``xmin:xmax:xip,xip``. Raises ValueError."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(int(x) for x in running.split(",") if x))

    @property
    def age(self) -> tuple[int, int]:
        """What orders the snapshots of one server by when they were taken: the older is less."""
        return self.xmax, -len(self.running)

    def sees(self, xids: Xids) -> NDArray[np.bool_]:
        """Say of each transaction whether it is seen. The stream's ids: their low 32 bits.

        They are taken for those nearest to `xmax`, as Postgres does.
        """
        away = (xids - self.xmax) % _XIDS
        whole = self.xmax + np.where(away < _XIDS // 2, away, away - _XIDS)
        seen: NDArray[np.bool_] = whole < self.xmax
        if self.running:
            seen &= ~np.isin(whole, np.fromiter(self.running, np.int64, len(self.running)))
        return seen


def is_before(xid: int, later: int) -> bool:
    """Whether a transaction, given by the low 32 bits of its id, has a lower one than `later`."""
    return (xid - later) % _XIDS >= _XIDS // 2
