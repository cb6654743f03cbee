"""The last epochs and errors of a source, a bounded number of each."""

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
    """An error of a source or of one of its tables; `times`: its count, the last one `at`."""

    at: datetime
    what: str
    remedy: str | None
    table: str | None = None
    times: int = 1


@dataclass(frozen=True, slots=True)
class EpochStatus:
    """A durable epoch. `commit_s`: since its closing; `oldest_s`: age of its oldest change, then.

    `nbytes`: bytes sent by the source for it. None if not reported, or if there was no transaction.
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
    """Make it the newest; a repeated error is counted and takes one place."""
    times = 1
    for known in errors:
        if (known.what, known.table) == (what, table):
            times += known.times
            errors.remove(known)
            break
    errors.append(ErrorStatus(at, what, remedy, table, times))
