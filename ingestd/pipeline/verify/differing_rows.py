"""The differing rows themselves: re-read in the source, folded row by row in the lake."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import date, datetime

import numpy as np
import pyarrow as pa

from ingestd.digests.row_digests import (
    RAW,
    ComparedValue,
    RawTexts,
    digests_of,
    given_by,
    key_digests,
    row_digests,
    value_hashes,
    values_of,
)
from ingestd.digests.value_hashes import Hashes
from ingestd.pipeline.verify.compare import Differing, TableCompared
from ingestd.ports import Split
from ingestd.ports.verify import (
    Difference,
    Digested,
    Kind,
    ValueRows,
    VerifiedLake,
    VerifiedSource,
)

MASKED = "(masked)"


class DifferingRows:
    """Describes differences of a table. `splits`: those by which its rows were read."""

    def __init__(
        self,
        source: VerifiedSource,
        lake: VerifiedLake,
        digested: Digested,
        splits: Sequence[Split],
        *,
        with_values: bool,
    ) -> None:
        self._source = source
        self._lake = lake
        self._digested = digested
        self._splits = splits
        self._with_values = with_values

    async def named(self, comparison: TableCompared, limit: int) -> tuple[Difference, ...]:
        """Examine the first differences; those that are equal after all are dropped."""
        digested = self._digested
        shown = comparison.some(limit)
        keys = {d.key for d in shown}
        lake = _by_key(await self._lake.rows_of(digested, keys), digested)
        source = _by_key(await self._rows_of(shown), digested)
        found = []
        for one in shown:
            difference = self._named(one, source.get(one.key, []), lake.get(one.key, []))
            if difference is None:
                comparison.drop(one)
            else:
                found.append(difference)
        return tuple(found)

    async def _rows_of(self, shown: Sequence[Differing]) -> ValueRows:
        """Re-read the splits that contain them."""
        wanted: dict[int, set[int]] = defaultdict(set)
        for one in shown:
            if one.split is not None:
                wanted[one.split].add(one.key)
        found: ValueRows = []
        for number, keys in sorted(wanted.items()):
            async with contextlib.aclosing(self._source.batches(self._splits[number])) as batches:
                async for batch in batches:
                    found += await asyncio.to_thread(_chosen, batch, self._digested, keys)
        return found

    def _named(self, one: Differing, source: ValueRows, lake: ValueRows) -> Difference | None:
        digested = self._digested
        columns: tuple[str, ...] = ()
        if one.kind is Kind.DIFFERENT:
            if not (source and lake):
                return Difference(one.kind, _key_of([*source, *lake], one, digested))
            columns = _differing(source[0], lake[0], digested)
            if not columns:
                return None
        shown = columns or tuple(c.name for c in digested.columns)
        with_values = self._with_values
        return Difference(
            one.kind,
            _key_of([*source, *lake], one, digested),
            columns,
            one.count,
            _texts(source, shown, digested) if with_values else {},
            _texts(lake, shown, digested) if with_values else {},
        )


def _chosen(batch: pa.RecordBatch, digested: Digested, keys: Collection[int]) -> ValueRows:
    """Return the rows with these keys as values."""
    hashes, _ = digests_of(batch, digested.columns, digested.key)
    flags = np.isin(hashes, np.fromiter(keys, np.uint64, len(keys)))
    if not flags.any():
        return []
    batch = batch.filter(pa.array(flags))
    raw = RawTexts(batch.column(RAW))
    values = [values_of(c, given_by(batch), raw, batch.num_rows) for c in digested.columns]
    names = [c.name for c in digested.columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]


def _by_key(rows: ValueRows, digested: Digested) -> Mapping[int, ValueRows]:
    hashes: dict[int, Hashes] = {
        i: value_hashes([row[c.name] for row in rows], c.type)
        for i, c in enumerate(digested.columns)
    }
    count = len(rows)
    if digested.key:
        kinds = [c.type for c in digested.columns]
        keys = key_digests(((hashes[i], kinds[i]) for i in digested.key), count)
    else:
        keys = row_digests(hashes, count)
    found: dict[int, ValueRows] = defaultdict(list)
    for key, row in zip(keys.tolist(), rows, strict=True):
        found[key].append(row)
    return found


def _differing(
    source: Mapping[str, ComparedValue], lake: Mapping[str, ComparedValue], digested: Digested
) -> tuple[str, ...]:
    found = []
    for column in digested.columns:
        ours, theirs = value_hashes([source[column.name], lake[column.name]], column.type)
        if ours != theirs:
            found.append(column.name)
    return tuple(found)


def _key_of(rows: ValueRows, one: Differing, digested: Digested) -> Mapping[str, str | None]:
    """Return the texts of a row's key; a hash if it has none, or the row no longer exists."""
    if not digested.key or not rows:
        return {"row": f"{one.key:016x}"}
    return _texts(rows, tuple(digested.columns[i].name for i in digested.key), digested)


def _texts(rows: ValueRows, names: Sequence[str], digested: Digested) -> Mapping[str, str | None]:
    if not rows:
        return {}
    masked = {c.name for c in digested.columns if c.is_masked}
    return {n: MASKED if n in masked else text(rows[0][n]) for n in names}


def text(value: ComparedValue) -> str | None:
    """Return a value as text for display."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        return value.isoformat(" ")
    if isinstance(value, date):
        return value.isoformat()
    return str(value)
