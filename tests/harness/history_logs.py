"""Random change logs with late reads, key changes and unsent values, for tests of histories."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from tests.unit.lake.rows import AT

Row = dict[str, Any]


@dataclass
class KeyedLog:
    """A keyed table (id, note, big) that is written, and re-read now and then.

    `epochs`: their raw rows in order of arrival. `states`: the table after each transaction.
    """

    rng: random.Random
    keys: int = 6
    epochs: list[list[Row]] = field(default_factory=list)
    states: dict[int, dict[int, Row]] = field(default_factory=dict)
    _table: dict[int, Row] = field(default_factory=dict)
    _lsn: int = 1000
    _late: list[tuple[int, Row]] = field(default_factory=list)
    _open: list[Row] = field(default_factory=list)

    def first_load(self) -> None:
        for key in self.rng.sample(range(self.keys), self.keys * 2 // 3):
            self._table[key] = {"id": key, "note": self._note(), "big": f"big {key}"}
        self._lsn += 10
        self._open.append(self._row("t", seq=-1))
        self._open += [self._row("r", row, seq=0) for row in self._table.values()]
        self.states[self._lsn] = self._copy()

    def transaction(self, *, is_lost: bool = False) -> None:
        """Make a few changes. `is_lost`: the log does not get them."""
        self._lsn += self.rng.choice((1, 10))
        rows: list[Row] = []
        for seq in range(1, self.rng.choice((1, 2, 8)) + 1):
            change = self._change(seq)
            if change is not None:
                rows.append(change)
        if not is_lost:
            self._open += rows
        self.states[self._lsn] = self._copy()

    def read_anew(self, *, transactions: int, with_marker: bool = True) -> None:
        """Re-read in chunks between transactions; a chunk's rows come up to two epochs late."""
        self._lsn += 10
        marker = self._row("t", seq=-1)
        keys = list(range(self.keys))
        self.rng.shuffle(keys)
        size = -(-self.keys // 3)
        chunks = [keys[n : n + size] for n in range(0, self.keys, size)]
        for chunk in chunks:
            for _ in range(transactions):
                self.transaction()
            self._lsn += 10
            at = len(self.epochs) + self.rng.choice((0, 0, 1, 2))
            for key in chunk:
                if key in self._table:
                    self._late.append((at, self._row("r", self._table[key], seq=0)))
            for _ in range(transactions):
                self.transaction()
            self.close()
        while self._late:
            self.transaction()
            self.close()
        if with_marker:
            self._open.append(marker)
            self.transaction()
            self.close()

    def close(self) -> None:
        """End an epoch."""
        number = len(self.epochs)
        self._open += [row for at, row in self._late if at <= number]
        self._late = [(at, row) for at, row in self._late if at > number]
        self.epochs.append(self._open)
        self._open = []

    @property
    def lsn(self) -> int:
        return self._lsn

    def _change(self, seq: int) -> Row | None:
        rng, key = self.rng, self.rng.randrange(self.keys)
        there = self._table.get(key)
        if there is None:
            self._table[key] = {"id": key, "note": self._note(), "big": f"big {rng.random()}"}
            return self._row("c", self._table[key], seq=seq)
        choice = rng.random()
        if choice < 0.01:
            self._table.clear()
            return self._row("t", seq=seq)
        if choice < 0.2:
            del self._table[key]
            return self._row("d", {"id": key, "note": None, "big": None}, seq=seq)
        free = [k for k in range(self.keys) if k not in self._table]
        new = dict(there, note=self._note())
        before = None
        if choice < 0.5 and free:
            new["id"], before = rng.choice(free), {"id": key}
            del self._table[key]
        unsent = rng.random() < 0.6
        if not unsent:
            new["big"] = f"big {rng.random()}"
        self._table[new["id"]] = new
        sent = dict(new, big=None) if unsent else new
        row = self._row("u", sent, seq=seq)
        row["_cdc_before"], row["_cdc_unchanged"] = before, ["big"] if unsent else None
        return row

    def _note(self) -> Any:
        return self.rng.choice(("a", "b", None, ("raw", "\\xff")))

    def _copy(self) -> dict[int, Row]:
        return {key: dict(row) for key, row in self._table.items()}

    def _row(self, op: str, values: Row | None = None, *, seq: int) -> Row:
        return change(op, self._lsn, seq, values or {})


@dataclass
class KeylessLog:
    """A table of equal rows (id, note, big) that is re-read, each time at a consistent point."""

    rng: random.Random
    epochs: list[list[Row]] = field(default_factory=list)
    states: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)
    _table: list[tuple[Any, ...]] = field(default_factory=list)
    _lsn: int = 1000
    _open: list[Row] = field(default_factory=list)

    def read(self, *, late: int = 0) -> None:
        """Read at one point; rows and `t` come `late` transactions later, in a later epoch."""
        self._lsn += 10
        rows = [change("t", self._lsn, -1, {})]
        rows += [change("r", self._lsn, 0, self._named(row)) for row in self._table]
        self.states[self._lsn] = list(self._table)
        for _ in range(late):
            self.transaction()
        if late:
            self.close()
        self._open += rows

    def transaction(self, *, is_lost: bool = False) -> None:
        self._lsn += self.rng.choice((1, 10))
        for seq in range(1, self.rng.choice((1, 3, 5)) + 1):
            row = self._change(seq)
            if not is_lost:
                self._open.append(row)
        self.states[self._lsn] = list(self._table)

    def close(self) -> None:
        self.epochs.append(self._open)
        self._open = []

    def _change(self, seq: int) -> Row:
        rng = self.rng
        choice = rng.random()
        whole = (
            rng.randrange(2),
            rng.choice(("a", ("raw", "\\xff"), None)),
            rng.choice(("x", "y")),
        )
        if self._table and choice < 0.05:
            self._table.clear()
            return change("t", self._lsn, seq, {})
        if self._table and choice < 0.6:
            old = self._table.pop(rng.randrange(len(self._table)))
            if choice < 0.35:
                return change("d", self._lsn, seq, self._named(old), before=self._named(old))
            new = (whole[0], whole[1], old[2])
            self._table.append(new)
            sent = dict(self._named(new), big=None)
            row = change("u", self._lsn, seq, sent, before=self._named(old))
            row["_cdc_unchanged"] = ["big"]
            return row
        self._table.append(whole)
        return change("c", self._lsn, seq, self._named(whole))

    @staticmethod
    def _named(row: tuple[Any, ...]) -> Row:
        return dict(zip(("id", "note", "big"), row, strict=True))


def change(op: str, lsn: int, seq: int, values: Row, before: Row | None = None) -> Row:
    """Return a raw row. A value ("raw", text) goes to `_cdc_raw`."""
    raw = [(n, v[1]) for n, v in values.items() if isinstance(v, tuple)]
    row = {n: None if isinstance(v, tuple) else v for n, v in values.items()}
    if before is not None:
        raw += [(f"_cdc_before.{n}", v[1]) for n, v in before.items() if isinstance(v, tuple)]
        before = {n: None if isinstance(v, tuple) else v for n, v in before.items()}
    return {
        **row,
        "_cdc_op": op,
        "_cdc_lsn": lsn,
        "_cdc_seq": seq,
        "_cdc_ts": AT + timedelta(microseconds=lsn),
        "_cdc_before": before,
        "_cdc_unchanged": None,
        "_cdc_raw": raw or None,
    }
