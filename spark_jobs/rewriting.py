"""A mirror's rows with outcomes applied, in memory: what a MERGE does, by Arrow. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from spark_jobs.folding import DELETED, KEPT, keys_of

_RAW = "_cdc_raw"
_MAX_HASHED = 200_000
"""So many keys are compared in Python at most."""


def rewritten(old: pa.Table, outcomes: pa.Table, key: Sequence[str]) -> pa.Table | None:
    """Give a mirror's rows after these outcomes (see `spark_jobs.folding.Folded.outcomes`).

    `old`: the rows before, with `_cdc_raw` and their position; the result has its schema. Of two
    rows of one key the one of the higher position stays. A column that outcomes do not have is null
    in rows that they change. None: too many rows to be compared here.
    """
    match = _matches(old, outcomes, key)
    if match is None:
        return None
    is_matched = match >= 0
    places = np.flatnonzero(is_matched)
    newest = match[places]
    is_later = _is_later(outcomes, newest, old, places)
    places, newest = places[is_later], newest[is_later]
    is_deleted = _mask(outcomes[DELETED])
    stays = np.ones(old.num_rows, bool)
    stays[places] = False
    is_new = ~is_deleted
    is_new[match[is_matched]] = False
    changed = ~is_deleted[newest]
    merged = _merged(old, places[changed], outcomes.take(newest[changed]))
    added = shaped(outcomes.filter(pa.array(is_new)), old.schema)
    return pa.concat_tables([old.filter(pa.array(stays)), merged, added])


def shaped(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Give rows with the columns of `schema`, in its order: null where there is none."""
    there = set(rows.column_names)
    return pa.table(
        [
            rows[f.name].cast(f.type) if f.name in there else pa.nulls(rows.num_rows, f.type)
            for f in schema
        ],
        schema=schema,
    )


def _matches(old: pa.Table, outcomes: pa.Table, key: Sequence[str]) -> NDArray[np.int64] | None:
    """Give the number of each row's outcome, -1 without one."""
    if len(key) == 1 and _is_plain(old, key[0]) and _is_plain(outcomes, key[0]):
        wanted = outcomes[key[0]].combine_chunks()
        found = pc.index_in(old[key[0]].cast(wanted.type), value_set=wanted, skip_nulls=True)
        return np.asarray(pc.fill_null(found, -1).to_numpy(), np.int64)
    if old.num_rows > _MAX_HASHED:
        return None
    numbers = {own: n for n, own in enumerate(keys_of(outcomes, key))}
    return np.fromiter((numbers.get(own, -1) for own in keys_of(old, key)), np.int64, old.num_rows)


def _is_plain(rows: pa.Table, name: str) -> bool:
    """Whether values are equal where Arrow says so, and all there is of a key."""
    kind = rows.schema.field(name).type
    is_simple: bool = (
        pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_date(kind)
    )
    has_texts: bool = rows[_RAW].null_count < rows.num_rows
    return is_simple and not has_texts


def _is_later(
    outcomes: pa.Table, newest: NDArray[np.int64], old: pa.Table, places: NDArray[np.int64]
) -> NDArray[np.bool_]:
    lsn, seq = (outcomes[name].to_numpy()[newest] for name in ("_cdc_lsn", "_cdc_seq"))
    old_lsn, old_seq = (old[name].to_numpy()[places] for name in ("_cdc_lsn", "_cdc_seq"))
    is_later: NDArray[np.bool_] = (lsn > old_lsn) | ((lsn == old_lsn) & (seq > old_seq))
    return is_later


def _merged(old: pa.Table, places: NDArray[np.int64], outcomes: pa.Table) -> pa.Table:
    """Give outcomes with the values that they keep of the rows at `places`, which they replace."""
    rows = shaped(outcomes, old.schema)
    kept = outcomes[KEPT].combine_chunks()
    names = pc.unique(pc.list_flatten(kept)).to_pylist()
    if not names:
        return rows
    before = old.take(places)
    parents = pc.list_parent_indices(kept).to_numpy()
    values = pc.list_flatten(kept)
    for name in names:
        index = rows.schema.get_field_index(name)
        if index < 0:
            continue
        is_kept = np.zeros(rows.num_rows, bool)
        is_kept[parents[_mask(pc.equal(values, name))]] = True
        chosen = pc.if_else(pa.array(is_kept), before[name], rows[name])
        rows = rows.set_column(index, rows.schema.field(index), chosen)
    if before[_RAW].null_count == before.num_rows:
        return rows
    texts = _with_kept_texts(rows[_RAW], before[_RAW], kept)
    return rows.set_column(rows.schema.get_field_index(_RAW), rows.schema.field(_RAW), texts)


def _with_kept_texts(own: pa.ChunkedArray, before: pa.ChunkedArray, kept: pa.Array) -> pa.Array:
    """Give `_cdc_raw`: a value that is kept has its text, if it had one."""
    texts = []
    pairs = zip(own.to_pylist(), before.to_pylist(), kept.to_pylist(), strict=True)
    for mine, earlier, names in pairs:
        found = dict(mine or ())
        found |= {name: text for name, text in earlier or () if name in (names or ())}
        texts.append(sorted(found.items()) or None)
    return pa.array(texts, own.type)


def _mask(values: pa.ChunkedArray | pa.Array) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = values.to_numpy(zero_copy_only=False).astype(bool)
    return found
