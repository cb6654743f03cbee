"""A table that logs its changes as a server does, written to a lake by the real sink."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ingestd.lake.delta_lake import DeltaLake
from ingestd.model.changes import EpochSummary, TableBatch, change_schema
from ingestd.model.lake_state import TableEvent, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Column, Table, TableId
from ingestd.testing.oracle.server_text import text_function

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable
    from pathlib import Path

    from ingestd.testing.oracle.folding import Texts

Row = dict[str, Any]
SOURCE = "shop"
NAME = TableId("public", "orders")
START = datetime(2026, 1, 2, tzinfo=UTC)
TOASTED = ("note", "tags")
NAN = "NaN"
"""Of `amount`: a value that its column can't hold."""
KEYED = Table(
    NAME,
    1,
    (
        Column("id", 23, -1, pa.int32(), "integer", identity=True),
        Column("part", 25, -1, pa.string(), "text", identity=True),
        Column("amount", 1700, -1, pa.decimal128(10, 2), "numeric(10,2)"),
        Column("note", 25, -1, pa.string(), "text"),
        Column("tags", 1009, -1, pa.list_(pa.field("element", pa.string())), "text[]"),
    ),
    "d",
    ("id", "part"),
    ("id", "part"),
)
KEYLESS = replace(
    KEYED,
    columns=tuple(replace(c, identity=False) for c in KEYED.columns),
    replica_identity="f",
    key=(),
    before=tuple(c.name for c in KEYED.columns),
)
ADDED = Column("extra", 23, -1, pa.int32(), "integer", missing="5")


class SimulatedTable:
    """`rows`: of the source now. `cuts`: its rows at the end of each epoch, as texts.

    `versions`: each change, with all of its values.
    """

    def __init__(self, path: Path, table: Table, choices: random.Random) -> None:
        self.table = table
        self.rows: list[Row] = []
        self.cuts: list[Counter[Texts]] = []
        self.versions: list[Row] = []
        self._choices = choices
        self._sink = DeltaLake(str(path), SOURCE)
        self._lsn, self._seq, self._events = 100, 0, 0
        self._pending: list[Row] = []
        self._reread: int | None = None

    async def begin(self) -> None:
        """Create the lake with a snapshot of some rows."""
        await self._sink.open()
        await self._sink.adopt("server")
        for _ in range(self._choices.randint(0, 6)):
            self._insert(logged=False)
        self._log("t", _cdc_seq=-1)
        for row in self.rows:
            self._log("r", **row, _cdc_seq=0)
        await self.commit_epoch()
        await self._record(TableState.LIVE)

    async def close(self) -> None:
        await self._sink.close()

    # --- changes ------------------------------------------------------------------------------

    def change(self) -> None:
        """Make a transaction of a few changes."""
        self._lsn += 10
        self._seq = 0
        for _ in range(self._choices.randint(1, 4)):
            action = self._choices.choices(
                (self._insert, self._update, self._delete, self._truncate), (4, 6, 2, 0.3)
            )[0]
            action()

    def _truncate(self) -> None:
        self.rows.clear()
        self._log("t")

    def _insert(self, *, logged: bool = True) -> None:
        row = self._new_row()
        if self.table.key and any(self._key(r) == self._key(row) for r in self.rows):
            return
        self.rows.append(row)
        if logged:
            self._log("c", **row)

    def _delete(self) -> None:
        if self.rows:
            row = self.rows.pop(self._choices.randrange(len(self.rows)))
            names = self.table.before if self.table.key else row
            self._log("d", **{n: row[n] for n in names})

    def _update(self) -> None:
        if not self.rows:
            return
        place = self._choices.randrange(len(self.rows))
        old, new = self.rows[place], self._new_row()
        is_taken = any(self._key(r) == self._key(new) for r in self.rows if r is not old)
        if self.table.key and (is_taken or self._choices.random() < 0.6):
            new |= {n: old[n] for n in self.table.key}
        unsent = [n for n in TOASTED if old[n] is not None and self._choices.random() < 0.4]
        new |= {n: old[n] for n in unsent}
        self.rows[place] = new
        sent: Row = new | dict.fromkeys(unsent)
        if unsent:
            sent["_cdc_unchanged"] = unsent
        if not self.table.key or self._key(old) != self._key(new):
            sent["_cdc_before"] = {n: old[n] for n in self.table.before}
        self._log("u", **sent)
        self.versions[-1] |= {n: _as_stored(new)[n] for n in unsent}

    def _new_row(self) -> Row:
        pick = self._choices.choice
        row = {
            "id": pick(range(4)),
            "part": pick(["x", "y"]),
            "amount": pick([None, "1.50", "-2.00", NAN]),
            "note": pick([None, "", "n", "m"]),
            "tags": pick([None, [], ["t", None]]),
            "extra": pick([None, 5, 6]),
        }
        return {c.name: row[c.name] for c in self.table.columns}

    def _key(self, row: Row) -> tuple[Any, ...]:
        return tuple(row[n] for n in self.table.key)

    def _log(self, op: str, **row: Any) -> None:
        self._seq += 1
        place = {"_cdc_op": op, "_cdc_lsn": self._lsn, "_cdc_seq": self._seq, "_cdc_ts": self._at()}
        self._pending.append(_as_stored(place | row))
        self.versions.append(dict(self._pending[-1]))

    # --- DDL and snapshots ----------------------------------------------------------------------

    async def add_column(self) -> None:
        """Add a column with a constant default: earlier rows are not written again."""
        self._lsn += 10
        self.table = replace(self.table, columns=(*self.table.columns, ADDED))
        if not self.table.key:
            self.table = replace(self.table, before=tuple(c.name for c in self.table.columns))
        for row in self.rows:
            row["extra"] = 5
        await self._record(TableState.LIVE)

    async def begin_reread(self) -> None:
        """Begin an incremental snapshot, as an operator requested."""
        self._reread = self._lsn
        await self._record(TableState.SNAPSHOTTING, progress="again|")

    def read_chunk(self, part: str) -> None:
        """Read the rows with one value of `part`, at the present position."""
        self._lsn += 10
        for row in self.rows:
            if row["part"] == part:
                self._log("r", **row, _cdc_seq=0)

    async def end_reread(self) -> None:
        """Void all earlier rows."""
        assert self._reread is not None
        self._log("t", _cdc_seq=-1, _cdc_lsn=self._reread)
        await self.commit_epoch()
        await self._record(TableState.LIVE)
        self._reread = None

    # --- the lake -------------------------------------------------------------------------------

    async def commit_epoch(self) -> None:
        """Commit what is pending, if anything, and note the rows of the source."""
        if not self._pending:
            return
        schema = change_schema(self.table)
        arrays = [pa.array([row.get(f.name) for row in self._pending], f.type) for f in schema]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        writer = self._sink.begin_epoch()
        await writer.append_batch(TableBatch(self.table, batch, 1), from_snapshot=True)
        end = Lsn(self._lsn + 5)
        await writer.commit(EpochSummary(end, end, self._at(), 1, 1))
        self._pending = []
        self.cuts.append(self.texts())

    async def _record(self, state: TableState, progress: str = "") -> None:
        self._events += 1
        at = START + timedelta(microseconds=self._events)
        event = TableEvent(self.table, state, at, Lsn(self._lsn), Lsn(100), progress=progress)
        await self._sink.record([event])

    def _at(self) -> datetime:
        return START + timedelta(seconds=self._lsn)

    def texts(self) -> Counter[Texts]:
        """Return the rows of the source as texts."""
        stored = (_as_stored(row) for row in self.rows)
        schema = pa.schema([(c.name, c.type) for c in self.table.columns])
        return as_texts(stored, schema)


def _as_stored(row: Row) -> Row:
    """Return a row with the text of a value that its column can't hold in `_cdc_raw`."""
    row, raw = dict(row), {}
    before = dict(row.get("_cdc_before") or {})
    for where, prefix in ((row, ""), (before, "_cdc_before.")):
        amount = where.get("amount")
        if amount == NAN:
            where["amount"], raw[f"{prefix}amount"] = None, NAN
        elif isinstance(amount, str):
            where["amount"] = pa.scalar(amount).cast(pa.decimal128(10, 2)).as_py()
    if before:
        row["_cdc_before"] = before
    return row | {"_cdc_raw": list(raw.items()) or None}


def as_texts(rows: Iterable[Row], schema: pa.Schema) -> Counter[Texts]:
    """Return rows as the server's texts. `schema`: of the columns, in order."""
    functions = {f.name: text_function(f.type) for f in schema if f.name != "_cdc_raw"}

    def text(row: Row, name: str) -> str | None:
        raw: dict[str, str] = dict(row.get("_cdc_raw") or ())
        if name in raw:
            assert row[name] is None, "a value and its text"
            return raw[name]
        return None if row[name] is None else functions[name](row[name])

    return Counter(tuple(text(row, name) for name in functions) for row in rows)
