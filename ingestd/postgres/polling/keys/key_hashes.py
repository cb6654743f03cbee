"""64-bit hashes of rows' keys: equal for equal keys, and almost always different otherwise.

Two keys of a single integer column never share a hash. For other keys,
`ingestd.digests.value_hashes` has the probability. The hashes of a process have a random salt:
otherwise a client could insert a key with the hash of another one, whose row would never be found
deleted.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from ingestd.digests.value_hashes import (
    BLOCKS,
    HashBlocks,
    Hashes,
    column_hashes,
    combined,
    text_hash,
    with_one_zero,
)
from ingestd.model.schema import Table

_SALTED = HashBlocks.salted()


def key_names(table: Table) -> list[str]:
    """Return the lake's columns of the key, in the key's order."""
    return [table.column(name).lake_name for name in table.key]


def hashed_columns(table: Table) -> list[str]:
    """Return the columns that `key_hashes` reads."""
    return [*key_names(table), "_cdc_raw"]


def key_hashes(table: Table, rows: pa.RecordBatch) -> Hashes:
    """Return the hash of the key (`Table.key`) of each row, which has the `hashed_columns`.

    It depends on the values only, whatever the width of an integer and however the arrays are
    sliced or encoded. A value that its column can't hold, and one of a nested type, is hashed by
    its text.
    """
    return combined(_by_column(table, rows, _SALTED), rows.num_rows, _SALTED)


def lasting_hashes(table: Table, rows: pa.RecordBatch) -> Hashes:
    """Return hashes that are the same in each process, of which a client may choose equal ones."""
    return combined(_by_column(table, rows, BLOCKS), rows.num_rows)


def _by_column(table: Table, rows: pa.RecordBatch, blocks: HashBlocks) -> Iterator[Hashes]:
    kept = _kept(rows)
    for name in key_names(table):
        column = _comparable(rows.column(name))
        kind = column.type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        hashes = with_one_zero(column_hashes(column, blocks), kind)
        for row, texts in kept:
            if name in texts:
                hashes[row] = text_hash(texts[name], blocks)
        yield hashes


def _comparable(column: pa.Array) -> pa.Array:
    """Return the values; texts of nested ones."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(column.indices, _comparable(column.dictionary))
    if pa.types.is_nested(kind):
        return pa.array([None if v is None else str(v) for v in column.to_pylist()], pa.string())
    return column


def _kept(rows: pa.RecordBatch) -> list[tuple[int, dict[str, str]]]:
    """Return the rows that have texts in `_cdc_raw`, with these texts."""
    raw = rows.column("_cdc_raw")
    if raw.null_count == len(raw):
        return []
    at = np.flatnonzero(raw.is_valid().to_numpy(zero_copy_only=False))
    texts = raw.take(pa.array(at)).to_pylist(maps_as_pydicts="lossy")
    return list(zip(at.tolist(), texts, strict=True))
