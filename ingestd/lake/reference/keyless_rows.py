"""A vectorised fold to the current rows of a table without a key (design section 2).

Each `u` and `d` contains the complete old row and removes one equal row, as in
`ingestd.lake.fold.plain`. In a server's log it always follows that row, so only the number of equal
rows counts, not their order. Rows are distinguished by a 64-bit hash of their values
(`ingestd.digests.value_hashes`) and a random number: otherwise a client could choose two rows with
the same hash.
"""

from __future__ import annotations

import secrets

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.lake.reference.definition import ReferenceDefinition
from ingestd.lake.reference.raw_changes import hashes_of
from ingestd.model.changes import DELETE, OF_BEFORE

_RAW = "_cdc_raw_name"
"""The name of a row's first column, in alphabetical order, that can't hold its value."""
_SALT = "_cdc_salt"


class KeylessRows:
    """Counts the rows of one share; they may be added in any order."""

    def __init__(self, definition: ReferenceDefinition, share: int, shares: int) -> None:
        self._definition = definition
        self._names = [c.raw for c in definition.columns]
        self._share, self._shares = share, shares
        self._salt = secrets.randbits(63)
        self._added: list[pa.Table] = []
        self._added_hashes: list[NDArray[np.uint64]] = []
        self._removed_hashes: list[NDArray[np.uint64]] = []

    def add_changes(self, rows: pa.Table) -> None:
        """Add change rows with the schema of `change_rows_schema`; no `t` may be among them."""
        rows = rows.combine_chunks()
        is_delete = pc.equal(rows["_cdc_op"], DELETE)
        has_before = rows["_cdc_before"].is_valid()
        came, hashes = self._own(rows.filter(pc.invert(is_delete)), is_new=True)
        self._added.append(came)
        self._added_hashes.append(hashes)
        for gone in (
            self._before(rows.filter(has_before)),
            rows.filter(pc.and_(is_delete, pc.invert(has_before))),
        ):
            self._removed_hashes.append(self._own(gone, is_new=False)[1])

    def rows(self) -> pa.Table:
        """Return the remaining rows, in an order that depends only on their values.

        Raise TableError if a column can't hold one of their values.
        """
        came = pa.concat_tables(self._added)
        hashes = np.concatenate(self._added_hashes)
        both = np.concatenate([hashes, *self._removed_hashes])
        _, numbers = np.unique(both, return_inverse=True)
        own = numbers[: len(hashes)]
        count = int(numbers.max(initial=-1)) + 1
        left = np.bincount(own, minlength=count) - np.bincount(
            numbers[len(hashes) :], minlength=count
        )
        order = np.argsort(own, kind="stable")
        ranked = own[order]
        rank = np.arange(len(ranked)) - np.searchsorted(ranked, ranked)
        found = came.take(pa.array(order[rank < left[ranked]]))
        refused = found[_RAW].drop_null()
        if len(refused):
            raise self._definition.refusal(refused[0].as_py())
        found = found.select(self._names)
        return found.take(pa.array(np.argsort(hashes_of(found, self._names), kind="stable")))

    def _own(self, rows: pa.Table, *, is_new: bool) -> tuple[pa.Table, NDArray[np.uint64]]:
        """Return the rows of this share with their hashes."""
        if is_new:
            rows = _filled(rows, self._names)
        raw = self._raw_names(rows)
        rows = self._definition.with_missing(rows).select(self._names).append_column(_RAW, raw)
        if self._shares > 1:
            hashes = hashes_of(rows, rows.column_names)
            rows = rows.filter(pa.array(hashes % np.uint64(self._shares) == self._share))
        salt = pa.array(np.full(len(rows), self._salt))
        keyed = rows.add_column(0, _SALT, salt)
        return rows, hashes_of(keyed, keyed.column_names)

    def _before(self, rows: pa.Table) -> pa.Table:
        """Return the old rows in the form of rows."""
        before = rows["_cdc_before"].combine_chunks()
        columns = {name: pc.struct_field(before, name) for name in self._names}
        columns["_cdc_unchanged"] = pa.nulls(len(rows), rows.schema.field("_cdc_unchanged").type)
        raw = [_of_before(texts) for texts in rows["_cdc_raw"].to_pylist()]
        columns["_cdc_lsn"] = rows["_cdc_lsn"]
        columns["_cdc_raw"] = pa.array(raw, rows.schema.field("_cdc_raw").type)
        return pa.table(columns)

    def _raw_names(self, rows: pa.Table) -> pa.Array:
        """Return for each row a column that can't hold its value; unsent values are old ones."""
        raw = rows["_cdc_raw"]
        if raw.null_count == len(raw):
            return pa.nulls(len(raw), pa.string())
        found = []
        for texts, unsent in zip(raw.to_pylist(), rows["_cdc_unchanged"].to_pylist(), strict=True):
            named = {n for n, _ in texts or ()}
            named |= {n for n in unsent or () if OF_BEFORE + n in named}
            found.append(min(named.intersection(self._names), default=None))
        return pa.array(found, pa.string())


def _of_before(texts: list[tuple[str, str]] | None) -> list[tuple[str, str]] | None:
    """Return the raw texts of the old row's values."""
    if texts is None:
        return None
    return [(n.removeprefix(OF_BEFORE), t) for n, t in texts if n.startswith(OF_BEFORE)]


def _filled(rows: pa.Table, names: list[str]) -> pa.Table:
    """Fill in values that were not sent because they did not change: the old row has them."""
    lists = rows["_cdc_unchanged"]
    if lists.null_count == len(lists):
        return rows
    lists = lists.combine_chunks()
    of, unchanged = pc.list_parent_indices(lists).to_numpy(), pc.list_flatten(lists)
    before = rows["_cdc_before"].combine_chunks()
    for name in set(unchanged.to_pylist()) & set(names):
        index = rows.schema.get_field_index(name)
        own = rows.column(index).combine_chunks()
        places = np.arange(len(rows))
        lacking = of[pc.equal(unchanged, name).to_numpy(zero_copy_only=False)]
        places[lacking] = len(rows) + lacking
        both = pa.concat_arrays([own, pc.struct_field(before, name)])
        rows = rows.set_column(index, rows.schema.field(index), both.take(pa.array(places)))
    return rows
