"""Changes of a reference table, applied to its files one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingestd.lake.fold.row_keys import Ints, RowKeys
from ingestd.model.changes import DELETE, RESERVED_PREFIX, field_of
from ingestd.model.errors import TransientError


class ReferenceChanges:
    """One batch of changes, one row a key (`ingestd.ports.ReferenceTableSource.poll_changes`).

    Pass all rows that may have one of the keys to `without_changed`, then call `rows`.
    """

    def __init__(self, changes: pa.RecordBatch, key: Sequence[str], where: str) -> None:
        table = pa.Table.from_batches([changes]).combine_chunks()
        self._where = where
        self.key = list(key)
        names = [n for n in table.schema.names if not n.startswith(RESERVED_PREFIX)]
        self._table = table.select(names)
        self.keys = RowKeys([table[n] for n in key])
        self._is_kept = pc.not_equal(table["_cdc_op"], DELETE).to_numpy()
        self._unchanged = _unchanged(table)
        self._base = self._bases(table) if self._unchanged else None
        self._old: list[pa.Table] = []
        self._old_numbers: list[Ints] = []

    def may_be_in(self, statistics: Mapping[str, Any]) -> bool:
        """Return whether a file with these statistics may have one of the keys."""
        low, high = statistics.get("minValues") or {}, statistics.get("maxValues") or {}
        for name in self.key:
            first, last = low.get(name), high.get(name)
            if type(first) in {int, str} and type(last) in {int, str}:
                column = self._table[name]
                if type(first) is str and not pa.types.is_string(column.type):
                    continue  # a date or time, as text
                bounds = pc.min_max(column).as_py()
                if bounds["max"] is None or bounds["max"] < first or bounds["min"] > last:
                    return False
        return True

    def find(self, rows: pa.Table) -> Ints:
        """Return the number of each row's key, -1 if that key did not change."""
        return self.keys.find([rows[n] for n in self.key])

    def without_changed(self, rows: pa.Table, numbers: Ints) -> pa.Table:
        """Return the rows whose key did not change; remember the values still needed of others."""
        if self._base is not None:
            needed = np.flatnonzero((numbers >= 0) & np.isin(numbers, self._base))
            self._old.append(rows.take(pa.array(needed)))
            self._old_numbers.append(numbers[needed])
        return rows.filter(pa.array(numbers < 0))

    def rows(self) -> pa.Table:
        """Return the changed rows as they are now. Raise TransientError (``row_missing``)."""
        table = self._table
        if self._base is not None and self._old:
            table = self._filled(pa.concat_tables(self._old), np.concatenate(self._old_numbers))
        elif self._unchanged:
            raise self._missing()
        return table.filter(pa.array(self._is_kept))

    def _filled(self, old: pa.Table, numbers: Ints) -> pa.Table:
        """Fill in the values that did not change."""
        assert self._base is not None
        row_of_key = np.full(self.keys.count, -1, np.int64)
        row_of_key[numbers] = np.arange(len(numbers))
        columns = []
        for name in self._table.schema.names:
            column = self._table[name].combine_chunks()
            rows = self._unchanged.get(name)
            if rows is not None:
                taken = row_of_key[self._base[rows]]
                if (taken < 0).any() or (self._base[rows] < 0).any():
                    raise self._missing()
                source = np.arange(len(column))
                source[rows] = taken + len(column)
                both = pa.concat_arrays([column, old[name].combine_chunks()])
                column = both.take(pa.array(source))
            columns.append(column)
        return pa.Table.from_arrays(columns, schema=self._table.schema)

    def _missing(self) -> TransientError:
        return TransientError(f"{self._where}: a row that changed is missing", reason="row_missing")

    def _bases(self, table: pa.Table) -> Ints:
        """Return for each row the number of the key that it had before."""
        own = self.keys.numbers
        if "_cdc_before" not in table.schema.names:
            return own
        before = table["_cdc_before"].combine_chunks()
        has_other = before.is_valid().to_numpy(zero_copy_only=False)
        other = self.keys.find([field_of(before, n) for n in self.key])
        return np.where(has_other, other, own)


def _unchanged(table: pa.Table) -> dict[str, Ints]:
    """Return the rows in which a column did not change, by column name."""
    if "_cdc_unchanged" not in table.schema.names:
        return {}
    found: dict[str, list[int]] = {}
    lists = table["_cdc_unchanged"].combine_chunks()
    for row in np.flatnonzero(lists.is_valid().to_numpy(zero_copy_only=False)):
        for name in lists[int(row)].as_py():
            found.setdefault(name, []).append(int(row))
    return {name: np.array(rows, np.int64) for name, rows in found.items()}
