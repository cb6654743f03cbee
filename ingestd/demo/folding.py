"""A raw table folded to its current rows: slowly, row by row, and obviously right.

The reference that the lake is judged by, so it shares no code with what writes it. Source: design
section 2, "the newest row per key by (`_cdc_lsn`, `_cdc_seq`) is the current row".
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ingestd.demo.server_text import FLOAT_TEXTS, text_function

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow as pa

Texts = tuple[str | None, ...]
"""A row as the server's texts, in the source's column order."""

_FAULTS_KEPT = 10


@dataclass(slots=True)
class Folded:
    """The current rows with how often each is there, and what can't be in a right change log.

    `changes`: rows of the raw table. `repeated`: rows whose position another row has already.
    """

    rows: Counter[Texts] = field(default_factory=Counter)
    changes: int = 0
    repeated: int = 0
    faults: list[str] = field(default_factory=list)

    _sound: int | None = None

    def fault(self, what: str) -> None:
        """Note a fault; the first few are enough."""
        if len(self.faults) < _FAULTS_KEPT:
            self.faults.append(what)

    def truncate(self, row: Mapping[str, Any]) -> None:
        """Take a `t`: a snapshot's voids what came before, sound or not.

        (Rows of a snapshot that a kill cut short have no `t` of their own.) The first one that is
        streamed after it excuses faults between: TRUNCATE is not MVCC-safe, a snapshot read after
        it sees none of the rows that were there at its point, though changes of them follow, until
        the TRUNCATE itself.
        """
        if row["_cdc_seq"] < 0:
            self.faults.clear()
            self._sound = 0
        elif self._sound is not None:
            del self.faults[self._sound :]
            self._sound = None


def fold(raw: pa.Table, columns: Sequence[str], key: Sequence[str]) -> Folded:
    """Fold a raw table (any row order) to the current rows of `columns`, texts as the server's.

    Without `key` the table is a multiset of whole rows (REPLICA IDENTITY FULL).
    """
    folded = Folded(changes=raw.num_rows)
    reader = _RowReader(raw.schema, columns)
    rows = sorted(raw.to_pylist(), key=lambda row: (row["_cdc_lsn"], row["_cdc_seq"]))
    _find_repeated(rows, folded)
    if key:
        _fold_keyed(rows, reader, [columns.index(name) for name in key], folded)
    else:
        _fold_multiset(rows, reader, folded)
    return folded


def _find_repeated(rows: Sequence[Mapping[str, Any]], folded: Folded) -> None:
    positions = Counter((r["_cdc_lsn"], r["_cdc_seq"]) for r in rows if r["_cdc_op"] != "r")
    folded.repeated = sum(count - 1 for count in positions.values())


def _fold_keyed(
    rows: Sequence[Mapping[str, Any]], reader: _RowReader, key: Sequence[int], folded: Folded
) -> None:
    state: dict[Texts, Texts] = {}
    for row in rows:
        op = row["_cdc_op"]
        if op == "t":
            state.clear()
            folded.truncate(row)
            continue
        texts = reader.texts(row)
        at = tuple(texts[i] for i in key)
        if op in "rc":
            if at in state:
                folded.fault(f"{_where(row)}: its key is there already")
            state[at] = texts
            continue
        before = reader.before(row)
        old = at if before is None else tuple(before[i] for i in key)
        previous = state.pop(old, None)
        if previous is None:
            folded.fault(f"{_where(row)}: no row has its old key")
        if op == "u":
            state[at] = reader.filled(row, texts, previous)
    folded.rows = Counter(state.values())


def _fold_multiset(rows: Sequence[Mapping[str, Any]], reader: _RowReader, folded: Folded) -> None:
    state: Counter[Texts] = Counter()
    for row in rows:
        op = row["_cdc_op"]
        if op == "t":
            state.clear()
            folded.truncate(row)
            continue
        texts = reader.texts(row)
        if op in "rc":
            state[texts] += 1
            continue
        old = texts if op == "d" else reader.before(row)
        if old is None or not state[old]:
            folded.fault(f"{_where(row)}: no row equals its old row")
        else:
            state[old] -= 1
        if op == "u":
            state[reader.filled(row, texts, old)] += 1
    folded.rows = +state


def _where(row: Mapping[str, Any]) -> str:
    return f"{row['_cdc_op']} at ({row['_cdc_lsn']}, {row['_cdc_seq']})"


class _RowReader:
    """Gives the texts of a raw row's columns, those of `_cdc_raw` in the place of nulls."""

    def __init__(self, schema: pa.Schema, columns: Sequence[str]) -> None:
        self._columns = tuple(columns)
        self._text: dict[str, Callable[[Any], str]] = {
            name: text_function(schema.field(name).type)
            for name in columns
            if schema.get_field_index(name) >= 0
        }

    def texts(self, row: Mapping[str, Any]) -> Texts:
        raw = dict(row["_cdc_raw"] or ())
        return tuple(self._one(name, row.get(name), raw.get(name)) for name in self._columns)

    def before(self, row: Mapping[str, Any]) -> Texts | None:
        old = row["_cdc_before"]
        if old is None:
            return None
        raw = dict(row["_cdc_raw"] or ())
        return tuple(
            self._one(name, old.get(name), raw.get(f"_cdc_before.{name}")) for name in self._columns
        )

    def filled(self, row: Mapping[str, Any], texts: Texts, previous: Texts | None) -> Texts:
        """Give `texts` with the values that the server did not send taken from `previous`."""
        unchanged = row["_cdc_unchanged"] or ()
        if not unchanged or previous is None:
            return texts
        pairs = zip(self._columns, texts, previous, strict=True)
        return tuple(old if name in unchanged else new for name, new, old in pairs)

    def _one(self, name: str, value: Any, raw: str | None) -> str | None:  # noqa: ANN401
        if raw is not None:
            text = self._text[name]
            return text(raw) if text in FLOAT_TEXTS else raw
        return None if value is None else self._text[name](value)
