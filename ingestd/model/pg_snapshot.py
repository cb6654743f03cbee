"""The transactions that a snapshot of the source sees.

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
    """A snapshot, by 64-bit transaction ids: it sees ids below `xmax` that are not in `running`.

    `running`: ids below `xmax` that this snapshot considers unfinished, even if the commit is
    already in the WAL. A commit is in the WAL shortly before other sessions see it; while its
    session waits for a synchronous standby, that lasts as long as the wait.
    """

    xmin: int
    xmax: int
    running: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str) -> PgSnapshot:
        """Parse the text of a pg_snapshot: ``xmin:xmax:xip,xip``. Raises ValueError."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(int(x) for x in running.split(",") if x))

    @property
    def age(self) -> tuple[int, int]:
        """Sort key that orders the snapshots of one server by age: the older is less."""
        return self.xmax, -len(self.running)

    def sees(self, xids: Xids) -> NDArray[np.bool_]:
        """Return for each transaction whether it is seen. The stream's ids: their low 32 bits.

        They are resolved to the ids nearest to `xmax`, as Postgres does.
        """
        away = (xids - self.xmax) % _XIDS
        whole = self.xmax + np.where(away < _XIDS // 2, away, away - _XIDS)
        seen: NDArray[np.bool_] = whole < self.xmax
        if self.running:
            seen &= ~np.isin(whole, np.fromiter(self.running, np.int64, len(self.running)))
        return seen


def is_before(xid: int, later: int) -> bool:
    """Return whether an id precedes `later`; both are the low 32 bits of transaction ids."""
    return (xid - later) % _XIDS >= _XIDS // 2
