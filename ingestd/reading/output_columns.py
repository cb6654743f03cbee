"""Rows of a raw table under the names, types and values that the source has (docs/types.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.decode.values.cast import cast
from ingestd.decode.values.text_column import ByteBuffer, TextColumn
from ingestd.lake.definitions import Definition
from ingestd.lake.delta.types import arrow_type
from ingestd.lake.fold.older_types import as_newest
from ingestd.lake.fold.raw_texts import NAMES_TYPE, RAW_TYPE, TextEntries, renamed_lists
from ingestd.model.changes import DELETE, OF_BEFORE, TRUNCATE, field_of
from ingestd.model.schema import TIMESTAMP, Column

CHANGE_FIELDS: Mapping[str, pa.DataType] = {
    "_cdc_op": pa.string(),
    "_cdc_lsn": pa.int64(),
    "_cdc_seq": pa.int64(),
    "_cdc_ts": TIMESTAMP,
}
"""Columns of a change row that a fold needs, besides those about its values."""
ORIGIN_FIELDS: Mapping[str, pa.DataType] = {"_cdc_xid": pa.int64(), "_cdc_epoch": pa.int64()}
"""Others that a change row has."""
_Mask = NDArray[np.bool_]
_LAST = np.iinfo(np.int64).max
"""Above every position: a row there has the values that it was sent with, such as no others than
the key's in a `d`."""


@dataclass(frozen=True, slots=True)
class OutputColumn:
    """A column of the result.

    `stored`: the lake columns that hold its values and their types, oldest first; each row has its
    value in one of them. `type` is that of the last. Rows below `since_lsn` (0: none) have the text
    `missing` in the source; None: null.
    """

    name: str
    stored: Mapping[str, pa.DataType]
    since_lsn: int = 0
    missing: str | None = None

    @property
    def newest(self) -> str:
        """The lake column that receives its values now."""
        return list(self.stored)[-1]

    @property
    def type(self) -> pa.DataType:
        """Its type."""
        return self.stored[self.newest]

    def missing_value(self) -> tuple[pa.Array, str | None]:
        """Return the value of older rows, of length one, and its text if the type can't hold it."""
        if self.missing is None:
            return pa.nulls(1, self.type), None
        data = self.missing.encode()
        texts = TextColumn(ByteBuffer(data), np.zeros(1, np.int64), np.full(1, len(data), np.int64))
        array, refused = cast(texts, self.type)
        return (pa.nulls(1, self.type), self.missing) if len(refused) else (array, None)


def output_columns(definition: Definition, *, merge_versions: bool) -> tuple[OutputColumn, ...]:
    """Return the columns of a table, in the source's order.

    `merge_versions`: one column for each of the source, by the source's name; else one for each
    lake column that received its values, by the lake's name, except for the key's: rows of any
    version are compared by them.
    """
    found = []
    for column in definition.columns:
        stored = {
            c.name: arrow_type(c.delta_type)
            for c in definition.lives
            if c.source_name == column.source_name and c.name != column.name
        }
        newest = {column.name: arrow_type(column.delta_type)}
        since = column.since_lsn, column.missing
        if merge_versions or column.name in definition.key:
            found.append(OutputColumn(column.source_name, {**stored, **newest}, *since))
        else:
            found += [OutputColumn(n, {n: kind}, column.since_lsn) for n, kind in stored.items()]
            found.append(OutputColumn(column.name, newest, *since))
    return tuple(found)


@dataclass(frozen=True)
class RowShape:
    """Converts raw rows. `key`: names of key columns among `columns`; empty: rows are a multiset.

    `before`: columns whose old values are kept, besides the key's. `fields`: other columns of the
    change rows, as they are.
    """

    columns: tuple[OutputColumn, ...]
    key: tuple[str, ...]
    before: frozenset[str] = frozenset()
    fields: Mapping[str, pa.DataType] = field(default_factory=lambda: CHANGE_FIELDS)

    @cached_property
    def old_columns(self) -> tuple[OutputColumn, ...]:
        """The columns whose old values are kept."""
        wanted = self.before.union(self.key)
        return tuple(c for c in self.columns if not self.key or c.name in wanted)

    @cached_property
    def raw_schema(self) -> pa.Schema:
        """The columns to be read of the raw table."""
        own = {n: kind for c in self.columns for n, kind in c.stored.items()}
        old = {n: kind for c in self.old_columns for n, kind in c.stored.items()}
        before = pa.struct([pa.field(*each) for each in old.items()])
        cdc = {"_cdc_before": before, "_cdc_unchanged": NAMES_TYPE, "_cdc_raw": RAW_TYPE}
        return pa.schema([*{**own, **self.fields, **cdc}.items()])

    @cached_property
    def schema(self) -> pa.Schema:
        """The schema of converted rows, as `ingestd.lake.fold` expects them."""
        own = {c.name: c.type for c in self.columns}
        before = pa.struct([(c.name, c.type) for c in self.old_columns])
        cdc = {"_cdc_before": before, "_cdc_unchanged": NAMES_TYPE, "_cdc_raw": RAW_TYPE}
        return pa.schema([*{**own, **self.fields, **cdc}.items()])

    def new_name(self, lake_name: str) -> str | None:
        """Return the name that a lake column has in the result; None if it is not part of it."""
        return self._names.get(lake_name)

    @cached_property
    def _names(self) -> dict[str, str]:
        return {n: c.name for c in self.columns for n in c.stored}

    def _new_text_name(self, name: str) -> str | None:
        """Return the new name of an entry of `_cdc_raw`."""
        if not name.startswith(OF_BEFORE):
            return self.new_name(name)
        found = self.new_name(name.removeprefix(OF_BEFORE))
        return None if found is None else OF_BEFORE + found

    def convert(self, rows: pa.Table) -> pa.Table:
        """Return rows with `raw_schema` in `schema`."""
        rows = rows.combine_chunks()
        count = rows.num_rows
        own = {name: _one(rows[name]) for name in self.raw_schema.names}
        before = own["_cdc_before"]
        lsn = own["_cdc_lsn"].to_numpy()
        is_marker, is_delete = (_flags(pc.equal(own["_cdc_op"], op)) for op in (TRUNCATE, DELETE))
        key_lsn = np.where(is_marker, _LAST, lsn)
        other_lsn = np.where(is_delete, _LAST, key_lsn) if self.key else key_lsn
        texts = TextEntries.from_column(own["_cdc_raw"])
        lake_texts, texts = texts, texts.renamed(self._new_text_name)
        values: dict[str, pa.Array] = {}
        for column in self.columns:
            found, more = _merged(column, own.get, lake_texts, "")
            texts = texts.with_more(column.name, more)
            own_lsn = key_lsn if column.name in self.key else other_lsn
            values[column.name], texts = _with_missing(column, found, own_lsn, texts, "")
        old = {}
        old_lsn = np.where(_flags(before.is_valid()), lsn, _LAST)
        for column in self.old_columns:
            found, more = _merged(column, lambda n: field_of(before, n), lake_texts, OF_BEFORE)
            texts = texts.with_more(OF_BEFORE + column.name, more)
            old[column.name], texts = _with_missing(column, found, old_lsn, texts, OF_BEFORE)
        unchanged = renamed_lists(own["_cdc_unchanged"], self.new_name)
        for name in self.key:
            values[name], texts = _with_unsent(name, values[name], old[name], unchanged, texts)
        kind = self.schema.field("_cdc_before").type
        if before.null_count == count:
            old_rows = pa.nulls(count, kind)
        else:
            old_rows = pa.StructArray.from_arrays(
                list(old.values()), fields=list(kind), mask=before.is_null()
            )
        cdc = {"_cdc_before": old_rows, "_cdc_unchanged": unchanged}
        cdc["_cdc_raw"] = texts.to_column(count)
        every = {**values, **{n: own[n] for n in self.fields}, **cdc}
        return pa.Table.from_arrays([every[n] for n in self.schema.names], schema=self.schema)


def _one(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array."""
    chunks = column.chunks
    return chunks[0] if len(chunks) == 1 else column.combine_chunks()


def _merged(
    column: OutputColumn, get: Callable[[str], pa.Array], lake_texts: TextEntries, prefix: str
) -> tuple[pa.Array, dict[int, str]]:
    """Return each row's value, and by row the texts of older values that the type can't hold."""
    values = get(column.newest)
    more: dict[int, str] = {}
    refused: Mapping[int, str]
    for name in list(column.stored)[-2::-1]:
        older = get(name)
        if older.null_count == len(older):
            continue
        is_older = _flags(older.is_valid()) & _flags(values.is_null())
        is_older[lake_texts.having(prefix + column.newest)] = False
        if older.type.equals(column.type):
            converted, refused = older, {}
        else:
            kind = Column(column.name, 0, -1, column.type)
            converted, refused = as_newest(kind, older)
        values = _chosen(is_older, converted, values)
        more |= {row: text for row, text in refused.items() if is_older[row]}
    return values, more


def _with_missing(
    column: OutputColumn, values: pa.Array, lsn: NDArray[np.int64], texts: TextEntries, prefix: str
) -> tuple[pa.Array, TextEntries]:
    """Return the values and texts, those of rows older than the column as the source has them."""
    if not column.since_lsn:
        return values, texts
    is_before = lsn < column.since_lsn
    if not is_before.any():
        return values, texts
    value, text = column.missing_value()
    texts = texts.without(prefix + column.name, is_before)
    if text is not None:
        rows = np.flatnonzero(is_before).tolist()
        texts = texts.with_more(prefix + column.name, dict.fromkeys(rows, text))
    places = np.arange(len(values))
    places[is_before] = len(values)
    return pa.concat_arrays([values, value]).take(pa.array(places)), texts


def _with_unsent(
    name: str, own: pa.Array, old: pa.Array, unchanged: pa.Array, texts: TextEntries
) -> tuple[pa.Array, TextEntries]:
    """Return a key column completed from the old row: an unsent part of a key is unchanged."""
    if own.null_count == 0 or unchanged.null_count == len(unchanged):
        return own, texts
    is_unsent = np.zeros(len(own), bool)
    parents = pc.list_parent_indices(unchanged).to_numpy()
    is_unsent[parents[_flags(pc.equal(pc.list_flatten(unchanged), name))]] = True
    is_unsent &= _flags(own.is_null())
    old_texts = texts.renamed(lambda n: n if n == OF_BEFORE + name else None)
    pairs = zip(old_texts.rows.tolist(), old_texts.texts.to_pylist(), strict=True)
    more = {row: text for row, text in pairs if is_unsent[row]}
    return _chosen(is_unsent, old, own), texts.with_more(name, more)


def _chosen(mask: _Mask, values: pa.Array, others: pa.Array) -> pa.Array:
    """Return the values where `mask`, else the others; of any type."""
    if not mask.any():
        return others
    if mask.all():
        return values
    places = np.arange(len(others)) + np.where(mask, len(others), 0)
    return pa.concat_arrays([others, values]).take(pa.array(places))


def _flags(values: pa.Array) -> _Mask:
    found: _Mask = values.to_numpy(zero_copy_only=False).astype(np.bool_)
    return found
