"""A model of a server that streams open transactions: what pgoutput sends, and when.

Sessions write to a few relations inside savepoints; definitions change, by small transactions and
inside of the open ones, undone with them. As in pgoutput.c, the server remembers which definitions
it has told, for ordinary transactions and for each streamed one (`Entry`).
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field

from tests.unit.decode import pgoutput

OIDS = (1, 2, 3)


@dataclass
class Entry:
    """pgoutput's RelationSyncEntry."""

    version: int = -1
    schema_sent: bool = False
    streamed: set[int] = field(default_factory=set)


@dataclass
class Change:
    xid: int
    oid: int
    version: int
    text: str

    def message(self) -> bytes:
        return pgoutput.insert(self.oid, [self.text.encode()])


@dataclass
class Level:
    """A (sub-)transaction; `xid` from its first write on. `children`: those that were released."""

    xid: int | None = None
    children: list[int] = field(default_factory=list)
    altered: dict[int, int] = field(default_factory=dict)


@dataclass
class Transaction:
    levels: list[Level] = field(default_factory=lambda: [Level()])
    pending: list[Change] = field(default_factory=list)
    made: list[Change] = field(default_factory=list)
    streamed: set[int] = field(default_factory=set)
    touched: set[int] = field(default_factory=set)
    is_replicated: bool = False

    @property
    def xid(self) -> int:
        assert self.levels[0].xid is not None
        return self.levels[0].xid

    @property
    def is_streamed(self) -> bool:
        return self.levels[0].xid in self.streamed


class Server:
    """Writes `steps` random steps' worth of messages to `wire`; `committed` is what they mean.

    `replicated`: the commit LSNs of those that have a replication origin.
    """

    def __init__(self, rng: random.Random, first_xid: int) -> None:
        self.rng = rng
        self.wire: list[bytes] = []
        self.committed: list[tuple[int, list[Change]]] = []
        self.replicated: list[int] = []
        self.open: list[Transaction] = [Transaction() for _ in range(3)]
        self.entries = {oid: Entry() for oid in OIDS}
        self.versions = dict.fromkeys(OIDS, 0)
        self.next_version = 1
        self.next_xid = first_xid
        self.lsn = 100
        self.changes = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            transaction = self.rng.choice(self.open)
            step = self.rng.choices(
                (
                    self.write,
                    self.savepoint,
                    self.release,
                    self.roll_back,
                    self.stream,
                    self.commit,
                    self.abort,
                    self.alter,
                    self.alter_beside,
                ),
                (40, 12, 8, 8, 12, 5, 2, 3, 3),
            )[0]
            step(transaction)
        for transaction in list(self.open):
            self.commit(transaction)

    # --- what sessions do --------------------------------------------------------------------

    def write(self, transaction: Transaction) -> None:
        oid = self.rng.choice(OIDS)
        if self.is_locked(oid, transaction):
            return
        self.assign(transaction)
        xid = transaction.levels[-1].xid
        assert xid is not None
        self.changes += 1
        version = self.seen(transaction, oid)
        change = Change(xid, oid, version, f"{self.changes}/v{version}")
        transaction.touched.add(oid)
        transaction.pending.append(change)
        transaction.made.append(change)

    def savepoint(self, transaction: Transaction) -> None:
        if len(transaction.levels) < 5:
            transaction.levels.append(Level())

    def release(self, transaction: Transaction) -> None:
        if len(transaction.levels) > 1:
            level = transaction.levels.pop()
            parent = transaction.levels[-1]
            parent.altered |= level.altered
            if level.xid is not None:
                parent.children += [*level.children, level.xid]

    def roll_back(self, transaction: Transaction) -> None:
        if len(transaction.levels) > 1:
            self.end_badly(transaction, transaction.levels.pop())

    def abort(self, transaction: Transaction) -> None:
        while len(transaction.levels) > 1:
            self.roll_back(transaction)
        self.end_badly(transaction, transaction.levels[0])
        self.replace(transaction)

    def alter(self, transaction: Transaction) -> None:
        """DDL in the transaction: no other one can have written to the relation."""
        oid = self.rng.choice(OIDS)
        others = [t for t in self.open if t is not transaction]
        if self.is_locked(oid, transaction) or any(oid in t.touched for t in others):
            return
        self.assign(transaction)
        transaction.levels[-1].altered[oid] = self.new_version()

    def alter_beside(self, _: Transaction) -> None:
        """What needs no lock that writers hold, such as a publication's column list."""
        oid = self.rng.choice(OIDS)
        if not any(oid in level.altered for t in self.open for level in t.levels):
            self.versions[oid] = self.new_version()

    # --- what the server sends ---------------------------------------------------------------

    def stream(self, transaction: Transaction) -> None:
        if not transaction.pending:
            return
        is_first = not transaction.is_streamed
        self.wire.append(struct.pack(">cIB", b"S", transaction.xid, is_first))
        if is_first:
            self.tell_origin(transaction)
        for change in transaction.pending:
            self.send(change, transaction)
            transaction.streamed.add(change.xid)
        transaction.streamed.add(transaction.xid)
        transaction.pending = []
        self.wire.append(b"E")
        self.forget_altered(transaction)

    def tell_origin(self, transaction: Transaction) -> None:
        if self.rng.random() < 0.2:
            self.wire.append(b"O" + bytes(8) + b"origin\0")
            transaction.is_replicated = True

    def commit(self, transaction: Transaction) -> None:
        while len(transaction.levels) > 1:
            self.release(transaction)
        self.lsn += self.rng.randint(8, 90)
        lsn = self.lsn
        if transaction.is_streamed:
            self.stream(transaction)
            self.wire.append(struct.pack(">cIBQQq", b"c", transaction.xid, 0, lsn, lsn + 8, lsn))
            for entry in self.entries.values():
                entry.schema_sent |= transaction.xid in entry.streamed
                entry.streamed.discard(transaction.xid)
        elif transaction.made:
            self.wire.append(pgoutput.begin(lsn, ts=lsn, xid=transaction.xid))
            self.tell_origin(transaction)
            for change in transaction.pending:
                self.send(change, None)
            self.wire.append(pgoutput.commit(lsn, lsn + 8, ts=lsn))
        if transaction.is_streamed or transaction.made:
            self.committed.append((lsn, transaction.made))
            self.replicated += [lsn] * transaction.is_replicated
        self.forget_altered(transaction)
        self.versions |= transaction.levels[0].altered
        self.replace(transaction)

    def send(self, change: Change, streamed: Transaction | None) -> None:
        entry = self.entries[change.oid]
        if entry.version != change.version:
            self.entries[change.oid] = entry = Entry(change.version)
        told = entry.schema_sent if streamed is None else streamed.xid in entry.streamed
        if not told:
            columns = [(f"v{change.version}", 25, -1, False)]
            relation = pgoutput.relation(change.oid, "t", columns)
            self.put(relation, change.xid, streamed)
            if streamed is None:
                entry.schema_sent = True
            else:
                entry.streamed.add(streamed.xid)
        self.put(change.message(), change.xid, streamed)

    def put(self, message: bytes, xid: int, streamed: Transaction | None) -> None:
        prefix = b"" if streamed is None else struct.pack(">I", xid)
        self.wire.append(message[:1] + prefix + message[1:])

    def end_badly(self, transaction: Transaction, level: Level) -> None:
        gone = [*sorted(level.children, key=self.age, reverse=True), level.xid]
        for xid in gone:
            if xid in transaction.streamed:
                assert xid is not None
                self.wire.append(struct.pack(">cII", b"A", transaction.xid, xid))
                for entry in self.entries.values():
                    entry.streamed.discard(transaction.xid)
        transaction.pending = [c for c in transaction.pending if c.xid not in gone]
        transaction.made = [c for c in transaction.made if c.xid not in gone]
        for oid in level.altered:
            self.entries[oid] = Entry()

    # --- inside ------------------------------------------------------------------------------

    def assign(self, transaction: Transaction) -> None:
        for level in transaction.levels:
            if level.xid is None:
                level.xid = self.next_xid
                self.next_xid = (self.next_xid + 1) % 2**32 or 3

    def age(self, xid: int) -> int:
        return (self.next_xid - xid) % 2**32

    def seen(self, transaction: Transaction, oid: int) -> int:
        for level in reversed(transaction.levels):
            if oid in level.altered:
                return level.altered[oid]
        return self.versions[oid]

    def is_locked(self, oid: int, transaction: Transaction) -> bool:
        others = (t for t in self.open if t is not transaction)
        return any(oid in level.altered for t in others for level in t.levels)

    def new_version(self) -> int:
        self.next_version += 1
        return self.next_version

    def forget_altered(self, transaction: Transaction) -> None:
        """The transaction's own invalidations, run whenever its snapshot is put away."""
        for level in transaction.levels:
            for oid in level.altered:
                self.entries[oid] = Entry()

    def replace(self, transaction: Transaction) -> None:
        self.open[self.open.index(transaction)] = Transaction()
