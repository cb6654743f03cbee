"""A vectorised fold to the current rows of a table without a key (design section 2).

Each `u` and `d` contains the complete old row and removes one equal row, as in
`ingestd.lake.fold.plain`. In a server's log it always follows that row, so only the number of equal
rows counts, not their order. Rows are distinguished by a 64-bit hash of their values
(`ingestd.digests.value_hashes`) with a random salt: otherwise a client could choose two rows with
the same hash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.digests.value_hashes import HashBlocks, Hashes, row_hashes
from ingestd.lake.fold.raw_texts import TextEntries
from ingestd.model.changes import DELETE, OF_BEFORE, field_of

RAW = "_cdc_raw"
Fill = Callable[[pa.Table], pa.Table]
"""Fills in the values of columns that are newer than some rows (by `_cdc_lsn`)."""


def _as_they_are(rows: pa.Table) -> pa.Table:
    return rows


@dataclass(frozen=True, slots=True)
class MultisetRows:
    """Which rows changes add and remove. `names`: of all columns; `fill`: see `Fill`.

    Change rows have these columns, `_cdc_op`, `_cdc_lsn`, `_cdc_before`, `_cdc_unchanged` and
    `_cdc_raw`. No `t` may be among them.
    """

    names: Sequence[str]
    fill: Fill = _as_they_are
    blocks: HashBlocks = field(default_factory=HashBlocks.salted)

    def added(self, changes: pa.Table) -> pa.Table:
        """Return the rows that changes add: these columns, and the texts of values in RAW."""
        rows = changes.filter(pc.not_equal(changes["_cdc_op"], DELETE)).combine_chunks()
        return self._complete(_with_unsent(rows, self.names))

    def removed(self, changes: pa.Table) -> pa.Table:
        """Return the rows that changes remove, in the same form."""
        has_before = changes["_cdc_before"].is_valid()
        is_delete = pc.equal(changes["_cdc_op"], DELETE)
        old = self._complete(_old_rows(changes.filter(has_before).combine_chunks(), self.names))
        deleted = changes.filter(pc.and_(is_delete, pc.invert(has_before))).combine_chunks()
        return pa.concat_tables([old, self._complete(_with_own_texts(deleted, self.names))])

    def hashes(self, rows: pa.Table) -> Hashes:
        """Return a number for each row in that form: equal rows have equal numbers."""
        batches = rows.to_batches()
        found = (row_hashes(batch.columns, len(batch), self.blocks) for batch in batches)
        return np.concatenate([np.empty(0, np.uint64), *found])

    def _complete(self, rows: pa.Table) -> pa.Table:
        return self.fill(rows).select([*self.names, RAW])


def remaining(added: Hashes, removed: Hashes) -> NDArray[np.int64]:
    """Return the indices of the added rows that are left, by the numbers of rows."""
    _, numbers = np.unique(np.concatenate([added, removed]), return_inverse=True)
    own = numbers[: len(added)]
    count = int(numbers.max(initial=-1)) + 1
    left = np.bincount(own, minlength=count)
    left -= np.bincount(numbers[len(added) :], minlength=count)
    order = np.argsort(own, kind="stable")
    ranked = own[order]
    rank = np.arange(len(ranked)) - np.searchsorted(ranked, ranked)
    found: NDArray[np.int64] = order[rank < left[ranked]]
    return found


def _old_rows(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    before = rows["_cdc_before"].combine_chunks()
    texts = TextEntries.from_column(rows[RAW].combine_chunks()).renamed(_of_before(names))
    columns = {name: field_of(before, name) for name in names}
    columns["_cdc_lsn"] = rows["_cdc_lsn"]
    return pa.table({**columns, RAW: texts.to_column(len(rows))})


def _with_own_texts(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    texts = TextEntries.from_column(rows[RAW].combine_chunks())
    own = texts.renamed(lambda name: name if name in names else None)
    return _with(rows, RAW, own.to_column(len(rows)))


def _with_unsent(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    """Fill in values that were not sent because they did not change: the old row has them."""
    lists = rows["_cdc_unchanged"]
    if lists.null_count == len(lists):
        return _with_own_texts(rows, names)
    lists = lists.combine_chunks()
    of, unchanged = pc.list_parent_indices(lists).to_numpy(), pc.list_flatten(lists)
    before = rows["_cdc_before"].combine_chunks()
    texts = TextEntries.from_column(rows[RAW].combine_chunks())
    own = texts.renamed(lambda name: name if name in names else None)
    old = texts.renamed(_of_before(names))
    for name in set(unchanged.to_pylist()) & set(names):
        lacking = of[pc.equal(unchanged, name).to_numpy(zero_copy_only=False)]
        places = np.arange(len(rows))
        places[lacking] = len(rows) + lacking
        both = pa.concat_arrays([rows[name].combine_chunks(), field_of(before, name)])
        rows = _with(rows, name, both.take(pa.array(places)))
        is_named = pc.equal(old.names, name).to_numpy(zero_copy_only=False)
        taken = old.of(is_named & np.isin(old.rows, lacking))
        texts_by_row = dict(zip(taken.rows.tolist(), taken.texts.to_pylist(), strict=True))
        own = own.with_more(name, texts_by_row)
    return _with(rows, RAW, own.to_column(len(rows)))


def _of_before(names: Sequence[str]) -> Callable[[str], str | None]:
    known = {OF_BEFORE + name: name for name in names}
    return known.get


def _with(rows: pa.Table, name: str, values: pa.Array) -> pa.Table:
    index = rows.schema.get_field_index(name)
    return rows.set_column(index, pa.field(name, values.type), values)
