"""A fold of a raw table to its current rows: slow, row by row, and obviously correct.

It is the reference for the lake, so it shares no code with the writer. Source: design section 2,
"the newest row per key by (`_cdc_lsn`, `_cdc_seq`) is the current row".
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ingestd.testing.oracle.schema_history import SchemaHistory
from ingestd.testing.oracle.server_text import FLOAT_TEXTS, text_function

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pyarrow as pa

Texts = tuple[str | None, ...]
"""A row as the server's texts, in the source's column order."""

_FAULTS_KEPT = 10


@dataclass(slots=True)
class FoldedTable:
    """The current rows with their counts, and contradictions found in the change log.

    `changes`: rows of the raw table. `repeated`: rows at the position of another row.
    """

    rows: Counter[Texts] = field(default_factory=Counter)
    changes: int = 0
    repeated: int = 0
    faults: list[str] = field(default_factory=list)

    reading_until: int = 0
    _sound: int | None = None

    def fault(self, row: Mapping[str, Any], what: str) -> None:
        """Record a fault, up to a maximum number.

        During an incremental snapshot, rows may be changed before they are read.
        """
        if row["_cdc_lsn"] > self.reading_until and len(self.faults) < _FAULTS_KEPT:
            self.faults.append(f"{_where(row)}: {what}")

    def truncate(self, row: Mapping[str, Any]) -> None:
        """Handle a `t`. That of a snapshot clears all earlier faults.

        (Rows of a snapshot that a kill interrupted have no `t`.) The first streamed `t` after it
        clears the faults between the two: TRUNCATE is not MVCC-safe. A snapshot read after it sees
        none of the rows that existed at its point, though their changes follow in the stream until
        the TRUNCATE itself.
        """
        if row["_cdc_seq"] < 0:
            self.faults.clear()
            self._sound = 0
        elif self._sound is not None:
            del self.faults[self._sound :]
            self._sound = None


def fold(
    raw: pa.Table,
    columns: Sequence[str],
    key: Sequence[str],
    history: SchemaHistory | None = None,
) -> FoldedTable:
    """Fold a raw table (any row order) to the current rows of `columns`, texts as the server's.

    `columns` and `key` are the source's current ones. Without `key` the table is a multiset of
    complete rows (REPLICA IDENTITY FULL). `history`: the lake columns of each column, and the
    identities over time; without it they have the same names.
    """
    folded = FoldedTable(changes=raw.num_rows)
    history = history or SchemaHistory()
    every = list(dict.fromkeys([*columns, *key, *history.identity_columns()]))
    reader = _RowReader(raw.schema, every, history)
    rows = sorted(raw.to_pylist(), key=lambda row: (row["_cdc_lsn"], row["_cdc_seq"]))
    _find_repeated(rows, folded)
    state = _FoldState(len(every))
    read_until = _read_until(rows, history)
    for row in rows:
        if _is_marker(row):
            folded.reading_until = read_until.pop(0)
        names = history.identities(row["_cdc_lsn"]) or [tuple(key)]
        identifying = [[every.index(n) for n in found or key] for found in names]
        _fold_row(row, reader, state, identifying, folded)
    folded.faults += reader.faults[:_FAULTS_KEPT]
    for texts in state.rows():
        folded.rows[texts[: len(columns)]] += 1
    return folded


def _is_marker(row: Mapping[str, Any]) -> bool:
    return bool(row["_cdc_seq"] < 0)


def _read_until(rows: Sequence[Mapping[str, Any]], history: SchemaHistory) -> list[int]:
    """Return for each marker where the read after it ended: its last row, or the recorded end.

    (If chunks were empty, no row shows the end. A read at a consistent point has all rows there.)
    """
    markers: list[tuple[int, list[int]]] = []
    for row in rows:
        if _is_marker(row):
            markers.append((row["_cdc_lsn"], []))
        elif markers and row["_cdc_op"] == "r":
            markers[-1][1].append(row["_cdc_lsn"])
    return [
        point if read and read[-1] == point else max([history.read_until(point), *read])
        for point, read in markers
    ]


def _find_repeated(rows: Sequence[Mapping[str, Any]], folded: FoldedTable) -> None:
    positions = Counter((r["_cdc_lsn"], r["_cdc_seq"]) for r in rows if r["_cdc_op"] != "r")
    folded.repeated = sum(count - 1 for count in positions.values())


def _fold_row(
    row: Mapping[str, Any],
    reader: _RowReader,
    state: _FoldState,
    identifying: Sequence[Sequence[int]],
    folded: FoldedTable,
) -> None:
    """Apply one row. `identifying`: indices of the columns by which its old row may be found."""
    op = row["_cdc_op"]
    if op == "t":
        state.clear()
        folded.truncate(row)
        return
    state.index_by(identifying[0])
    texts = reader.texts(row)
    if op in "rc":
        if not state.add(texts):
            folded.fault(row, "its key exists already")
        return
    before = texts if op == "d" else reader.before(row)
    old = texts if before is None else before
    previous = None
    for by in identifying:
        if previous is None and not (op == "u" and before is None and not by):
            state.index_by(by)
            previous = state.remove(old)
    if previous is None:
        what = "has its old key" if identifying[0] else "equals its old row"
        folded.fault(row, f"no row {what}")
    state.index_by(identifying[0])
    if op == "u":
        state.add(reader.filled(row, texts, previous))


def _where(row: Mapping[str, Any]) -> str:
    return f"{row['_cdc_op']} at ({row['_cdc_lsn']}, {row['_cdc_seq']})"


class _FoldState:
    """The current rows, indexed by the texts of some columns: a key, or (none) complete rows."""

    def __init__(self, width: int) -> None:
        self._every = tuple(range(width))
        self._places: tuple[int, ...] = ()
        self._found: dict[Texts, list[Texts]] = {}

    def rows(self) -> list[Texts]:
        return [texts for found in self._found.values() for texts in found]

    def clear(self) -> None:
        self._found.clear()

    def index_by(self, places: Sequence[int]) -> None:
        chosen = tuple(places)
        if chosen != self._places:
            rows, self._places, self._found = self.rows(), chosen, {}
            for texts in rows:
                self.add(texts)

    def add(self, texts: Texts) -> bool:
        """Add a row; return False if another row has its key."""
        found = self._found.setdefault(self._at(texts), [])
        is_alone = not (found and self._places)
        if not is_alone:
            found.clear()
        found.append(texts)
        return is_alone

    def remove(self, texts: Texts) -> Texts | None:
        """Remove the row (or one of several equal rows) and return it; None if it is missing."""
        at = self._at(texts)
        found = self._found.get(at)
        if not found:
            return None
        taken = found.pop()
        if not found:
            del self._found[at]
        return taken

    def _at(self, texts: Texts) -> Texts:
        return tuple(texts[place] for place in self._places or self._every)


class _RowReader:
    """Returns the texts of a raw row's columns, with those of `_cdc_raw` instead of nulls."""

    def __init__(self, schema: pa.Schema, columns: Sequence[str], history: SchemaHistory) -> None:
        self._columns = tuple(columns)
        self._lake = {name: history.lake_columns(name) for name in columns}
        self._text: dict[str, Callable[[Any], str]] = {
            name: text_function(schema.field(name).type)
            for names in self._lake.values()
            for name in names
            if schema.get_field_index(name) >= 0
        }
        self._beginnings = {name: history.beginning(name) for name in columns}
        self.faults: list[str] = []

    def texts(self, row: Mapping[str, Any]) -> Texts:
        """Return the row's texts; for columns added later, the value that older rows have."""
        return self._all(row, row, "")

    def before(self, row: Mapping[str, Any]) -> Texts | None:
        old = row["_cdc_before"]
        return None if old is None else self._all(row, old, "_cdc_before.")

    def filled(self, row: Mapping[str, Any], texts: Texts, previous: Texts | None) -> Texts:
        """Return `texts` with unsent values taken from the old row, or else from `previous`."""
        unchanged = set(row["_cdc_unchanged"] or ())
        if not unchanged:
            return texts
        before, filled = self.before(row), list(texts)
        for place, name in enumerate(self._columns):
            if unchanged.intersection(self._lake[name]):
                if before is not None and before[place] is not None:
                    filled[place] = before[place]
                elif previous is not None:
                    filled[place] = previous[place]
        return tuple(filled)

    def _all(self, row: Mapping[str, Any], values: Mapping[str, Any], prefix: str) -> Texts:
        raw = dict(row["_cdc_raw"] or ())
        found = []
        for name in self._columns:
            beginning = self._beginnings[name]
            if row["_cdc_lsn"] < beginning.lsn:
                found.append(self._as_missing(name, beginning.missing))
                continue
            texts = [self._one(n, values.get(n), raw.get(prefix + n)) for n in self._lake[name]]
            texts = [t for t in texts if t is not None]
            if len(texts) > 1:
                self.faults.append(f"{_where(row)}: column {name} has {len(texts)} values")
            found.append(texts[0] if texts else None)
        return tuple(found)

    def _as_missing(self, name: str, missing: str | None) -> str | None:
        functions = [self._text[n] for n in self._lake[name] if n in self._text]
        if missing is None or not functions or functions[-1] not in FLOAT_TEXTS:
            return missing
        return functions[-1](missing)

    def _one(self, name: str, value: Any, raw: str | None) -> str | None:  # noqa: ANN401
        if raw is not None:
            text = self._text[name]
            return text(raw) if text in FLOAT_TEXTS else raw
        return None if value is None else self._text[name](value)
