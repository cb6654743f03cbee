"""The most recent epochs of a lake, kept in memory; earlier ones are re-read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spark_jobs.lake.source_lake import Epoch, SourceLake


class EpochMemory:
    """Epochs by number. Safe to use from several threads."""

    def __init__(self, lake: SourceLake) -> None:
        self._lake = lake
        self._known: dict[int, Epoch] = {}
        self._lock = threading.Lock()

    def add_epochs(self, epochs: Sequence[Epoch]) -> None:
        """Add a batch, and drop all earlier epochs except the one before it."""
        if epochs:
            last = self._known.get(epochs[0].number - 1)
            self._known = {e.number: e for e in epochs}
            if last is not None:
                self._known[last.number] = last

    def between(self, above: int, through: int) -> list[Epoch]:
        """Return the epochs above `above`, up to and including `through`."""
        self._ensure(above + 1, through)
        return [self._known[n] for n in range(above + 1, through + 1)]

    def end_lsn(self, number: int) -> int:
        """Return the end position of an epoch; 0 for epoch 0."""
        if number == 0:
            return 0
        self._ensure(number, number)
        return self._known[number].end_lsn

    def _ensure(self, first: int, last: int) -> None:
        with self._lock:
            if not all(n in self._known for n in range(first, last + 1)):
                self._known |= {e.number: e for e in self._lake.epochs(first - 1)}
