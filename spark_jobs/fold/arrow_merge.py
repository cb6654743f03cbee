"""A MERGE of outcomes into a mirror's rows, in memory, by Arrow. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.lake.fold.outcomes import DELETED, KEPT, keys_of
from ingestd.lake.fold.row_keys import RowKeys, are_compared

_RAW = "_cdc_raw"
MAX_HASHED = 200_000
"""The greatest number of rows whose keys are compared in Python."""
GONE = -1

_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Merge:
    """The result of applying outcomes to rows.

    `row_numbers`: of the old rows that change or are removed, ascending. `replacements`: for each,
    the number of the row in `rows` that replaces it, or GONE. The rows in `rows` from number
    `added` on are new.
    """

    row_numbers: _Ints
    replacements: _Ints
    rows: pa.Table
    added: int

    def applied(self, old: pa.Table, first: int) -> pa.Table:
        """Return `old` with the merge applied. `first`: the number of its first row.

        It has the columns of `rows`.
        """
        mine = slice(*np.searchsorted(self.row_numbers, [first, first + old.num_rows]))
        row_numbers, replacements = self.row_numbers[mine] - first, self.replacements[mine]
        if not len(row_numbers):
            return old
        stays = replacements != GONE
        few = slice(*replacements[stays][[0, -1]]) if stays.any() else slice(0, 0)
        chosen = np.arange(old.num_rows)
        chosen[row_numbers] = np.where(stays, replacements - few.start + old.num_rows, GONE)
        changed = self.rows.slice(few.start, few.stop + 1 - few.start)
        both = pa.concat_tables([old, changed]).combine_chunks()
        return both.take(pa.array(chosen[chosen != GONE]))


def merge(old: pa.Table, outcomes: pa.Table, key: Sequence[str], schema: pa.Schema) -> Merge | None:
    """Return the merge of outcomes (see `ingestd.lake.fold.outcomes.FoldedChanges`) into rows.

    `old`: the present rows, with at least the key, the position, `_cdc_raw` and the columns that
    outcomes keep; `schema`: the mirror's. Of two rows of a key, the one with the higher position
    wins. A column that the outcomes lack becomes null in changed rows. Returns None if there are
    too many rows to compare here.
    """
    match = _matches(old, outcomes, key)
    if match is None:
        return None
    is_matched = match >= 0
    row_numbers = np.flatnonzero(is_matched)
    newest = match[row_numbers]
    is_later = _is_later(outcomes, newest, old, row_numbers)
    row_numbers, newest = row_numbers[is_later], newest[is_later]
    is_deleted = np.asarray(outcomes[DELETED].to_numpy(), bool)
    is_new = ~is_deleted
    is_new[match[is_matched]] = False
    is_gone = is_deleted[newest]
    changed = _merged(old, row_numbers[~is_gone], outcomes.take(pa.array(newest[~is_gone])), schema)
    replacements = np.full(len(row_numbers), GONE)
    replacements[~is_gone] = np.arange(changed.num_rows)
    added = shaped(outcomes.filter(pa.array(is_new)), schema)
    return Merge(row_numbers, replacements, pa.concat_tables([changed, added]), changed.num_rows)


def shaped(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return rows with the columns of `schema`, in its order; missing ones are null."""
    there = set(rows.column_names)
    return pa.table(
        [
            rows[f.name].cast(f.type) if f.name in there else pa.nulls(rows.num_rows, f.type)
            for f in schema
        ],
        schema=schema,
    )


def _matches(old: pa.Table, outcomes: pa.Table, key: Sequence[str]) -> _Ints | None:
    """Return the number of each row's outcome; -1 without one."""
    if not old.num_rows:
        return np.empty(0, np.int64)
    has_null = any(outcomes[name].null_count for name in key)
    if not has_null and are_compared(old, key) and are_compared(outcomes, key):
        keys = RowKeys([outcomes[name] for name in key])
        number = np.full(keys.count + 1, -1, np.int64)  # (the last is that of an unknown key)
        number[keys.numbers] = np.arange(outcomes.num_rows)
        return number[keys.find([old[name] for name in key])]
    if old.num_rows > MAX_HASHED:
        return None
    numbers = {own: n for n, own in enumerate(keys_of(outcomes, key))}
    return np.fromiter((numbers.get(own, -1) for own in keys_of(old, key)), np.int64, old.num_rows)


def _is_later(
    outcomes: pa.Table, newest: _Ints, old: pa.Table, row_numbers: _Ints
) -> NDArray[np.bool_]:
    lsn, seq = (outcomes[name].to_numpy()[newest] for name in ("_cdc_lsn", "_cdc_seq"))
    old_lsn, old_seq = (old[name].to_numpy()[row_numbers] for name in ("_cdc_lsn", "_cdc_seq"))
    is_later: NDArray[np.bool_] = (lsn > old_lsn) | ((lsn == old_lsn) & (seq > old_seq))
    return is_later


def _merged(old: pa.Table, row_numbers: _Ints, outcomes: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return outcomes, with the values that they keep from the rows at `row_numbers`."""
    rows = shaped(outcomes, schema)
    kept = outcomes[KEPT].combine_chunks()
    values = pc.list_flatten(kept)
    names = pc.unique(values).to_pylist()
    if not names:
        return rows
    before = old.select([_RAW, *(n for n in names if n in schema.names)]).take(
        pa.array(row_numbers)
    )
    parents = pc.list_parent_indices(kept).to_numpy()
    for name in before.column_names[1:]:
        index = schema.get_field_index(name)
        is_kept = np.zeros(rows.num_rows, bool)
        is_kept[parents[np.asarray(pc.equal(values, name).to_numpy(zero_copy_only=False))]] = True
        chosen = pc.if_else(pa.array(is_kept), before[name].cast(schema.types[index]), rows[name])
        rows = rows.set_column(index, schema.field(index), chosen)
    if before[_RAW].null_count == before.num_rows:
        return rows
    texts = _with_kept_texts(rows[_RAW], before[_RAW], kept)
    return rows.set_column(schema.get_field_index(_RAW), schema.field(_RAW), texts)


def _with_kept_texts(own: pa.ChunkedArray, before: pa.ChunkedArray, kept: pa.Array) -> pa.Array:
    """Return `_cdc_raw` in which each kept value has its earlier text, if any."""
    texts = []
    pairs = zip(own.to_pylist(), before.to_pylist(), kept.to_pylist(), strict=True)
    for mine, earlier, names in pairs:
        found = dict(mine or ())
        found |= {name: text for name, text in earlier or () if name in (names or ())}
        texts.append(sorted(found.items()) or None)
    return pa.array(texts, own.type)
