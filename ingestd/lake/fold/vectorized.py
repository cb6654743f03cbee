"""A vectorised fold of a part of a raw table to the last row of each key (design section 2).

The result is the same as in `ingestd.lake.fold.plain`, for tables with a key: rows are ordered by
position, a row whose key changed removes the old row, and values that were not sent come from the
previous row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.lake.fold.row_keys import Ints, RowKeys
from ingestd.model.changes import DELETE, RESERVED_PREFIX, field_of

OF_BEFORE = "_cdc_before."

NEEDED = ("_cdc_op", "_cdc_lsn", "_cdc_seq", "_cdc_before", "_cdc_unchanged", "_cdc_raw")
"""Columns that a change row must have besides its source columns."""

Refuse = Callable[[str], Exception]
"""Creates the error for a column that can't hold a value."""


@dataclass(slots=True)
class _LastRows:
    """For each value of each last row, the row it is taken from."""

    rows: Ints
    sources: dict[str, Ints] = field(default_factory=dict)
    unchanged: dict[int, list[str]] = field(default_factory=dict)
    bases: dict[int, int] = field(default_factory=dict)


def position_order(rows: pa.Table) -> Ints:
    """Return the order of rows by position."""
    lsn, seq = (rows[n].to_numpy() for n in ("_cdc_lsn", "_cdc_seq"))
    order: Ints = np.lexsort((seq, lsn))
    return order


def last_rows(rows: pa.Table, key: Sequence[str], refuse: Refuse) -> pa.Table:
    """Return one row a key, as `ReferenceTableSource.poll_changes` does; no `t` may be among them.

    `rows`: the wanted columns and NEEDED, in any order. Raise the error of `refuse` if a value that
    counts is in `_cdc_raw`.
    """
    rows = rows.take(pa.array(position_order(rows))).combine_chunks()
    names = [n for n in rows.schema.names if not n.startswith(RESERVED_PREFIX)]
    return _Fold(rows, names, key, refuse).result()


class _Fold:
    """Rows in order of position. Event 2i: row i removes its old key; 2i+1: it sets its own."""

    def __init__(
        self, rows: pa.Table, names: Sequence[str], key: Sequence[str], refuse: Refuse
    ) -> None:
        self._names = names
        self._key = key
        self._refuse = refuse
        self._raw = _RawTexts(rows, refuse)
        self._raw.check_keys(key)
        before = _whole(rows["_cdc_before"])
        own = []
        for name in key:
            column = _whole(rows[name])
            if column.null_count:  # TOASTed and not sent, so unchanged
                column = pc.coalesce(column, field_of(before, name))
                rows = rows.set_column(rows.schema.get_field_index(name), name, column)
            own.append(column)
        self._rows = rows
        changed = np.flatnonzero(
            pc.and_(before.is_valid(), pc.equal(rows["_cdc_op"], "u")).to_numpy()
        )
        old = [field_of(before, n).take(pa.array(changed)) for n in key]
        keys = RowKeys([pa.concat_arrays([a, b]) for a, b in zip(own, old, strict=True)])
        self._count = keys.count
        self._new: Ints = keys.numbers[: len(rows)]
        self._old: Ints = np.full(len(rows), -1, np.int64)
        self._old[changed] = keys.numbers[len(rows) :]
        self._old[self._old == self._new] = -1
        self._is_gone = pc.equal(rows["_cdc_op"], DELETE).to_numpy()
        self._lists = _whole(rows["_cdc_unchanged"])
        self._lacks = pc.greater(pc.fill_null(pc.list_value_length(self._lists), 0), 0).to_numpy(
            zero_copy_only=False
        )

    def result(self) -> pa.Table:
        if (self._new < 0).any():
            raise self._refuse(self._key[0])
        last = np.full(self._count, -1, np.int64)
        numbers = np.arange(len(self._rows))
        last[self._new] = 2 * numbers + 1  # the last of several wins
        moved = np.flatnonzero(self._old >= 0)
        np.maximum.at(last, self._old[moved], 2 * moved)
        is_own = last % 2 == 1
        is_kept = is_own & ~self._is_gone[last // 2]
        kept = np.sort(last[is_kept] // 2)
        deleted = last[~is_kept]
        found = self._resolve(kept)
        return pa.concat_tables([self._kept(found), self._deleted(np.sort(deleted))])

    # --- values that were not sent ------------------------------------------------------------

    def _resolve(self, kept: Ints) -> _LastRows:
        found = _LastRows(kept)
        lacking = np.flatnonzero(self._lacks[kept])
        if not len(lacking):
            return found
        history = self._history()
        for place in lacking:
            for name in self._lists[int(kept[place])].as_py():
                if name in self._names and name not in self._key:
                    self._resolve_one(found, int(place), name, history)
        return found

    def _resolve_one(
        self, found: _LastRows, place: int, name: str, history: dict[int, list[int]]
    ) -> None:
        row = int(found.rows[place])
        while True:
            key = int(self._new[row] if self._old[row] < 0 else self._old[row])
            events = history[key]
            at = int(np.searchsorted(events, 2 * row if self._old[row] >= 0 else 2 * row + 1)) - 1
            if at < 0:
                found.unchanged.setdefault(place, []).append(name)
                found.bases[place] = key
                return
            row = events[at] // 2
            if events[at] % 2 == 0 or self._is_gone[row]:
                return  # there was no row to take it from
            if not self._lacks[row] or name not in self._lists[row].as_py():
                sources = found.sources.setdefault(name, found.rows.copy())
                sources[place] = row
                return

    def _history(self) -> dict[int, list[int]]:
        """Return the events of each key, in order."""
        found: dict[int, list[int]] = defaultdict(list)
        for row, (old, new) in enumerate(zip(self._old.tolist(), self._new.tolist(), strict=True)):
            if old >= 0:
                found[old].append(2 * row)
            found[new].append(2 * row + 1)
        return found

    # --- the outcome --------------------------------------------------------------------------

    def _kept(self, found: _LastRows) -> pa.Table:
        columns = {}
        for name in self._names:
            sources = found.sources.get(name, found.rows)
            self._raw.check(name, sources)
            columns[name] = self._rows[name].take(pa.array(sources))
        count = len(found.rows)
        columns["_cdc_op"] = pa.array(["u"] * count, pa.string())
        unchanged: list[list[str] | None] = [None] * count
        for place, names in found.unchanged.items():
            unchanged[place] = names
        columns["_cdc_unchanged"] = pa.array(unchanged, pa.list_(pa.string()))
        columns["_cdc_before"] = self._bases(found)
        return pa.table(columns)

    def _bases(self, found: _LastRows) -> pa.Array:
        """Return the key that a row had before, if it differed."""
        count = len(found.rows)
        others = {
            place: key
            for place, key in found.bases.items()
            if key != int(self._new[found.rows[place]])
        }
        arrays = [pa.nulls(count, self._rows.schema.field(n).type) for n in self._key]
        if others:
            where = {int(old): row for row, old in enumerate(self._old) if old >= 0}
            rows = pa.array([where[others[p]] if p in others else None for p in range(count)])
            before = _whole(self._rows["_cdc_before"])
            arrays = [field_of(before, n).take(rows) for n in self._key]
        mask = pa.array([place not in others for place in range(count)], pa.bool_())
        return pa.StructArray.from_arrays(arrays, names=list(self._key), mask=mask)

    def _deleted(self, events: Ints) -> pa.Table:
        """Return the keys of removed rows: deleted, or replaced by a row with a new key."""
        rows = pa.array(events // 2)
        is_moved = events % 2 == 0
        before = _whole(self._rows["_cdc_before"]).take(rows)
        columns: dict[str, pa.Array] = {}
        for name in self._names:
            kind = self._rows.schema.field(name).type
            if name not in self._key:
                columns[name] = pa.nulls(len(events), kind)
                continue
            own = _whole(self._rows[name]).take(rows)
            both = pa.concat_arrays([own, field_of(before, name)])
            places = np.arange(len(events)) + np.where(is_moved, len(events), 0)
            columns[name] = both.take(pa.array(places))
        columns["_cdc_op"] = pa.array([DELETE] * len(events), pa.string())
        columns["_cdc_unchanged"] = pa.nulls(len(events), pa.list_(pa.string()))
        base = pa.struct([self._rows.schema.field(n) for n in self._key])
        columns["_cdc_before"] = pa.nulls(len(events), base)
        return pa.table(columns)


class _RawTexts:
    """The values that are kept only as text."""

    def __init__(self, rows: pa.Table, refuse: Refuse) -> None:
        self._refuse = refuse
        self._rows: dict[str, set[int]] = defaultdict(set)
        raw = _whole(rows["_cdc_raw"])
        if raw.null_count < len(raw):
            for row in np.flatnonzero(raw.is_valid().to_numpy(zero_copy_only=False)).tolist():
                for name, _ in raw[row].as_py():
                    self._rows[name].add(row)

    def check_keys(self, key: Sequence[str]) -> None:
        for name in key:
            if self._rows.get(name) or self._rows.get(OF_BEFORE + name):
                raise self._refuse(name)

    def check(self, name: str, rows: NDArray[np.int64]) -> None:
        if name in self._rows and not self._rows[name].isdisjoint(rows.tolist()):
            raise self._refuse(name)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    if isinstance(found, pa.ChunkedArray):
        return pa.concat_arrays(found.chunks) if found.num_chunks else pa.array([], found.type)
    return found
