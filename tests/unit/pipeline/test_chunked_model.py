"""A table read in chunks inside the stream (docs/snapshots.md), against every interleaving.

The source is in memory: transactions get into the log in one order and become visible in another.
The lake is a list of change rows. Between them the decisions of a reading in chunks, each of which
can be left out, to see that the rest does not do without.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ingestd.lake.fold.plain import fold
from ingestd.model.changes import TRUNCATE, UPDATE, TableBatch, marker_batch
from ingestd.model.keys import Key
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.schema import Column, Table, TableId, with_before
from ingestd.pipeline.dedup_window import DedupWindow, RecentXids
from ingestd.testing.fakes.database import FakeChange, FakeDatabase, FakeTransaction
from ingestd.testing.fakes.rows import numbered, read_batch, stream_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = with_before(
    Table(
        TableId("public", "t"),
        1,
        (
            Column("id", 20, -1, pa.int64(), "bigint", identity=True, nullable=False),
            Column("note", 25, -1, pa.string(), "text"),
            Column("big", 25, -1, pa.string(), "text"),
        ),
        "d",
        ("id",),
    ),
    full=False,
)
KEYS = 5
BLOCKS = 4
WORKERS = 2
AT = datetime(2024, 1, 1, tzinfo=UTC)

Row = dict[str, Any]

RULES = frozenset(
    {
        "wait for commits of an earlier run",
        "wait for commits that were delivered",
        "leave out what was overtaken",
        "read unsent values",
        "read overtaken keys again",
        "find unsent values again",
        "have all durable before unsent values are looked for",
        "forget what all chunks see",
        "hold a chunk until the stream has passed it",
        "mark below all chunks",
        "record progress once it is durable",
        "start over in another file",
        "take the position after the snapshot",
    }
)


@dataclass(slots=True)
class ChangeSet:
    """Rows read, not placed yet."""

    seen: PgSnapshot
    position: Lsn
    rows: list[Row]
    blocks: frozenset[int] = frozenset()
    keys: frozenset[Key] = frozenset()


@dataclass(frozen=True, slots=True)
class Progress:
    """What `_tables` has of a reading."""

    point: Lsn
    filenode: int
    left: frozenset[int]


@dataclass(slots=True)
class Lake:
    """What is durable. `watermark`: of the raw table; `position`: of `_epochs`."""

    batches: list[TableBatch] = field(default_factory=list)
    position: Lsn = ZERO
    watermark: Lsn | None = None
    state: str = "new"
    progress: Progress | None = None

    def rows(self) -> list[Row]:
        if not self.batches:
            return []
        table = pa.Table.from_batches([b.rows for b in self.batches])
        return sorted(fold(table, T.key), key=lambda row: row["id"])

    def unsent(self, since: Lsn) -> list[TableBatch]:
        found = []
        for batch in self.batches:
            lsn = batch.rows.column("_cdc_lsn").to_numpy()
            found.append(TableBatch(T, batch.rows.filter(pa.array(lsn >= since)), 0))
        return found


class State(Enum):
    """Of a reading; see `ingestd.pipeline.snapshot_reader`."""

    AWAITED = "commits of an earlier run are awaited"
    RECORDED = "changes are noted from here on"
    DURABLE = "the lake has all that came before"
    READ = "chunks are read"
    CLOSED = "all blocks have been read"
    GIVEN = "nothing is left to be read"


@dataclass(slots=True)
class Reading:
    """A snapshot in chunks. `waits_for`: commits of an earlier run that are not visible yet."""

    waits_for: frozenset[int]
    resumed: Progress | None = None
    state: State = State.AWAITED
    point: Lsn = ZERO
    recorded_at: Lsn = ZERO
    filenode: int = 0
    left: set[int] = field(default_factory=set)
    chunks: dict[int, ChangeSet] = field(default_factory=dict)
    marks_last: bool = False

    @property
    def progress(self) -> Progress | None:
        if self.state in {State.AWAITED, State.RECORDED, State.DURABLE}:
            return self.resumed
        held = {block for chunk in self.chunks.values() for block in chunk.blocks}
        return Progress(self.point, self.filenode, frozenset(self.left | held))


class Daemon:
    """The decisions. `without` names the one that is left out."""

    def __init__(self, base: FakeDatabase, lake: Lake, without: str | None) -> None:
        self._base = base
        self._lake = lake
        self.without = without
        self.position = self.start = lake.position
        self.taken = 0
        self._pending: list[TableBatch] = []
        self._floor = lake.watermark or ZERO
        self._has_rows = lake.watermark is not None
        self._holds_rows_read = False
        self._delivered = RecentXids()
        self.touched: DedupWindow | None = None
        self.reading: Reading | None = None
        self.unrecorded: Progress | str | None = None
        if lake.state == "snapshotting":
            self.want(lake.progress)

    def keeps(self, decision: str) -> bool:
        assert decision in RULES
        return decision != self.without

    # --- the stream ---------------------------------------------------------------------------

    def undelivered(self) -> list[FakeTransaction]:
        return [t for t in self._base.log if t.commit_lsn >= self.position]

    def deliver(self, transaction: FakeTransaction, *, part: bool = False) -> None:
        """Take the rest of a transaction, or one change more of it."""
        changes = numbered(transaction, [T.id])[self.taken :]
        if part and len(changes) > 1:
            changes = changes[:1]
            self.taken += 1
        else:
            self.taken = 0
        for batch in stream_batches(transaction, changes, {T.id: T}):
            self._delivered.record_changes(batch)
            if self.touched is not None:
                self.touched.record_changes(batch)
            if transaction.commit_lsn >= self._floor:
                self._pending.append(batch)
                self._has_rows = True
        if not self.taken:
            self.position = transaction.end_lsn

    def idle(self) -> None:
        if not self.undelivered():
            self.position = self._base.current

    # --- a reading ----------------------------------------------------------------------------

    def want(self, resumed: Progress | None = None) -> None:
        """Begin to read the table, or what is left of it."""
        waits = self._base.writers(T.id)
        if not self.keeps("wait for commits of an earlier run"):
            waits = frozenset()
        self.touched, self.reading = None, Reading(waits, resumed)

    def step(self) -> None:
        """Enter the next state, if allowed."""
        reading = self.reading
        assert reading is not None
        if reading.state is State.AWAITED:
            self._record(reading)
        elif reading.state is State.RECORDED:
            self._look_for_unsent(reading)
        elif reading.state is State.DURABLE:
            self._settle(reading)
        elif reading.state is State.READ:
            if not reading.left and not any(c.blocks for c in reading.chunks.values()):
                assert self.touched is not None
                self.touched.close()
                reading.state = State.CLOSED
        elif reading.state is State.CLOSED:
            self._end(reading)

    def _record(self, reading: Reading) -> None:
        if reading.waits_for & self._base.writers(T.id):
            return
        if reading.resumed is not None and reading.resumed.filenode != self._base.filenode(T.id):
            self.want()
            return
        now = self._base.current
        reading.point = now if reading.resumed is None else reading.resumed.point
        reading.recorded_at = now
        before = self._delivered.of_table(T.id)
        if not self.keeps("wait for commits that were delivered"):
            before = before[:0]
        self.touched = DedupWindow(T, self._base.visibility(), before)
        reading.state = State.RECORDED

    def _look_for_unsent(self, reading: Reading) -> None:
        if reading.resumed is not None:
            is_durable = self._lake.position >= reading.recorded_at
            if not is_durable and self.keeps(
                "have all durable before unsent values are looked for"
            ):
                return
            if self.keeps("find unsent values again"):
                assert self.touched is not None
                for batch in self._lake.unsent(reading.point):
                    self.touched.add_unsent_rows(T, batch.rows)
        reading.state = State.DURABLE

    def _settle(self, reading: Reading) -> None:
        assert self.touched is not None
        if self.keeps("wait for commits that were delivered"):
            seen = self._base.visibility()
            if self.position < reading.point or not self.touched.is_settled(reading.point, seen):
                return
        reading.marks_last = self._has_rows
        if reading.resumed is None:
            reading.left = set(range(self._base.blocks(T)))
            reading.filenode = self._base.filenode(T.id)
        else:
            reading.left = set(reading.resumed.left)
            reading.filenode = reading.resumed.filenode
        if not reading.marks_last:
            self._mark(reading)
        reading.state = State.READ

    def _mark(self, reading: Reading) -> None:
        point = reading.point if self.keeps("mark below all chunks") else self._base.current
        self._place(marker_batch(T, point, AT))

    def _place(self, batch: TableBatch) -> None:
        self._pending.append(batch)
        self._holds_rows_read = self._has_rows = True

    def begin_chunk(self, worker: int, count: int, *, by_key: bool) -> None:
        """Read blocks, or rows by their keys."""
        reading = self.reading
        assert reading is not None
        if reading.state not in {State.READ, State.CLOSED}:
            return
        if reading.filenode != self._base.filenode(T.id) and self.keeps(
            "start over in another file"
        ):
            self.want()
            return
        assert self.touched is not None
        seen = self._base.visibility()
        blocks: frozenset[int] = frozenset()
        keys: frozenset[Key] = frozenset()
        if reading.left and not by_key:
            blocks = frozenset(sorted(reading.left)[:count])
        elif self.keeps("read unsent values"):
            keys = frozenset(self.touched.pop_unsent_keys(count))
        if not blocks and not keys:
            return
        reading.left -= blocks
        rows = [
            dict(version.row)
            for version in self._base.seen_rows(T, seen)
            if version.block in blocks or (str(version.row["id"]),) in keys
        ]
        position = self._base.current
        if not self.keeps("take the position after the snapshot"):
            position = reading.point
        reading.chunks[worker] = ChangeSet(seen, position, rows, blocks, keys)

    def place_chunk(self, worker: int) -> None:
        """Put a chunk into the epoch, without what the stream has newer."""
        reading, touched = self.reading, self.touched
        assert reading is not None
        assert touched is not None
        chunk = reading.chunks[worker]
        if self.position < chunk.position and self.keeps(
            "hold a chunk until the stream has passed it"
        ):
            return
        page = read_batch(T, chunk.rows, chunk.position, AT)
        if self.keeps("leave out what was overtaken"):
            page = touched.without_superseded(page, chunk.position, chunk.seen)
        self._place(page)
        if self.keeps("read overtaken keys again"):
            touched.requeue_keys(
                set(chunk.keys & touched.superseded_keys(chunk.position, chunk.seen))
            )
        del reading.chunks[worker]
        if not self.keeps("forget what all chunks see"):
            touched.advance_floor(self._base.visibility())
        elif reading.chunks:
            touched.advance_floor(next(c.seen for c in reading.chunks.values()))
        else:
            touched.advance_floor(chunk.seen)

    def _end(self, reading: Reading) -> None:
        assert self.touched is not None
        if reading.chunks or (self.touched.rows_to_read and self.keeps("read unsent values")):
            return
        if reading.marks_last:
            self._mark(reading)
        self.touched = None
        reading.state = State.GIVEN

    # --- the lake -----------------------------------------------------------------------------

    def close_epoch(self, *, crash: bool = False) -> bool:
        """Make what is pending durable; `crash`: the raw table only."""
        if self.taken or self.position < self._floor:
            return False
        if self._holds_rows_read and self.position <= self.start:
            return False
        reading = self.reading
        if self._pending:
            self._lake.batches += self._pending
            self._lake.watermark = self.position
        if crash:
            return True
        self._lake.position = self.start = self.position
        self._pending, self._holds_rows_read = [], False
        if reading is not None:
            is_over = reading.state is State.GIVEN
            self.unrecorded = "live" if is_over else reading.progress
            if is_over:
                self.reading = None
        return True

    def record(self) -> None:
        """Write to `_tables` what has become durable."""
        if self.unrecorded == "live":
            self._lake.state, self._lake.progress = "live", None
        elif isinstance(self.unrecorded, Progress):
            self._lake.progress = self.unrecorded
        self.unrecorded = None
        if self.reading is not None and not self.keeps("record progress once it is durable"):
            self._lake.progress = self.reading.progress


@dataclass(slots=True)
class Writer:
    """An open transaction at the source."""

    changes: list[FakeChange] = field(default_factory=list)
    rows: dict[int, Row | None] = field(default_factory=dict)
    is_logged: bool = False
    truncates: bool = False


class Model(RuleBasedStateMachine):
    """Everything that can happen, in any order."""

    without: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.base = FakeDatabase([T])
        self.lake = Lake()
        self.writers: dict[int, Writer] = {}
        self.values = 0
        self.daemon = Daemon(self.base, self.lake, self.without)

    @initialize(keys=st.sets(st.integers(0, KEYS - 1), min_size=2))
    def load(self, keys: set[int]) -> None:
        for key in sorted(keys):
            self.base.commit(FakeChange(T.id, "c", self._row(key), block=key % BLOCKS))
        self.daemon.position = self.daemon.start = self.lake.position = self.base.current

    def _row(self, key: int) -> Row:
        self.values += 1
        return {"id": key, "note": f"n{self.values}", "big": f"b{self.values}"}

    # --- the source ---------------------------------------------------------------------------

    @rule(
        writer=st.integers(0, 2),
        key=st.integers(0, KEYS - 1),
        other=st.integers(0, KEYS - 1),
        op=st.sampled_from(["put", "put unsent", "put unsent", "delete", "rekey"]),
        block=st.integers(0, BLOCKS - 1),
    )
    def write(self, writer: int, key: int, other: int, op: str, block: int) -> None:
        """Change a row in one of three sessions; a lock of another's makes it do nothing."""
        xid = self._session(writer, {key, other} if op == "rekey" else {key})
        if xid is None:
            return
        session = self.writers[xid]
        old = self._current(session).get(key)
        row = self._row(key)
        if op == "delete":
            if old is not None:
                session.changes.append(FakeChange(T.id, "d", {"id": key}))
                session.rows[key] = None
            return
        if old is None:
            session.changes.append(FakeChange(T.id, "c", row, block=block))
            session.rows[key] = row
            return
        unchanged = ("big",) if op != "put" else ()
        before = None
        if op == "rekey":
            if other == key or self._current(session).get(other) is not None:
                return
            row["id"], before = other, {"id": key}
            session.rows[key] = None
        if unchanged:
            row["big"] = old["big"]
        session.changes.append(
            FakeChange(T.id, UPDATE, row, before, unchanged=unchanged, block=block)
        )
        session.rows[row["id"]] = row

    def _session(self, writer: int, keys: set[int]) -> int | None:
        """The transaction of a session, begun if need be; None if it would have to wait."""
        if any(w.truncates for w in self.writers.values()):
            return None
        held = {k for w in self.writers.values() for k in w.rows}
        open_ones = sorted(x for x, w in self.writers.items() if not w.is_logged)
        if writer < len(open_ones):
            xid = open_ones[writer]
            return None if keys & (held - set(self.writers[xid].rows)) else xid
        if keys & held:
            return None
        xid = self.base.begin_transaction()
        self.writers[xid] = Writer()
        return xid

    def _current(self, session: Writer) -> Mapping[int, Row]:
        seen = self.base.seen_rows(T, self.base.visibility())
        rows: dict[int, Row] = {v.row["id"]: dict(v.row) for v in seen}  # type: ignore[misc]
        for key, row in session.rows.items():
            if row is None:
                rows.pop(key, None)
            else:
                rows[key] = row
        return rows

    @precondition(lambda self: any(not w.is_logged for w in self.writers.values()))
    @rule(writer=st.integers(0, 2))
    def log_commit(self, writer: int) -> None:
        open_ones = sorted(x for x, w in self.writers.items() if not w.is_logged)
        xid = open_ones[writer % len(open_ones)]
        session = self.writers[xid]
        session.is_logged = True
        self.base.write_commit(xid, *session.changes)

    @precondition(lambda self: any(w.is_logged for w in self.writers.values()))
    @rule(writer=st.integers(0, 2))
    def become_visible(self, writer: int) -> None:
        logged = sorted(x for x, w in self.writers.items() if w.is_logged)
        self._end(logged[writer % len(logged)])

    @precondition(lambda self: any(not w.is_logged for w in self.writers.values()))
    @rule(writer=st.integers(0, 2))
    def abort(self, writer: int) -> None:
        open_ones = sorted(x for x, w in self.writers.items() if not w.is_logged)
        self._end(open_ones[writer % len(open_ones)])

    def _end(self, xid: int) -> None:
        del self.writers[xid]
        self.base.end_transaction(xid)

    @precondition(lambda self: not self.writers)
    @rule(key=st.integers(0, KEYS - 1))
    def truncate(self, key: int) -> None:
        """Its lock keeps all others out until the others see it."""
        xid, row = self.base.begin_transaction(), self._row(key)
        changes = [FakeChange(T.id, TRUNCATE), FakeChange(T.id, "c", row, block=0)]
        self.writers[xid] = Writer(changes, {key: row}, truncates=True)

    @precondition(lambda self: not self.writers)
    @rule()
    def vacuum_full(self) -> None:
        self.base.rewrite(T.id)

    # --- the daemon ---------------------------------------------------------------------------

    @precondition(lambda self: self.daemon.undelivered())
    @rule(how=st.sampled_from(["part", "one", "all"]))
    def deliver(self, how: str) -> None:
        found = self.daemon.undelivered()
        for transaction in found if how == "all" else found[:1]:
            self.daemon.deliver(transaction, part=how == "part")
        self.daemon.idle()

    @precondition(lambda self: self.daemon.reading is None and self.lake.state != "snapshotting")
    @rule()
    def want(self) -> None:
        self.lake.state, self.lake.progress = "snapshotting", None
        self.daemon.want()

    @precondition(lambda self: self.daemon.reading is not None)
    @rule()
    def step(self) -> None:
        self.daemon.step()

    @precondition(lambda self: self.daemon.reading is not None and not self._is_locked)
    @rule(worker=st.integers(0, WORKERS - 1), count=st.integers(1, 2), by_key=st.booleans())
    def chunk(self, worker: int, count: int, *, by_key: bool) -> None:
        """Begin a chunk, or place the one that the worker holds."""
        reading = self.daemon.reading
        assert reading is not None
        if worker in reading.chunks:
            self.daemon.place_chunk(worker)
        else:
            self.daemon.begin_chunk(worker, count, by_key=by_key)

    @property
    def _is_locked(self) -> bool:
        return any(w.truncates for w in self.writers.values())

    @rule(records=st.booleans())
    def close_epoch(self, *, records: bool) -> None:
        self.base.write_elsewhere(16)
        self.daemon.idle()
        if self.daemon.close_epoch() and records:
            self.daemon.record()
        self.check()

    @rule(mid_commit=st.booleans())
    def kill(self, *, mid_commit: bool) -> None:
        if mid_commit:
            self.daemon.close_epoch(crash=True)
        self.daemon = Daemon(self.base, self.lake, self.without)

    def check(self) -> None:
        if self.lake.state != "live":
            return
        expected = self.base.rows(T, self.lake.position)
        expected.sort(key=lambda row: str(row["id"]))
        assert self.lake.rows() == expected

    def teardown(self) -> None:
        """Let everything finish: whatever happened before, the table becomes exact."""
        for xid, writer in list(self.writers.items()):
            if not writer.is_logged:
                self.base.write_commit(xid, *writer.changes)
            self._end(xid)
        if self.lake.state == "new":
            self.want()
        for _ in range(200):
            if self.daemon.undelivered():
                self.deliver("all")
            if self.daemon.reading is not None:
                self.daemon.step()
                for worker in range(WORKERS):
                    self.chunk(worker, 2, by_key=False)
                    if self.daemon.undelivered():
                        self.deliver("all")
            self.close_epoch(records=True)
            if self.lake.state == "live" and not self.daemon.undelivered():
                return
        pytest.fail("the table never becomes live")


def model(without: str | None) -> Model:
    made = Model()
    made.without = made.daemon.without = without
    return made


@pytest.mark.slow
def test_snapshot_boundary_in_every_interleaving() -> None:
    run_state_machine_as_test(
        Model,
        settings=settings(
            max_examples=120,
            stateful_step_count=60,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


# --- what each decision is for ----------------------------------------------------------------


class Story:
    """A course of events, step by step. Key k lies in block k at first."""

    def __init__(self, without: str | None) -> None:
        self.model = model(without)
        self.model.load({0, 1, 2, 3})

    def change(
        self, key: int, op: str = "put", *, other: int = 0, block: int = 0, hidden: bool = False
    ) -> None:
        """Commit a change; `hidden`: it is invisible before `show`."""
        self.model.write(writer=9, key=key, other=other, op=op, block=block)
        self.model.log_commit(writer=0)
        if not hidden:
            self.show()

    def show(self) -> None:
        self.model.become_visible(writer=0)

    def deliver(self) -> None:
        if self.model.daemon.undelivered():
            self.model.deliver("all")
        self.model.daemon.idle()

    def steps(self) -> None:
        """Continue up to reading, if allowed."""
        for _ in range(3):
            self.model.daemon.step()

    def read(self) -> None:
        self.model.want()
        self.steps()
        assert self.model.daemon.reading is not None
        assert self.model.daemon.reading.state is State.READ

    def begin(self, *, worker: int = 0, count: int = 1, by_key: bool = False) -> None:
        self.model.daemon.begin_chunk(worker, count, by_key=by_key)

    def place(self, *, worker: int = 0) -> None:
        reading = self.model.daemon.reading
        if reading is not None and worker in reading.chunks:
            self.model.daemon.place_chunk(worker)

    def chunk(self, *, count: int = 1, by_key: bool = False) -> None:
        self.begin(count=count, by_key=by_key)
        self.deliver()
        self.place()

    def restart(self) -> None:
        """Make all durable; be killed and started again."""
        self.model.close_epoch(records=True)
        self.model.kill(mid_commit=False)

    def end(self) -> None:
        self.model.teardown()


def commit_of_an_earlier_run(story: Story) -> None:
    story.change(0, hidden=True)
    story.deliver()
    story.restart()
    story.model.want()
    story.steps()
    story.chunk()


def commit_that_was_delivered(story: Story) -> None:
    story.model.want()
    story.change(0, hidden=True)
    story.model.daemon.step()
    story.deliver()
    story.steps()
    story.chunk()


def overtaken(story: Story) -> None:
    story.read()
    story.change(0, hidden=True)
    story.chunk()


def moved_into_a_block_that_was_read(story: Story) -> None:
    story.read()
    story.chunk()
    story.change(1, "put unsent", block=0)
    story.deliver()


def unsent_and_overtaken(story: Story) -> None:
    story.read()
    story.chunk()
    story.change(1, "put unsent", block=0, hidden=True)
    story.deliver()
    story.chunk(count=2)
    story.chunk(by_key=True)


def killed_when_values_were_to_be_read(story: Story) -> None:
    moved_into_a_block_that_was_read(story)
    story.restart()


def changed_just_before_changes_are_noted(story: Story) -> None:
    story.read()
    story.chunk()
    story.restart()
    story.change(1, "put unsent", block=0)
    story.deliver()
    story.steps()


def younger_chunk_first(story: Story) -> None:
    story.read()
    story.change(0, hidden=True)
    story.begin(worker=0)
    story.show()
    story.begin(worker=1)
    story.deliver()
    story.place(worker=1)
    story.place(worker=0)


def stream_behind(story: Story) -> None:
    story.read()
    story.change(0, hidden=True)
    story.begin()
    story.place()


def changed_while_read_anew(story: Story) -> None:
    story.read()
    story.end()
    story.model.want()
    story.steps()
    story.change(0)
    story.deliver()


def killed_before_rows_are_durable(story: Story) -> None:
    story.read()
    story.chunk()
    story.model.daemon.record()
    story.model.kill(mid_commit=False)


def rewritten(story: Story) -> None:
    story.read()
    story.chunk()
    story.model.vacuum_full()
    story.deliver()


def key_changed_below_the_chunk(story: Story) -> None:
    story.read()
    story.change(1, "rekey", other=4, block=3)
    story.deliver()


STORIES = {
    "wait for commits of an earlier run": commit_of_an_earlier_run,
    "wait for commits that were delivered": commit_that_was_delivered,
    "leave out what was overtaken": overtaken,
    "read unsent values": moved_into_a_block_that_was_read,
    "read overtaken keys again": unsent_and_overtaken,
    "find unsent values again": killed_when_values_were_to_be_read,
    "have all durable before unsent values are looked for": changed_just_before_changes_are_noted,
    "forget what all chunks see": younger_chunk_first,
    "hold a chunk until the stream has passed it": stream_behind,
    "mark below all chunks": changed_while_read_anew,
    "record progress once it is durable": killed_before_rows_are_durable,
    "start over in another file": rewritten,
    "take the position after the snapshot": key_changed_below_the_chunk,
}


@pytest.mark.parametrize("decision", sorted(RULES))
def test_snapshot_boundary_needs_every_decision(decision: str) -> None:
    tell = STORIES[decision]
    whole = Story(None)
    tell(whole)
    whole.end()
    lacking = Story(decision)
    with pytest.raises(AssertionError, match="=="):
        _tell_to_the_end(tell, lacking)


def test_snapshot_boundary_a_key_changes_before_its_completion() -> None:
    story = Story(None)
    moved_into_a_block_that_was_read(story)
    story.chunk(count=2)
    story.chunk(count=2)
    story.model.daemon.step()
    assert story.model.daemon.reading is not None
    assert story.model.daemon.reading.state is State.CLOSED
    story.change(1, "rekey", other=4, block=3)
    story.deliver()
    story.chunk(by_key=True)
    story.end()


def _tell_to_the_end(tell: Callable[[Story], None], story: Story) -> None:
    tell(story)
    story.end()
