"""64-bit digests of rows: equal rows have equal digests, whichever way they were read.

A row's digest is a sum over its columns, each mixed with its position, so it can be assembled from
parts found in different changes. A value that its column can't hold (`_cdc_raw`) counts as its
text, which differs from every value of the column. The hashes are those of
`ingestd.digests.value_hashes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingestd.digests.value_hashes import (
    BLOCKS,
    HashBlocks,
    Hashes,
    column_hashes,
    combined,
    mixed,
    text_hash,
    with_one_zero,
)

RAW = "_cdc_raw"
NULL: np.uint64 = column_hashes(pa.nulls(1, pa.string()))[0]
"""The hash of a missing value."""
_STEP, _MASK = 0xD1342543DE82EF95, (1 << 64) - 1
_RAW_MARK = np.uint64(0x2545F4914F6CDD1D)

Given = Callable[[str], "pa.Array | None"]
"""Returns the values of a lake column in some rows; None if it has no column of that name."""
AsNewest = Callable[["pa.Array"], "tuple[pa.Array, Mapping[int, str]]"]
"""Returns values of an older type as the newest; and, by row, texts of those it can't hold."""
ComparedValue = Any
"""Arrow's Python value, a `DigestedText` for one its column can't hold, None for null."""


class DigestedText(str):
    """The source's text of a value that its column can't hold."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ComparedColumn:
    """A column, by its name in the source.

    `stored`: the lake columns that hold its values, oldest first; each row has its value in one of
    them. `type` is the type of the last, `as_newest` converts the others. Rows below `since_lsn`
    have the value `missing`.
    """

    name: str
    stored: tuple[str, ...]
    type: pa.DataType
    is_masked: bool = False
    since_lsn: int = 0
    missing: ComparedValue = None
    as_newest: AsNewest = field(default=lambda values: (values, {}), compare=False)

    @property
    def missing_hash(self) -> np.uint64:
        """The hash of the value of rows that are older than the column."""
        found: np.uint64 = value_hashes([self.missing], self.type)[0]
        return found


class RawTexts:
    """The texts in `_cdc_raw` of some rows, by name."""

    def __init__(self, raw: pa.Array | None) -> None:
        self._rows: dict[str, tuple[NDArray[np.int64], pa.Array]] = {}
        if raw is None or raw.null_count == len(raw):
            return
        cuts = raw.offsets.to_numpy().astype(np.int64)
        first, last = int(cuts[0]), int(cuts[-1])
        keys, items = raw.keys.slice(first, last - first), raw.items.slice(first, last - first)
        rows = np.repeat(np.arange(len(raw)), np.diff(cuts))
        names = np.array(keys.to_pylist(), object)
        for name in set(names.tolist()):
            places = np.flatnonzero(names == name)
            self._rows[name] = rows[places], items.take(pa.array(places))

    def hashes(self, name: str) -> tuple[NDArray[np.int64], Hashes] | None:
        """Return the rows that have a text of this name, and the hashes of the texts."""
        found = self._rows.get(name)
        return None if found is None else (found[0], _raw_hashes(found[1]))

    def texts(self, name: str) -> Mapping[int, str]:
        """Return the texts of this name by row."""
        found = self._rows.get(name)
        if found is None:
            return {}
        return dict(zip(found[0].tolist(), found[1].to_pylist(), strict=True))


def given_by(batch: pa.RecordBatch) -> Given:
    """Return a lookup of the batch's own columns."""
    names = set(batch.schema.names)
    return lambda name: batch.column(name) if name in names else None


def column_digests(
    column: ComparedColumn, given: Given, raw: RawTexts, rows: int, prefix: str = ""
) -> Hashes:
    """Hash each row's value of a column."""
    hashes: Hashes | None = None
    for name in column.stored:
        own = _stored_digests(column, name, given, raw, rows, prefix)
        hashes = own if hashes is None else np.where(own == NULL, hashes, own)
    assert hashes is not None
    return hashes


def _stored_digests(  # noqa: PLR0917 - of one lake column
    column: ComparedColumn, name: str, given: Given, raw: RawTexts, rows: int, prefix: str
) -> Hashes:
    values = given(name)
    if values is None:
        own = np.full(rows, NULL)
    else:
        kept, refused = _as_last(column, name, values)
        own = column_hashes(kept)
        if refused:
            own[list(refused)] = _raw_hashes(pa.array(refused.values(), pa.string()))
    texts = raw.hashes(prefix + name)
    if texts is not None:
        places, found = texts
        own[places] = found
    return own


def values_of(
    column: ComparedColumn, given: Given, raw: RawTexts, rows: int, prefix: str = ""
) -> list[ComparedValue]:
    """Return each row's value of a column."""
    found: list[ComparedValue] = [None] * rows
    for name in column.stored:
        values = given(name)
        if values is not None:
            kept, refused = _as_last(column, name, values)
            own = kept.to_pylist()
            found = [a if b is None else b for a, b in zip(found, own, strict=True)]
            for row, text in refused.items():
                found[row] = DigestedText(text)
        for row, text in raw.texts(prefix + name).items():
            found[row] = DigestedText(text)
    return found


def _as_last(
    column: ComparedColumn, name: str, values: pa.Array
) -> tuple[pa.Array, Mapping[int, str]]:
    """Return values of a lake column converted to the newest type.

    Also return, by row, the texts of those that it can't hold; the source's are texts as well.
    """
    if name == column.stored[-1] or values.type.equals(column.type):
        return values, {}
    return column.as_newest(values)


def value_hashes(values: Sequence[ComparedValue], kind: pa.DataType) -> Hashes:
    """Hash values of a column, as `column_digests` does."""
    plain = [None if isinstance(v, DigestedText) else v for v in values]
    found = column_hashes(pa.array(plain, kind))
    for row, value in enumerate(values):
        if isinstance(value, DigestedText):
            found[row] = mixed(np.array([text_hash(value)]) ^ _RAW_MARK)[0]
    return found


def _raw_hashes(texts: pa.Array) -> Hashes:
    return mixed(column_hashes(texts) ^ _RAW_MARK)


def key_digests(
    columns: Iterable[tuple[Hashes, pa.DataType]], rows: int, blocks: HashBlocks = BLOCKS
) -> Hashes:
    """Combine the hashes of a key's columns. `blocks`: theirs."""
    return combined((with_one_zero(hashes, kind) for hashes, kind in columns), rows, blocks)


def column_part(hashes: Hashes, number: int) -> Hashes:
    """Return a column's part of the row digests. `number`: its position."""
    return mixed(hashes + np.uint64((number + 1) * _STEP & _MASK))


def row_digests(columns: Mapping[int, Hashes], rows: int) -> Hashes:
    """Sum the parts of the columns at these positions."""
    found = np.zeros(rows, np.uint64)
    for number, hashes in columns.items():
        found += column_part(hashes, number)
    return found


def digests_of(
    batch: pa.RecordBatch, columns: Sequence[ComparedColumn], key: Sequence[int]
) -> tuple[Hashes, Hashes]:
    """Return the digests of the rows' keys and of the rows. `key`: positions; empty: the row."""
    rows = batch.num_rows
    raw = RawTexts(batch.column(RAW))
    hashes = {i: column_digests(c, given_by(batch), raw, rows) for i, c in enumerate(columns)}
    found = row_digests(hashes, rows)
    keys = key_digests(((hashes[i], columns[i].type) for i in key), rows) if key else found
    return keys, found
