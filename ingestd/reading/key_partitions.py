"""Rows by hash of their key: in memory, or in one file per partition."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.digests.value_hashes import BLOCKS, HashBlocks, Hashes
from ingestd.lake.fold.raw_texts import TextEntries
from ingestd.lake.fold.row_keys import RowKeys, are_compared
from ingestd.lake.reference.raw_changes import key_hashes, share_of
from ingestd.model.changes import DELETE, OF_BEFORE
from ingestd.reading.raw_files import changes_key, old_keys

MEMORY_BYTES = 256 << 20
"""Arrow bytes that a read holds at most, unless the rows of one partition need more."""
_HELD_SHARE = 4
"""The share of it that is collected before it is written, and that a partition is to have."""
_ROW_BYTES = 128
"""Bytes that a fold needs for a row besides its values: numbers of keys, and positions."""
_MOST_PARTITIONS = 512

_LARGE = 2
"""A partition of so many times the intended bytes is reduced while it is read."""

Reduced = Callable[[pa.Table], pa.Table]
WithHashes = Callable[[pa.Table], tuple[pa.Table, Hashes]]
"""Returns the rows to be stored for some rows, and the hash that determines the partition."""


class KeyPartitions:
    """Stores rows by partition; each partition is read once.

    `reduced`: returns the rows of a partition without those that can't matter; called for a
    partition that is larger than it should be, such as one row with many versions. `expected_rows`:
    about how many are added. `folder`: where a temporary folder is created; None: the system's.
    """

    def __init__(
        self,
        schema: pa.Schema,
        with_hashes: WithHashes,
        reduced: Reduced,
        *,
        expected_rows: int,
        memory_bytes: int = MEMORY_BYTES,
        folder: str | None = None,
    ) -> None:
        self._schema = schema
        self._with_hashes = with_hashes
        self._reduced = reduced
        self._expected_rows = expected_rows
        self._limit_bytes = max(1, memory_bytes // _HELD_SHARE)
        self._parent = folder
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._held: list[pa.Table] = []
        self._held_bytes = self._held_rows = 0
        self._files: list[pa.RecordBatchFileWriter] = []

    def add_rows(self, rows: pa.Table) -> None:
        """Store rows with the schema."""
        if not rows.num_rows:
            return
        self._held.append(rows)
        self._held_rows += rows.num_rows
        self._held_bytes += rows.nbytes + _ROW_BYTES * rows.num_rows
        if self._held_bytes > self._limit_bytes:
            self._spill()

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows of each partition that has any. No rows can be added after that."""
        if self._folder is None:
            held, self._held = self._held, []
            if held:
                yield pa.concat_tables(held)
            return
        self._spill()
        for writer in self._files:
            writer.close()
        for number in range(len(self._files)):
            rows = self._read(Path(self._path(number)))
            if rows.num_rows:
                yield rows

    def _read(self, path: Path) -> pa.Table:
        """Return the rows in a file, and remove it."""
        is_large = path.stat().st_size > _LARGE * self._limit_bytes
        found = self._schema.empty_table()
        with pa.OSFile(str(path)) as source:
            reader = pa.ipc.open_stream(source)
            if not is_large:
                found = reader.read_all()
            for batch in reader:
                found = self._reduced(pa.concat_tables([found, pa.Table.from_batches([batch])]))
        path.unlink()
        return found

    def close(self) -> None:
        """Remove the files. Idempotent."""
        self._held = []
        if self._folder is not None:
            for writer in self._files:
                writer.close()
            self._folder.cleanup()

    def _path(self, number: int) -> str:
        assert self._folder is not None
        return f"{self._folder.name}/{number}.arrow"

    def _spill(self) -> None:
        if not self._held:
            return
        if self._folder is None:
            self._create_files()
        rows, hashes = self._with_hashes(pa.concat_tables(self._held))
        self._held, self._held_bytes, self._held_rows = [], 0, 0
        count = len(self._files)
        parts = share_of(hashes, count)
        order = np.argsort(parts, kind="stable")
        ends = np.cumsum(np.bincount(parts, minlength=count))
        rows = rows.take(pa.array(order)).combine_chunks()
        for number, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if end > first:
                self._files[number].write_table(rows.slice(first, end - first))

    def _create_files(self) -> None:
        each = self._held_bytes / self._held_rows
        wanted = each * max(self._expected_rows, self._held_rows) / self._limit_bytes
        count = min(max(2, int(np.ceil(wanted))), _MOST_PARTITIONS)
        self._folder = tempfile.TemporaryDirectory(prefix="ingestd-", dir=self._parent)
        for number in range(count):
            self._files.append(pa.ipc.new_stream(self._path(number), self._schema))


class PartitionHashes:
    """`WithHashes` of change rows: a partition has all rows that the fold of its keys needs.

    `links`: pairs of hashes of keys whose rows must be folded together (`RawFiles.links`).
    `blocks`: of all hashes; with a salt, a client of the source can't choose the partition.
    """

    def __init__(
        self, key: Sequence[str], links: Sequence[Hashes], blocks: HashBlocks = BLOCKS
    ) -> None:
        self._key = tuple(key)
        self._blocks = blocks
        self._linked, self._chosen = _components(links)

    def __call__(self, rows: pa.Table) -> tuple[pa.Table, Hashes]:
        """Return the rows, plus a deletion of the old key for each update that changed its key."""
        moved = rows.filter(changes_key(rows, self._key, self._blocks))
        if moved.num_rows:
            rows = pa.concat_tables([rows, self._deletions(moved)])
        return rows, self._mapped(key_hashes(rows, self._key, self._blocks))

    def reduced(self, rows: pa.Table) -> pa.Table:
        """Return the rows without those that a later complete change of their key replaces.

        Rows that left another key remain, and those of linked keys: their values may count.
        """
        rows = rows.combine_chunks()
        if not are_compared(rows, self._key):
            return rows
        keys = RowKeys([rows[name] for name in self._key])
        lsn, seq = (rows[name].to_numpy() for name in ("_cdc_lsn", "_cdc_seq"))
        rank = np.empty(rows.num_rows, np.int64)
        rank[np.lexsort((seq, lsn))] = np.arange(rows.num_rows)
        is_complete = rows["_cdc_unchanged"].is_null().to_numpy()
        is_complete = is_complete | pc.equal(rows["_cdc_op"], DELETE).to_numpy()
        newest = np.full(keys.count + 1, -1)  # (the last is that of keys with a null)
        np.maximum.at(newest, keys.numbers[is_complete], rank[is_complete])
        newest[-1] = -1
        is_kept = rank >= newest[keys.numbers]
        is_kept |= changes_key(rows, self._key, self._blocks).to_numpy(zero_copy_only=False)
        if len(self._linked):
            is_kept |= np.isin(key_hashes(rows, self._key, self._blocks), self._linked)
        return rows.filter(pa.array(is_kept))

    def _mapped(self, hashes: Hashes) -> Hashes:
        if not len(self._linked):
            return hashes
        places = np.minimum(np.searchsorted(self._linked, hashes), len(self._linked) - 1)
        return np.where(self._linked[places] == hashes, self._chosen[places], hashes)

    def _deletions(self, moved: pa.Table) -> pa.Table:
        count = moved.num_rows
        old = old_keys(moved, self._key)
        raw = moved["_cdc_raw"].combine_chunks()
        texts = TextEntries.from_column(raw).renamed(
            lambda n: n.removeprefix(OF_BEFORE) if n.startswith(OF_BEFORE) else None
        )
        kept = {*self._key, "_cdc_lsn", "_cdc_seq", "_cdc_ts"}
        columns = []
        for each in moved.schema:
            if each.name in self._key:
                columns.append(old[each.name].cast(each.type))
            elif each.name == "_cdc_op":
                columns.append(pa.array([DELETE] * count, each.type))
            elif each.name == "_cdc_raw":
                columns.append(texts.to_column(count))
            elif each.name in kept:
                columns.append(moved[each.name])
            else:
                columns.append(pa.nulls(count, each.type))
        return pa.Table.from_arrays(columns, schema=moved.schema)


def _components(links: Sequence[Hashes]) -> tuple[Hashes, Hashes]:
    """Return the linked hashes, ascending, and for each the lowest that is linked with it."""
    if not links:
        return np.empty(0, np.uint64), np.empty(0, np.uint64)
    pairs = np.concatenate(links, axis=1)
    nodes, numbers = np.unique(pairs, return_inverse=True)
    first, second = numbers.reshape(pairs.shape)
    label: NDArray[np.int64] = np.arange(len(nodes))
    while True:
        lowest = np.minimum(label[first], label[second])
        found = label.copy()
        for ends in (first, second, label[first], label[second]):
            np.minimum.at(found, ends, lowest)
        found = found[found]  # halves the distance each time
        if np.array_equal(found, label):
            return nodes, nodes[label]
        label = found
