"""A reader of raw table rows for folding: by file, epoch, position and share of the keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.digests.row_digests import key_digests
from ingestd.digests.value_hashes import BLOCKS, HashBlocks, Hashes, column_hashes, row_hashes
from ingestd.lake.delta.arrow_types import plain
from ingestd.lake.delta.data_files import DataFileReader, open_parquet
from ingestd.lake.delta.log import TableLog
from ingestd.lake.delta.read import conform
from ingestd.lake.delta.tail import File
from ingestd.lake.reference.definition import ReferenceDefinition
from ingestd.lake.reference.last_rows import NEEDED

KeepGroup = Callable[[DataFileReader, int], bool]
"""Decides whether to read a row group of a file, by its number."""
Position = tuple[int, int]
"""`_cdc_lsn` and `_cdc_seq`."""

POSITION = pa.schema([("_cdc_op", pa.string()), ("_cdc_lsn", pa.int64()), ("_cdc_seq", pa.int64())])
"""Columns with a row's position and operation."""


def read_changes(
    raw: TableLog,
    file: File,
    schema: pa.Schema,
    epoch: int,
    above: Position | None = None,
    *,
    after: int = 0,
    keep: KeepGroup | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows of epochs above `after` up to `epoch`, at positions above `above`.

    In batches, with the columns of `schema`. `keep`: which row groups are read; None: all.
    """
    path, statistics = file
    first, last = epochs_of(statistics)
    if first > epoch or last <= after:
        return
    if above is not None and statistics.get("maxValues", {}).get("_cdc_lsn", above[0]) < above[0]:
        return
    where = f"{raw.folder}/{path}"
    with open_parquet(raw.store, where) as parquet:
        names = [n for n in [*schema.names, "_cdc_epoch"] if n in parquet.schema.names]
        groups = range(parquet.num_row_groups)
        chosen = [group for group in groups if keep is None or keep(parquet, group)]
        for batch in chain.from_iterable(parquet.batches(names, group) for group in chosen):
            rows = plain(pa.Table.from_batches([batch]))
            if first <= after or last > epoch:
                number = rows["_cdc_epoch"]
                rows = rows.filter(pc.and_(pc.greater(number, after), pc.less_equal(number, epoch)))
            found = conform(rows, schema)
            if above is not None:
                lsn, seq = found["_cdc_lsn"], found["_cdc_seq"]
                same = pc.and_(pc.equal(lsn, above[0]), pc.greater(seq, above[1]))
                found = found.filter(pc.or_(pc.greater(lsn, above[0]), same))
            yield found


def change_rows_schema(definition: ReferenceDefinition, columns: Sequence[str]) -> pa.Schema:
    """Return the schema of change rows: these columns of the raw table, and those a fold needs.

    Without a key, `_cdc_before` has all columns.
    """
    types = {c.raw: c.type for c in definition.columns}
    before = pa.struct([(n, types[n]) for n in definition.key or types])
    kinds = {
        **{f.name: f.type for f in POSITION},
        "_cdc_before": before,
        "_cdc_unchanged": pa.list_(pa.field("element", pa.string())),
        "_cdc_raw": pa.map_(pa.string(), pa.string()),
    }
    own = [(n, types[n]) for n in columns]
    return pa.schema([*own, *((n, kinds[n]) for n in NEEDED)])


def highest(rows: pa.Table) -> Position:
    """Return the highest position of rows; requires at least one row."""
    lsn = int(pc.max(rows["_cdc_lsn"]).as_py())
    own = rows.filter(pc.equal(rows["_cdc_lsn"], lsn))
    return lsn, int(pc.max(own["_cdc_seq"]).as_py())


def epochs_of(statistics: Mapping[str, Any]) -> tuple[int, int]:
    """Return the first and the last epoch that a file may contain."""
    low = statistics.get("minValues", {}).get("_cdc_epoch")
    high = statistics.get("maxValues", {}).get("_cdc_epoch")
    return (0 if low is None else low), (1 << 62 if high is None else high)


def key_hashes(rows: pa.Table, key: Sequence[str], blocks: HashBlocks = BLOCKS) -> Hashes:
    """Return a hash of each row's key."""
    return _joined(
        key_digests(
            ((column_hashes(c, blocks), c.type) for c in batch.columns), batch.num_rows, blocks
        )
        for batch in rows.select(list(key)).to_batches()
    )


def hashes_of(rows: pa.Table, names: Sequence[str]) -> Hashes:
    """Return a hash of each row's values."""
    batches = rows.select(list(names)).to_batches()
    return _joined(row_hashes(batch.columns, batch.num_rows) for batch in batches)


def _joined(hashes: Iterable[Hashes]) -> Hashes:
    return np.concatenate([np.empty(0, np.uint64), *hashes])


def is_in_share(
    rows: pa.Table,
    key: Sequence[str],
    share: int,
    shares: int,
    linked: Hashes | None,
) -> NDArray[np.bool_]:
    """Return for each row whether its key is in a share; those in `linked` are in the first."""
    if shares == 1:
        return np.ones(rows.num_rows, np.bool_)
    hashes = key_hashes(rows, key)
    own = (hashes % np.uint64(shares)).astype(np.int64)
    if linked is not None and len(linked):
        own[np.isin(hashes, linked)] = 0
    found: NDArray[np.bool_] = own == share
    return found
