"""The last rows of a Delta table by position, without reading the complete table.

Statistics exclude files and row groups that can't contain such a row. Of the others only the
position columns are read first. So the memory is that of one batch and of the rows returned.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake.exceptions import TableNotFoundError

from ingestd.lake.delta.arrow_types import plain
from ingestd.lake.delta.data_files import DataFileReader, open_parquet
from ingestd.lake.delta.log_files import open_table
from ingestd.lake.delta.read import conform, list_files
from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.store import Store

Place = tuple[int, int, int]
"""Position of a row in the table: number of the file, of the row group, and of the row in it."""


def newest_rows(
    store: Store, folder: str, order: tuple[str, str], limit: int
) -> list[dict[str, Any]] | None:
    """Return the last `limit` rows of the table in `folder`, last first; None without a table.

    `order`: two integer columns without nulls; the first has statistics. Raise whatever
    `storage_fault` makes of an error.
    """
    uri = store.uri(folder)
    with storage_faults(uri):
        try:
            handle = open_table(store, folder)
        except TableNotFoundError:
            return None
        files = sorted(
            ((path, _highest(statistics, order[0])) for path, statistics, _ in list_files(handle)),
            key=lambda file: (file[1] is not None, -(file[1] or 0)),
        )
        found = _Newest(limit)
        for number, (path, high) in enumerate(files):
            if high is not None and found.is_above(high):
                break
            with open_parquet(store, f"{folder}/{path}") as parquet:
                found.scan_file(parquet, number, order)
        schema = pa.schema(handle.schema().to_arrow())
        rows: dict[Place, dict[str, Any]] = {}
        for number in sorted({place[0] for place in found.places()}):
            path = f"{folder}/{files[number][0]}"
            with open_parquet(store, path) as parquet:
                rows.update(_rows(parquet, number, found.places(), schema))
        return [rows[place] for place in found.places()]


def _highest(statistics: Mapping[str, Any], column: str) -> int | None:
    high = statistics.get("maxValues", {}).get(column)
    return None if high is None else int(high)


@dataclass(slots=True)
class _Newest:
    """The positions and places of the last rows seen so far: a heap, lowest first."""

    limit: int
    _heap: list[tuple[int, int, Place]] = field(default_factory=list)

    def places(self) -> list[Place]:
        """Return the places of the rows, last first."""
        return [place for _, _, place in sorted(self._heap, reverse=True)]

    def is_above(self, high: int) -> bool:
        """Return whether no row up to `high` can be one of them."""
        return len(self._heap) >= self.limit and (not self._heap or high < self._heap[0][0])

    def scan_file(self, parquet: DataFileReader, number: int, order: tuple[str, str]) -> None:
        """Consider the rows of a file."""
        for group in range(parquet.num_row_groups):
            _, high = parquet.bounds(group, order[0])
            if isinstance(high, int) and self.is_above(high):
                continue
            at = 0
            for batch in parquet.batches(order, group):
                first, second = (plain(batch).column(name).to_numpy() for name in order)
                for row in np.lexsort((second, first))[-self.limit :]:
                    place = (number, group, at + int(row))
                    self._keep_newer((int(first[row]), int(second[row]), place))
                at += batch.num_rows

    def _keep_newer(self, entry: tuple[int, int, Place]) -> None:
        if len(self._heap) < self.limit:
            heapq.heappush(self._heap, entry)
        elif entry > self._heap[0]:
            heapq.heapreplace(self._heap, entry)


def _rows(
    parquet: DataFileReader, number: int, places: Sequence[Place], schema: pa.Schema
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield those rows at these places that are in this file."""
    names = [name for name in schema.names if name in parquet.schema.names]
    for group in sorted({place[1] for place in places if place[0] == number}):
        wanted = {place[2] for place in places if place[:2] == (number, group)}
        at = 0
        for batch in parquet.batches(names, group):
            inside = sorted(row for row in wanted if at <= row < at + batch.num_rows)
            if inside:
                rows = plain(pa.Table.from_batches([batch])).take([row - at for row in inside])
                for row, values in zip(inside, conform(rows, schema).to_pylist(), strict=True):
                    yield (number, group, row), values
            at += batch.num_rows
