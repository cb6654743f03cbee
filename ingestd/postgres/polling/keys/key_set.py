"""The keys that the lake holds of a table: 8 bytes per key."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.digests.value_hashes import Hashes
from ingestd.model.changes import DELETE, TRUNCATE, TableBatch
from ingestd.model.schema import Table
from ingestd.ports import ChangeLog
from ingestd.postgres.polling.keys import sorted_hashes
from ingestd.postgres.polling.keys.key_hashes import key_hashes
from ingestd.postgres.polling.keys.lake_keys import LEAST_BYTES, keys_held

_NONE: Hashes = np.empty(0, np.uint64)


class KeySet:
    """The sorted hashes of the keys; and the keys added and removed since the last merge.

    Two keys may have one hash in principle: see `ingestd.digests.value_hashes`. A key's column may
    be renamed meanwhile: each batch is read by its own names. May be used from several threads.
    `few`: the number of keys collected before they are merged; with more keys, a quarter of them.
    """

    def __init__(self, hashes: Hashes | None = None, *, few: int = 1 << 18) -> None:
        self._few = few
        self._hashes = np.empty(0, np.uint64) if hashes is None else hashes
        self._recent: list[Hashes] = []
        """Added keys, in any order, perhaps twice."""
        self._added = _NONE
        """Other added keys, sorted."""
        self._removed = _NONE
        """Removed keys of `_hashes`, sorted."""
        self._lock = threading.Lock()
        self._still = 0

    @classmethod
    async def load(
        cls, log: ChangeLog, table: Table, *, limit_bytes: int, least_bytes: int = LEAST_BYTES
    ) -> Self | None:
        """Return the keys that the lake holds as of its last epoch; None if they exceed the limit.

        Changes that were delivered and are not durable yet must be taken afterwards. Raises
        TransientError, OperatorError.
        """
        hashes = await keys_held(log, table, limit_bytes, least_bytes=least_bytes)
        return None if hashes is None else cls(hashes)

    @property
    def nbytes(self) -> int:
        """The memory that it takes, in bytes."""
        return sum(h.nbytes for h in (self._hashes, self._added, self._removed, *self._recent))

    def __len__(self) -> int:
        with self._lock:
            self._settle()
            return len(self._hashes) + len(self._added) - len(self._removed)

    def apply_changes(self, batch: TableBatch) -> None:
        """Record change rows; they must follow the earlier ones in the order of their positions."""
        rows = batch.rows
        ops = rows.column("_cdc_op")
        first = _after_last(ops, TRUNCATE)
        if first:
            rows = rows.slice(first)
            ops = rows.column("_cdc_op")
        hashes = key_hashes(batch.table, rows)
        comes = pc.not_equal(ops, DELETE).to_numpy(zero_copy_only=False)
        with self._lock:
            if first:
                self._clear()
            if not comes.all():
                # A key's last row counts: the first one from the end.
                hashes, at = np.unique(hashes[::-1], return_index=True)
                comes = comes[::-1][at]
                self._settle()
                self._remove(hashes[~comes])
            self._recent.append(hashes[comes])
            if sum(map(len, self._recent)) > max(self._few, len(self._hashes) // 4):
                self._settle()
            if len(self._added) + len(self._removed) > max(self._few, len(self._hashes) // 4):
                self._merge()

    def contains(self, batch: TableBatch) -> NDArray[np.bool_]:
        """Return, for each of these rows, whether its key is held."""
        return self.holds(key_hashes(batch.table, batch.rows))

    def holds(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Return, for each of these hashes, whether its key is held."""
        with self._lock:
            self._settle()
            _, found = sorted_hashes.find(self._hashes, hashes)
            if len(self._removed):
                found &= ~sorted_hashes.find(self._removed, hashes)[1]
            if len(self._added):
                found |= sorted_hashes.find(self._added, hashes)[1]
            return found

    @contextmanager
    def still(self) -> Iterator[Hashes]:
        """Yield the sorted hashes of most keys, which do not change inside the context.

        Keys added since the last merge are not among them; some may have been removed (`holds`).
        """
        with self._lock:
            self._settle()
            if not self._still:
                self._merge()
            self._still += 1
        try:
            yield self._hashes
        finally:
            with self._lock:
                self._still -= 1

    # --- inside, under the lock --------------------------------------------------------------

    def _clear(self) -> None:
        # Not emptied in place: a sweep may be reading it.
        self._hashes = np.empty(0, np.uint64)
        self._recent, self._added, self._removed = [], _NONE, _NONE

    def _remove(self, hashes: Hashes) -> None:
        self._added = sorted_hashes.without(self._added, hashes)
        _, is_there = sorted_hashes.find_sorted(self._hashes, hashes)
        self._removed = sorted_hashes.joined(self._removed, hashes[is_there])

    def _settle(self) -> None:
        if not self._recent:
            return
        came = sorted_hashes.joined(*self._recent)
        self._recent = []
        _, is_there = sorted_hashes.find_sorted(self._hashes, came)
        if len(self._removed):
            self._removed = sorted_hashes.without(self._removed, came[is_there])
        self._added = sorted_hashes.joined(self._added, came[~is_there])

    def _merge(self) -> None:
        if self._still:
            return
        added, removed = self._added, self._removed
        self._added, self._removed = _NONE, _NONE
        if len(removed):
            sorted_hashes.remove(self._hashes, removed)
        if len(added):
            sorted_hashes.add(self._hashes, added)


def _after_last(ops: pa.Array, op: str) -> int:
    """Return the index of the row after the last one with this op, 0 if there is none."""
    found = np.flatnonzero(pc.equal(ops, op).to_numpy(zero_copy_only=False))
    return int(found[-1]) + 1 if len(found) else 0
