"""A digest of a set of rows that does not depend on their order.

Each row is hashed to 64 bits over its typed values; the digest is two sums over all rows. Different
sets almost never have the same digest. It does not protect against deliberately chosen rows, and
need not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ingestd.digests.value_hashes import mixed, row_hashes

_SECOND = np.uint64(0x8CB92BA72F3D8DD7)


@dataclass(slots=True)
class ContentDigest:
    """A digest over batches of one schema; `text` depends on the rows and the order of columns."""

    rows: int = 0
    _first: int = 0
    _second: int = 0

    def add_batch(self, batch: pa.RecordBatch) -> None:
        """Add a batch's rows."""
        hashes = row_hashes(batch.columns, batch.num_rows)
        self.rows += batch.num_rows
        second = mixed(hashes ^ _SECOND).sum(dtype=np.uint64)
        self._second = (self._second + int(second)) % 2**64
        self._first = (self._first + int(mixed(hashes).sum(dtype=np.uint64))) % 2**64

    @property
    def text(self) -> str:
        """The digest so far."""
        return f"2:{self.rows}:{self._first:016x}{self._second:016x}"
