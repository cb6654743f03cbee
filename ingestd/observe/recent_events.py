"""What a source met lately: its last epochs and its last errors, a bounded number of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import deque
    from datetime import datetime

    from ingestd.model.lsn import Lsn

ERRORS_KEPT = 10
EPOCHS_KEPT = 10


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """An error that a source met, or one of its tables; `times`: how often, the last time `at`."""

    at: datetime
    what: str
    remedy: str | None
    table: str | None = None
    times: int = 1


@dataclass(frozen=True, slots=True)
class EpochStatus:
    """A durable epoch. `commit_s`: from closing it; `oldest_s`: age of its oldest change, then.

    `nbytes`: what the source sent for it. None where it is not told, or there was no transaction.
    """

    epoch: int
    at: datetime
    end_lsn: Lsn
    tables: int
    rows: int
    transactions: int
    nbytes: int | None = None
    commit_s: float | None = None
    oldest_s: float | None = None


def note_error(
    errors: deque[ErrorStatus],
    at: datetime,
    what: str,
    remedy: str | None,
    *,
    table: str | None = None,
) -> None:
    """Make it the newest; one that comes again and again is counted and takes one place."""
    times = 1
    for known in errors:
        if (known.what, known.table) == (what, table):
            times += known.times
            errors.remove(known)
            break
    errors.append(ErrorStatus(at, what, remedy, table, times))
