"""A plain, row-by-row computation of row versions from a change log, to compare histories with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
Position = tuple[int, int]


@dataclass(slots=True)
class Version:
    values: dict[str, Any]
    op: str
    begin: Position
    unknown: set[str] = field(default_factory=set)
    end: Position | None = None

    def as_tuple(self, columns: Sequence[str]) -> tuple[Any, ...]:
        values = tuple(self.values[n] for n in columns)
        return (*values, self.op, self.begin, self.end, tuple(sorted(self.unknown)))


def position(row: Row) -> Position:
    return (row["_cdc_lsn"], row["_cdc_seq"])


def is_snapshot(row: Row) -> bool:
    return bool(row["_cdc_op"] == "t" and row["_cdc_seq"] < 0)


def keyed_history(rows: Sequence[Row], columns: Sequence[str], key: Sequence[str]) -> list[Version]:
    """Return the versions of rows in any order. Rows below the first snapshot are ignored."""
    rows = sorted(rows, key=position)
    first = next((position(r) for r in rows if is_snapshot(r)), (0, 0))
    rows = [r for r in rows if position(r) >= first]
    fold = _Keyed(columns, key, _by_key(rows, columns, key))
    for row in rows:
        fold.take(row)
    return fold.versions


class _Keyed:
    def __init__(
        self,
        columns: Sequence[str],
        key: Sequence[str],
        events: dict[Hashable, list[tuple[Position, bool]]],
    ) -> None:
        self.versions: list[Version] = []
        self._columns, self._key, self._events = columns, key, events
        self._current: dict[Hashable, Version] = {}

    def take(self, row: Row) -> None:
        if row["_cdc_op"] == "t":
            for at in list(self._current):
                if not (is_snapshot(row) and self._is_there(at, row)):
                    self._end(at, row)
            return
        old, new = _old_key(row, self._columns, self._key), _key(row, self._key)
        version = Version(_values(row, self._columns), row["_cdc_op"], position(row))
        if row["_cdc_op"] == "d":
            self._end(new, row)
            version.end = position(row)
            self.versions.append(version)
            return
        self._fill(version, row, self._current.get(old))
        there = self._current.get(new)
        if row["_cdc_op"] == "r" and there is not None and there.values == version.values:
            return
        self._end(old, row)
        self._end(new, row)
        self._current[new] = version
        self.versions.append(version)

    def _is_there(self, at: Hashable, marker: Row) -> bool:
        """Return whether the key's next event shows that its row existed at the marker."""
        later = [e for e in self._events.get(at, ()) if e[0] > position(marker)]
        return bool(later) and not later[0][1]

    def _end(self, at: Hashable, row: Row) -> None:
        found = self._current.pop(at, None)
        if found is not None:
            found.end = position(row)

    @staticmethod
    def _fill(version: Version, row: Row, was: Version | None) -> None:
        version.unknown = set(row["_cdc_unchanged"] or ())
        if was is None:
            return
        for name in set(version.unknown):
            version.values[name] = was.values[name]
            if name not in was.unknown:
                version.unknown.discard(name)


def keyless_history(rows: Sequence[Row], columns: Sequence[str]) -> list[Version]:
    """Return the versions of a table without a key. Its rows begin with a snapshot."""
    rows = sorted(rows, key=position)
    fold = _Keyless(columns, rows)
    for row in rows:
        fold.take(row)
    return fold.versions


class _Keyless:
    def __init__(self, columns: Sequence[str], rows: Sequence[Row]) -> None:
        self.versions: list[Version] = []
        self._columns, self._rows = columns, rows
        self._current: dict[Hashable, list[Version]] = {}
        self._new: Counter[tuple[int, Hashable]] = Counter()

    def take(self, row: Row) -> None:
        op, values = row["_cdc_op"], _values(row, self._columns)
        if op == "t":
            self._count_anew(row)
            return
        if op == "r":
            self._new[row["_cdc_lsn"], self._whole(values)] -= 1
            if self._new[row["_cdc_lsn"], self._whole(values)] < 0:
                return
        if op in "du":
            before = values if op == "d" else _before(row, self._columns)
            for name in row["_cdc_unchanged"] or ():
                values[name] = before[name]
            equal = self._current.get(self._whole(before))
            if equal:
                equal.pop(0).end = position(row)
        if op != "d":
            version = Version(values, op, position(row))
            self.versions.append(version)
            self._current.setdefault(self._whole(values), []).append(version)

    def _count_anew(self, marker: Row) -> None:
        read = self._read(marker)
        for whole, found in self._current.items():
            while len(found) > read[whole]:
                found.pop(0).end = position(marker)
        for whole, count in read.items():
            new = count - len(self._current.get(whole, ()))
            self._new[marker["_cdc_lsn"], whole] = new

    def _read(self, marker: Row) -> Counter[Hashable]:
        """Return how often this marker's snapshot read each row; none for a TRUNCATE."""
        return Counter(
            self._whole(_values(r, self._columns))
            for r in self._rows
            if is_snapshot(marker) and r["_cdc_op"] == "r" and r["_cdc_lsn"] == marker["_cdc_lsn"]
        )

    def _whole(self, values: Row) -> Hashable:
        return tuple(values[n] for n in self._columns)


def _by_key(
    rows: Sequence[Row], columns: Sequence[str], key: Sequence[str]
) -> dict[Hashable, list[tuple[Position, bool]]]:
    """Return the events of each key: the position, and whether a row comes to the key."""
    events: dict[Hashable, list[tuple[Position, bool]]] = {}
    for row in rows:
        if row["_cdc_op"] == "t":
            continue
        old, new = _old_key(row, columns, key), _key(row, key)
        comes = row["_cdc_op"] == "c" or old != new
        events.setdefault(new, []).append((position(row), comes))
        if old != new:
            events.setdefault(old, []).append((position(row), False))
    return events


def _values(row: Row, columns: Sequence[str]) -> dict[str, Any]:
    raw = dict(row["_cdc_raw"] or ())
    return {n: ("raw", raw[n]) if n in raw else row.get(n) for n in columns}


def _before(row: Row, columns: Sequence[str]) -> dict[str, Any]:
    raw, before = dict(row["_cdc_raw"] or ()), row["_cdc_before"]
    texts = {n: raw.get(f"_cdc_before.{n}") for n in columns}
    return {n: ("raw", text) if text is not None else before.get(n) for n, text in texts.items()}


def _key(row: Row, key: Sequence[str]) -> Hashable:
    return tuple(_values(row, key).values())


def _old_key(row: Row, columns: Sequence[str], key: Sequence[str]) -> Hashable:
    if row["_cdc_op"] != "u" or row["_cdc_before"] is None:
        return _key(row, key)
    return tuple(_before(row, columns)[n] for n in key)
