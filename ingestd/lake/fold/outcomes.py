"""Outcomes: what some changes make of each key's row, which they do not have completely.

And their fold row by row, for the few rows that `ingestd.lake.fold.vectorized` can't fold. Only
keys become Python values: the fold decides which change each value is taken from, and Arrow takes
it. A value is *unsent* if an update did not send it, and *kept* if it is from the row before the
changes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingestd.lake.fold.plain import hashable
from ingestd.model.changes import DELETE, OF_BEFORE, UPDATE, field_of

DELETED = "_cdc_deleted"
"""Column of an outcome: whether the key's row no longer exists."""
KEPT = "_cdc_kept"
"""Column of an outcome: the columns that keep the value from before the changes."""

FoldKey = tuple[Hashable, ...]
_OF_NEWEST_CHANGE = ("_cdc_lsn", "_cdc_seq", "_cdc_ts")


@dataclass(frozen=True, slots=True)
class SourceText:
    """A value that its column can't represent, as the source's text."""

    text: str


@dataclass(slots=True)
class _Row:
    """A row as the changes show it. `at`: its newest change.

    `taken`: the columns whose value is from another change, and that change; -1 - i stands for the
    old row of change i. `kept`: the columns whose value is from before the changes, and the key
    that the row had then.
    """

    at: int
    taken: dict[str, int] = field(default_factory=dict)
    kept: dict[str, FoldKey] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Deleted:
    at: int


@dataclass(frozen=True, slots=True)
class FoldedChanges:
    """One row per key that the changes affect.

    `outcomes`: the source columns, `_cdc_raw`, `newest_change_columns`, DELETED, KEPT.
    `kept_under_old_key`: kept values of rows whose key changed, not named in KEPT: (number of the
    outcome, column, key of the row before the changes).
    """

    outcomes: pa.Table
    kept_under_old_key: Sequence[tuple[int, str, FoldKey]]


def fold_row_by_row(changes: pa.Table, columns: Sequence[str], key: Sequence[str]) -> FoldedChanges:
    """Fold rows of a raw table, in any order and without `t`, to one outcome per key.

    `columns`: the source columns, all in `changes`; `key` is among them.
    """
    changes = changes.combine_chunks()
    rows = _fold(changes, columns, key)
    return _outcomes(changes, rows, columns, key)


def newest_change_columns(changes: pa.Table) -> list[str]:
    """Return the `_cdc_` columns that an outcome has from the key's newest change."""
    return [name for name in _OF_NEWEST_CHANGE if name in changes.column_names]


def keys_of(changes: pa.Table, key: Sequence[str]) -> list[FoldKey]:
    """Return each row's key: its values, or the source's text of an unrepresentable one."""
    raws = _raws(changes)
    return [_key(values, raws.get(i), "", key) for i, values in enumerate(_tuples(changes, key))]


def old_keys_of(changes: pa.Table, key: Sequence[str]) -> dict[int, FoldKey]:
    """Return the old key of each update that changed its key, by the row's number."""
    before = changes["_cdc_before"]
    if before.null_count == len(before):
        return {}
    raws = _raws(changes)
    found: dict[int, FoldKey] = {}
    ops = changes["_cdc_op"].to_pylist()
    fields = {f.name for f in before.type}
    if not fields.issuperset(key):
        return {}
    for i, old in enumerate(before.to_pylist()):
        if old is not None and ops[i] == UPDATE:
            found[i] = _key(tuple(old[k] for k in key), raws.get(i), OF_BEFORE, key)
    return found


def _tuples(changes: pa.Table, names: Sequence[str]) -> list[tuple[Any, ...]]:
    return list(zip(*(changes[name].to_pylist() for name in names), strict=True))


def _raws(changes: pa.Table) -> dict[int, dict[str, str]]:
    raw = changes["_cdc_raw"]
    if raw.null_count == len(raw):
        return {}
    return {i: dict(pairs) for i, pairs in enumerate(raw.to_pylist()) if pairs}


def _key(
    values: tuple[Any, ...], raw: Mapping[str, str] | None, prefix: str, names: Sequence[str]
) -> FoldKey:
    texts = [None if raw is None else raw.get(prefix + name) for name in names]
    return tuple(
        hashable(value) if text is None else SourceText(text)
        for value, text in zip(values, texts, strict=True)
    )


def _fold(
    changes: pa.Table, columns: Sequence[str], key: Sequence[str]
) -> dict[FoldKey, _Row | _Deleted]:
    wanted = set(columns)
    lsn = changes["_cdc_lsn"].to_numpy()
    seq = changes["_cdc_seq"].to_numpy()
    ops = changes["_cdc_op"].to_pylist()
    unsent = changes["_cdc_unchanged"].to_pylist()
    keys, old_keys, sent_before = keys_of(changes, key), old_keys_of(changes, key), _Before(changes)
    rows: dict[FoldKey, _Row | _Deleted] = {}
    for i in np.lexsort((seq, lsn)).tolist():
        mine = keys[i]
        if ops[i] == DELETE:
            rows[mine] = _Deleted(i)
            continue
        origin = old_keys.get(i, mine)
        previous = rows.get(origin)
        if origin != mine:
            rows[origin] = _Deleted(i)
        row = rows[mine] = _Row(i)
        for name in (n for n in unsent[i] or () if n in wanted):
            if sent_before.has(i, name):
                row.taken[name] = -1 - i
            elif previous is None:
                row.kept[name] = origin
            elif isinstance(previous, _Row):
                if name in previous.kept:
                    row.kept[name] = previous.kept[name]
                else:
                    row.taken[name] = previous.taken.get(name, previous.at)
    return rows


class _Before:
    """Tests whether the old row of a change has a value."""

    def __init__(self, changes: pa.Table) -> None:
        self._changes = changes
        self._fields = {f.name for f in changes["_cdc_before"].type}
        self._there: dict[str, Any] = {}
        self._raws = _raws(changes)

    def has(self, i: int, name: str) -> bool:
        if name not in self._fields:
            return False
        if name not in self._there:
            self._there[name] = (
                before_column(self._changes, name).is_valid().to_numpy(zero_copy_only=False)
            )
        return bool(self._there[name][i]) or OF_BEFORE + name in self._raws.get(i, {})


def before_column(changes: pa.Table, name: str) -> pa.Array:
    """Return the old rows' values of a column; null where there is no old row."""
    return field_of(changes["_cdc_before"], name).combine_chunks()


def _outcomes(
    changes: pa.Table,
    rows: Mapping[FoldKey, _Row | _Deleted],
    columns: Sequence[str],
    key: Sequence[str],
) -> FoldedChanges:
    found = list(rows.items())
    newest = np.fromiter((row.at for _, row in found), np.int64, len(found))
    under_old_key: list[tuple[int, str, FoldKey]] = []
    kept: list[list[str] | None] = [None] * len(found)
    taken: dict[str, dict[int, int | None]] = {}
    for number, (mine, row) in enumerate(found):
        if isinstance(row, _Deleted):
            continue
        for name, i in row.taken.items():
            taken.setdefault(name, {})[number] = i
        for name, whose in row.kept.items():
            taken.setdefault(name, {})[number] = None
            if whose == mine:
                kept[number] = [*(kept[number] or []), name]
            else:
                under_old_key.append((number, name, whose))
    # If a key is deleted because it changed, its value is in the change's old row.
    ops = changes["_cdc_op"].to_pylist()
    renamed = {
        n: row.at
        for n, (_, row) in enumerate(found)
        if isinstance(row, _Deleted) and ops[row.at] != DELETE
    }
    arrays = []
    for name in columns:
        sources: dict[int, int | None] = dict(taken.get(name, {}))
        if name in key:
            sources |= {n: -1 - i for n, i in renamed.items()}
        arrays.append(_newest_values(changes, name, newest, sources))
    raws = _outcome_raws(changes, found, taken, renamed)
    deleted = [isinstance(row, _Deleted) for _, row in found]
    table = pa.table(
        {
            **dict(zip(columns, arrays, strict=True)),
            "_cdc_raw": raws,
            **{name: changes[name].take(newest) for name in newest_change_columns(changes)},
            DELETED: pa.array(deleted, pa.bool_()),
            KEPT: pa.array(kept, pa.list_(pa.string())),
        }
    )
    return FoldedChanges(table, under_old_key)


def _newest_values(
    changes: pa.Table,
    name: str,
    newest: NDArray[np.int64],
    sources: Mapping[int, int | None],
) -> pa.Array | pa.ChunkedArray:
    column = changes[name]
    if not sources:
        return column.take(newest)
    values = column.combine_chunks()
    count = len(values)
    if any(i is not None and i < 0 for i in sources.values()):
        values = pa.concat_arrays([values, before_column(changes, name).cast(values.type)])
    indices = newest.copy()
    absent = np.zeros(len(indices), bool)
    for number, i in sources.items():
        if i is None:
            absent[number] = True
        else:
            indices[number] = i if i >= 0 else count - 1 - i
    return values.take(pa.array(indices, mask=absent))


def _outcome_raws(
    changes: pa.Table,
    rows: Sequence[tuple[FoldKey, _Row | _Deleted]],
    taken: Mapping[str, Mapping[int, int | None]],
    renamed: Mapping[int, int],
) -> pa.Array:
    """Return the `_cdc_raw` of the outcomes: each text follows its value."""
    raws = _raws(changes)
    outcomes: list[list[tuple[str, str]] | None] = [None] * len(rows)
    if raws:
        for number, (_, row) in enumerate(rows):
            if number in renamed:
                texts = _old_texts(raws.get(row.at, {}))
            else:
                own = raws.get(row.at, {})
                texts = {k: v for k, v in own.items() if not k.startswith(OF_BEFORE)}
            for name, sources in taken.items():
                if number in sources:
                    texts.pop(name, None)
                    text = _text(raws, sources[number], name)
                    if text is not None:
                        texts[name] = text
            outcomes[number] = sorted(texts.items()) or None
    return pa.array(outcomes, pa.map_(pa.string(), pa.string()))


def _old_texts(raw: Mapping[str, str]) -> dict[str, str]:
    return {k.removeprefix(OF_BEFORE): v for k, v in raw.items() if k.startswith(OF_BEFORE)}


def _text(raws: Mapping[int, Mapping[str, str]], i: int | None, name: str) -> str | None:
    if i is None:
        return None
    return raws.get(i, {}).get(name) if i >= 0 else raws.get(-1 - i, {}).get(OF_BEFORE + name)
