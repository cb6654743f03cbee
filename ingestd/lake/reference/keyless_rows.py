"""The current rows of a table without a key, as a reference table takes them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ingestd.digests.value_hashes import BLOCKS, HashBlocks, Hashes
from ingestd.lake.fold.multiset import RAW, MultisetRows, remaining
from ingestd.lake.reference.definition import ReferenceDefinition
from ingestd.lake.reference.raw_changes import hashes_of, share_of


class KeylessRows:
    """Counts the rows of one share; they may be added in any order.

    `blocks`: of the hashes that determine the share.
    """

    def __init__(
        self,
        definition: ReferenceDefinition,
        share: int,
        shares: int,
        blocks: HashBlocks = BLOCKS,
    ) -> None:
        self._blocks = blocks
        self._definition = definition
        self._names = [c.raw for c in definition.columns]
        self._share, self._shares = share, shares
        self._rows = MultisetRows(self._names, definition.with_missing)
        self._added: list[pa.Table] = []
        self._added_hashes: list[Hashes] = []
        self._removed_hashes: list[Hashes] = [np.empty(0, np.uint64)]

    def add_changes(self, rows: pa.Table) -> None:
        """Add change rows with the schema of `change_rows_schema`; no `t` may be among them."""
        added = self._own(self._rows.added(rows))
        self._added.append(added)
        self._added_hashes.append(self._rows.hashes(added))
        self._removed_hashes.append(self._rows.hashes(self._own(self._rows.removed(rows))))

    def rows(self) -> pa.Table:
        """Return the remaining rows, in an order that depends only on their values.

        Raise TableError if a column can't hold one of their values.
        """
        left = remaining(np.concatenate(self._added_hashes), np.concatenate(self._removed_hashes))
        found = pa.concat_tables(self._added).take(pa.array(left))
        refused = found[RAW].drop_null()
        if len(refused):
            raise self._definition.refusal(refused[0].as_py()[0][0])
        found = found.select(self._names)
        return found.take(pa.array(np.argsort(hashes_of(found, self._names), kind="stable")))

    def _own(self, rows: pa.Table) -> pa.Table:
        """Return the rows of this share."""
        if self._shares == 1:
            return rows
        hashes = hashes_of(rows, rows.column_names, self._blocks)
        return rows.filter(pa.array(share_of(hashes, self._shares) == self._share))
