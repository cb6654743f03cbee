"""A reader of the changes of a raw table that are visible at a point of the source."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.lake.delta.arrow_types import plain
from ingestd.lake.delta.data_files import open_parquet
from ingestd.lake.delta.read import conform
from ingestd.lake.delta.tail import File
from ingestd.lake.schema_evolution import has_other_types
from ingestd.lake.store.store import Store
from ingestd.lake.verify.change_digests import BEFORE, UNCHANGED
from ingestd.lake.verify.columns import Event
from ingestd.model.changes import TRUNCATE
from ingestd.ports.verify import Digested, VerifyPoint

BATCH_ROWS = 1 << 16
PLACE = ("_cdc_op", "_cdc_lsn", "_cdc_seq", "_cdc_xid")
POSITION = pa.schema(
    [("_cdc_op", pa.string()), *((name, pa.int64()) for name in PLACE if name != "_cdc_op")]
)
"""These columns, with the types that each raw table has."""


@dataclass(frozen=True, slots=True)
class PinnedChanges:
    """A table's pinned raw files, the events of `_tables` at that time, and which rows count.

    `schema`: the raw table's.
    """

    store: Store
    folder: str
    files: Sequence[File]
    schema: pa.Schema
    events: Sequence[Event]
    point: VerifyPoint
    void: tuple[int, int]


def least_lsn(file: File) -> int:
    """Return the lowest `_cdc_lsn` of a file; -1 if unknown."""
    found = file[1].get("minValues", {}).get("_cdc_lsn")
    return -1 if found is None else int(found)


def names_of(digested: Digested, numbers: Collection[int]) -> tuple[str, ...]:
    """Return the lake columns needed for these columns and for the changes themselves."""
    own = (n for i in numbers for n in digested.columns[i].stored)
    return (*own, *PLACE, BEFORE, UNCHANGED, "_cdc_raw")


def batches_of(pinned: PinnedChanges, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the visible rows above the newest `t`, with those of the columns that exist.

    Raise DamagedError if a file's column has a type whose values the table's type can't hold.
    """
    for path, statistics in pinned.files:
        high = statistics.get("maxValues", {}).get("_cdc_lsn")
        if high is not None and high < pinned.void[0]:
            continue
        where = f"{pinned.folder}/{path}"
        with open_parquet(pinned.store, where) as file:
            present = [n for n in dict.fromkeys(names) if n in file.schema.names]
            for batch in file.batches(present, most_rows=BATCH_ROWS):
                yield _seen(_typed(plain(batch), pinned.schema), pinned)


def _typed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch with the table's types if another engine wrote different ones."""
    wanted = pa.schema(
        [schema.field(f.name) if f.name in schema.names else f for f in batch.schema]
    )
    if not has_other_types(batch.schema, wanted):
        return batch
    rows = conform(pa.Table.from_batches([batch]), wanted).combine_chunks()
    return pa.RecordBatch.from_arrays([c.combine_chunks() for c in rows.columns], schema=wanted)


def _seen(batch: pa.RecordBatch, pinned: PinnedChanges) -> pa.RecordBatch:
    lsn: NDArray[np.int64] = batch.column("_cdc_lsn").to_numpy()
    xids: Any = batch.column("_cdc_xid")
    seq: NDArray[np.int64] = batch.column("_cdc_seq").to_numpy()
    flags = pinned.point.sees(lsn, seq, pc.fill_null(xids, -1).to_numpy())
    if pinned.void[0] >= 0:
        at, number = pinned.void
        flags &= (lsn > at) | ((lsn == at) & (seq > number))
    return batch if flags.all() else batch.filter(pa.array(flags))


def counting(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Leave out the `t` rows, which were handled before."""
    is_row = pc.not_equal(batch.column("_cdc_op"), TRUNCATE)
    return batch if pc.all(is_row).as_py() is not False else batch.filter(is_row)
