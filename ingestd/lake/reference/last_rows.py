"""The last row of each key, as a reference table takes it: by the fold of `ingestd.lake.fold`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingestd.lake.fold.outcomes import DELETED, KEPT, FoldedChanges, FoldKey
from ingestd.lake.fold.vectorized import fold_to_outcomes
from ingestd.model.changes import DELETE, OF_BEFORE, RESERVED_PREFIX, UPDATE, field_of

NEEDED = ("_cdc_op", "_cdc_lsn", "_cdc_seq", "_cdc_before", "_cdc_unchanged", "_cdc_raw")
"""Columns that a change row must have besides its source columns."""

Refuse = Callable[[str], Exception]
"""Creates the error for a column that can't hold a value."""


def last_rows(rows: pa.Table, key: Sequence[str], refuse: Refuse) -> pa.Table:
    """Return one row a key, as `ReferenceTableSource.poll_changes` does; no `t` may be among them.

    `rows`: the wanted columns and NEEDED, in any order. Raise the error of `refuse` if a value that
    counts is in `_cdc_raw`.
    """
    names = [n for n in rows.schema.names if not n.startswith(RESERVED_PREFIX)]
    texts = _names_in(rows["_cdc_raw"])
    for name in key:
        if not texts.isdisjoint((name, OF_BEFORE + name)):
            raise refuse(name)
    folded = fold_to_outcomes(_with_keys(rows, key, refuse), names, key, rows.num_rows * len(names))
    assert folded is not None
    outcomes = _with_bases(folded, key)
    is_deleted = outcomes[DELETED].to_numpy()
    order = np.lexsort([outcomes[name].to_numpy() for name in ("_cdc_seq", "_cdc_lsn")])
    kept = outcomes.take(pa.array(order[~is_deleted[order]]))
    gone = outcomes.select(list(key)).take(pa.array(order[is_deleted[order]]))
    texts = _names_in(kept["_cdc_raw"])
    for name in names:
        if name in texts:
            raise refuse(name)
    found = pa.concat_tables(
        [_with_operation(kept, UPDATE), _with_operation(gone, DELETE)], promote_options="default"
    )
    return found.select([*names, "_cdc_op", "_cdc_unchanged", "_cdc_before"])


def _names_in(raw: pa.ChunkedArray) -> set[str]:
    """Return the names of the values that are kept only as text."""
    found = set[str]()
    for chunk in raw.drop_null().chunks:
        first, last = chunk.offsets[0].as_py(), chunk.offsets[-1].as_py()
        found.update(pc.unique(chunk.keys.slice(first, last - first)).to_pylist())
    return found


def _with_keys(rows: pa.Table, key: Sequence[str], refuse: Refuse) -> pa.Table:
    """Return rows with complete keys, and with old rows that are only keys."""
    before = rows["_cdc_before"].combine_chunks()
    old = [field_of(before, name) for name in key]
    for name, values in zip(key, old, strict=True):
        index, own = rows.schema.get_field_index(name), rows[name].combine_chunks()
        if own.null_count:  # TOASTed and not sent, so unchanged
            own = pc.coalesce(own, values)
            if own.null_count:
                raise refuse(key[0])
            rows = rows.set_column(index, name, own)
    is_valid = np.logical_and.reduce([v.is_valid().to_numpy(zero_copy_only=False) for v in old])
    keys = pa.StructArray.from_arrays(old, names=list(key), mask=pa.array(~is_valid))
    return rows.set_column(rows.schema.get_field_index("_cdc_before"), "_cdc_before", keys)


def _with_bases(folded: FoldedChanges, key: Sequence[str]) -> pa.Table:
    """Return outcomes with the columns that did not change, and the key that a row had before."""
    rows, unchanged = folded.outcomes, folded.outcomes[KEPT]
    types = [rows.schema.field(name).type for name in key]
    bases: list[FoldKey | None] = [None] * rows.num_rows
    if folded.kept_under_old_key:
        lists = unchanged.to_pylist()
        for number, name, whose in folded.kept_under_old_key:
            lists[number], bases[number] = [*(lists[number] or ()), name], whose
        unchanged = pa.array(lists, unchanged.type)
        columns = [
            pa.array([whose and whose[n] for whose in bases], kind) for n, kind in enumerate(types)
        ]
    else:
        columns = [pa.nulls(rows.num_rows, kind) for kind in types]
    mask = pa.array([whose is None for whose in bases], pa.bool_())
    before = pa.StructArray.from_arrays(columns, names=list(key), mask=mask)
    return rows.append_column("_cdc_unchanged", unchanged).append_column("_cdc_before", before)


def _with_operation(rows: pa.Table, operation: str) -> pa.Table:
    operations = pa.array([operation], pa.string()).take(pa.array(np.zeros(rows.num_rows, np.int8)))
    return rows.append_column("_cdc_op", operations)
