"""The protocol between slot, daemons and lake, in steps as small as what a crash can part.

The source's WAL is a list of transactions; the n-th commits at position n, ends at n + 1, and has
one row in each table that it names. A log of the lake is a tuple of commits, whose number in it is
the Delta version; a commit is added where the log is as long as its writer knows, or is refused
(put-if-absent). Log 0 is `_epochs`, the others are raw tables.

What may happen at any time, as often as `faults` allows: a daemon is killed; all its sessions are
ended without its knowing, as when it is paused; the server crashes, and the slot goes back to what
was last flushed. A pause needs no step: any daemon may make none for as long as one likes.

Each rule of the protocol can be left out (`Broken`), to see that the search finds what it is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple

NOBODY = -1


class Broken(Enum):
    """A rule that is left out."""

    CONFIRM_DURABLE_ONLY = auto()
    REPLAY_FROM_THE_LAKE = auto()
    SKIP_BELOW_WATERMARK = auto()
    SKIP_BELOW_ONLY = auto()
    SKIP_COMPARES_POSITIONS = auto()
    LIST_HALF_EPOCH = auto()
    FLOOR = auto()
    WHOLE_TRANSACTIONS = auto()
    TABLES_BEFORE_EPOCH = auto()
    COMPARE_AND_SWAP = auto()
    FENCE = auto()
    FENCE_BEFORE_CONTINUITY = auto()
    VOUCH = auto()
    CLAIM = auto()


class Rows(NamedTuple):
    """A raw table's commit: positions of the rows' transactions; the app transaction."""

    epoch: int
    lsns: tuple[int, ...]
    end: int


class Epoch(NamedTuple):
    """A commit of `_epochs` with a row. `versions`: of each table that it lists."""

    first: int
    end: int
    versions: tuple[tuple[int, int], ...]


class Position(NamedTuple):
    """A commit of `_epochs` without a row: nothing captured lies below this that it lacks."""

    at: int


class Empty(NamedTuple):
    """A commit without data: a table that was made, or a fence."""


Commit = Rows | Epoch | Position | Empty
Log = tuple[Commit, ...]


class Phase(Enum):
    """Where a daemon is."""

    DOWN = auto()
    OPENING = auto()
    FENCING = auto()
    ASKING = auto()
    BEGINNING = auto()
    LIVE = auto()


class Committing(NamedTuple):
    """An epoch that was closed. `left`: tables whose commit is to come.

    `has_made`: it made tables, and has not vouched for itself since.
    """

    first: int
    end: int
    left: tuple[tuple[int, tuple[int, ...]], ...]
    done: tuple[tuple[int, int], ...] = ()
    has_made: bool = False


class Daemon(NamedTuple):
    """A process. `known`: how long each log is to its knowledge.

    As of its opening: `epoch` (counts on), `position`, `marks` (watermarks), `held` (tables with
    rows of the epoch to come, and the lowest of them), `floor`. `start` to `at`: what fills;
    `rows`: of the transaction `at` those that came.
    """

    phase: Phase = Phase.DOWN
    known: tuple[int, ...] = ()
    epoch: int = 0
    position: int = 0
    marks: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    held_first: int = 0
    floor: int = 0
    start: int = 0
    at: int = 0
    rows: int = 0
    committing: Committing | None = None
    to_confirm: int = 0


class World(NamedTuple):
    """All of it. `confirmed`: the slot; `flushed`: what of that a crash of the server leaves."""

    logs: tuple[Log, ...]
    daemons: tuple[Daemon, ...]
    written: int = 0
    confirmed: int = 0
    flushed: int = 0
    claim: int = NOBODY
    stream: int = NOBODY
    faults: int = 0
    is_lost: bool = False


@dataclass(frozen=True)
class Protocol:
    """`transactions`: the tables (from 1 on) that each has a row of. `exist`: the raw tables do.

    `one_by_one`: a daemon's sessions may end without each other.
    """

    transactions: tuple[tuple[int, ...], ...]
    daemons: int = 1
    faults: int = 1
    exist: bool = True
    one_by_one: bool = True
    broken: frozenset[Broken] = field(default_factory=frozenset)

    @cached_property
    def tables(self) -> tuple[int, ...]:
        """The tables' numbers."""
        return tuple(sorted({t for tables in self.transactions for t in tables}))

    def start(self) -> World:
        """An empty lake, and no daemon."""
        raw: Log = (Empty(),) if self.exist else ()
        logs = ((Empty(),), *(raw for _ in self.tables))
        return World(logs, (Daemon(),) * self.daemons, faults=self.faults)

    def is_done(self, world: World) -> bool:
        """Whether all is written, in the lake and confirmed."""
        return world.confirmed == world.written == len(self.transactions)

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        """Return all that can happen next."""
        if world.written < len(self.transactions):
            yield "the source commits", world._replace(written=world.written + 1)
        if world.flushed != world.confirmed:
            yield "the server flushes the slot", world._replace(flushed=world.confirmed)
        if world.faults:
            yield from self._faults(world._replace(faults=world.faults - 1))
        for number, daemon in enumerate(world.daemons):
            name = "AB"[number]
            for step, after in self._steps_of(world, number, daemon):
                yield f"{name} {step}", after

    def _faults(self, world: World) -> Iterator[tuple[str, World]]:
        if NOBODY not in (world.claim, world.stream) or world.flushed != world.confirmed:
            after = world._replace(confirmed=world.flushed, claim=NOBODY, stream=NOBODY)
            yield "the server crashes", after
        for number, daemon in enumerate(world.daemons):
            name = "AB"[number]
            if world.claim == number and self.one_by_one:
                yield f"{name}'s claim is ended", world._replace(claim=NOBODY)
            if world.stream == number and self.one_by_one:
                yield f"{name}'s stream is ended", world._replace(stream=NOBODY)
            if number in (world.claim, world.stream):
                yield f"{name}'s sessions are ended", _without_sessions(world, number)
            if daemon.phase is not Phase.DOWN:
                yield f"{name} is killed", _down(world, number)

    def _steps_of(self, world: World, number: int, daemon: Daemon) -> Iterator[tuple[str, World]]:
        if daemon.phase is Phase.DOWN:
            if world.claim == NOBODY or Broken.CLAIM in self.broken:
                begun = _with(world, number, Daemon(Phase.OPENING))
                yield "claims the source", begun._replace(claim=number)
        elif daemon.phase is Phase.OPENING:
            read = daemon._replace(known=(*daemon.known, len(world.logs[len(daemon.known)])))
            yield (
                f"reads {_log(len(daemon.known))}",
                _with(world, number, self._opened(world, read)),
            )
        elif daemon.phase is Phase.FENCING:
            yield self._fence(world, number, daemon)
        elif daemon.phase is Phase.LIVE:
            if NOBODY in self._sessions(world, number):
                yield "finds its sessions ended", _down(world, number)
            yield from self._live(world, number, daemon)
        elif NOBODY in self._sessions(world, number)[:1]:
            yield "finds its sessions ended", _down(world, number)
        elif daemon.phase is Phase.ASKING:
            # A slot beyond the lake means that changes are lost.
            lost = world.is_lost or world.confirmed > daemon.position
            asked = daemon._replace(phase=self._after_asking(daemon))
            yield "asks where the slot is", _with(world, number, asked)._replace(is_lost=lost)
        elif daemon.phase is Phase.BEGINNING:
            yield from self._begin(world, number, daemon)

    def _sessions(self, world: World, number: int) -> tuple[int, int]:
        """The daemon with the claim and that of the stream: the same one, or none."""
        has_claim = world.claim == number or Broken.CLAIM in self.broken
        return number if has_claim else NOBODY, number if world.stream == number else NOBODY

    # --- a start -----------------------------------------------------------------------------

    def _opened(self, world: World, daemon: Daemon) -> Daemon:
        """What it knows when it has read all logs, each as it was then."""
        if len(daemon.known) < len(world.logs):
            return daemon
        own, *raws = (log[:known] for log, known in zip(world.logs, daemon.known, strict=True))
        epochs = [c for c in own if isinstance(c, Epoch)]
        end = epochs[-1].end if epochs else 0
        position = max([end, *(c.at for c in own if isinstance(c, Position))])
        marks = tuple(max([0, *(c.end for c in raw if isinstance(c, Rows))]) for raw in raws)
        ahead = {
            table: [
                lsn
                for c in raw
                if isinstance(c, Rows) and c.epoch == len(epochs) + 1
                for lsn in c.lsns
            ]
            for table, raw, mark in zip(self.tables, raws, marks, strict=True)
            if mark >= end
        }
        held = tuple(table for table, lsns in ahead.items() if lsns)
        if Broken.LIST_HALF_EPOCH in self.broken:
            held = ()
        return daemon._replace(
            phase=self._after_opening(),
            epoch=len(epochs),
            position=position,
            marks=marks,
            held=held,
            held_first=min((lsn for lsns in ahead.values() for lsn in lsns), default=0),
            floor=0 if Broken.FLOOR in self.broken else max(position, *marks),
        )

    def _after_opening(self) -> Phase:
        unfenced = {Broken.FENCE, Broken.FENCE_BEFORE_CONTINUITY} & self.broken
        return Phase.ASKING if unfenced else Phase.FENCING

    def _after_asking(self, daemon: Daemon) -> Phase:
        late = Broken.FENCE_BEFORE_CONTINUITY in self.broken and daemon.rows == 0
        return Phase.FENCING if late else Phase.BEGINNING

    def _fence(self, world: World, number: int, daemon: Daemon) -> tuple[str, World]:
        """`rows` counts the logs that are fenced. One that is not there can't be."""
        log = daemon.rows
        if len(world.logs[log]) != daemon.known[log]:
            fenced_all_the_same = _append(world, log, Empty())
            return f"fences {_log(log)}, changed, and reads again", _down(
                fenced_all_the_same, number
            )
        after, known = world, daemon.known
        if world.logs[log]:
            after, known = _append(world, log, Empty()), _plus_one(known, log)
        is_last = log + 1 == len(world.logs)
        begins = Broken.FENCE_BEFORE_CONTINUITY in self.broken
        fenced = daemon._replace(
            known=known,
            rows=0 if is_last else log + 1,
            phase=(Phase.BEGINNING if begins else Phase.ASKING) if is_last else Phase.FENCING,
        )
        return f"fences {_log(log)}", _with(after, number, fenced)

    def _begin(self, world: World, number: int, daemon: Daemon) -> Iterator[tuple[str, World]]:
        if world.stream != NOBODY:
            return
        is_blind = Broken.REPLAY_FROM_THE_LAKE in self.broken
        start = world.confirmed if is_blind else max(daemon.position, world.confirmed)
        # What the lake has is confirmed at once: a crash may have come before that.
        live = daemon._replace(phase=Phase.LIVE, start=start, at=start, to_confirm=daemon.position)
        yield "begins to stream", _with(world, number, live)._replace(stream=number)

    # --- living ------------------------------------------------------------------------------

    def _live(self, world: World, number: int, daemon: Daemon) -> Iterator[tuple[str, World]]:
        if world.stream == number and daemon.at < world.written:
            yield "receives", _with(world, number, self._received(daemon))
        if daemon.committing is None:
            yield from self._closed(world, number, daemon)
        else:
            yield from self._committed(world, number, daemon, daemon.committing)
        target = daemon.at if Broken.CONFIRM_DURABLE_ONLY in self.broken else daemon.to_confirm
        if target > world.confirmed and world.stream == number:
            after = _with(world, number, daemon._replace(to_confirm=0))
            yield f"confirms {target}", after._replace(confirmed=target)

    def _received(self, daemon: Daemon) -> Daemon:
        """One row, or the end of a transaction without any."""
        rows = daemon.rows + 1
        if rows >= len(self.transactions[daemon.at]):
            return daemon._replace(at=daemon.at + 1, rows=0)
        return daemon._replace(rows=rows)

    def _closed(self, world: World, number: int, daemon: Daemon) -> Iterator[tuple[str, World]]:
        may_split = Broken.WHOLE_TRANSACTIONS in self.broken
        if (daemon.rows and not may_split) or daemon.at < daemon.floor:
            return
        taken = [
            (lsn, table)
            for lsn in range(daemon.start, daemon.at)
            for table in self.transactions[lsn]
        ]
        end = daemon.at
        if daemon.rows:
            taken += [(end, table) for table in self.transactions[end][: daemon.rows]]
            end += 1  # as if the transaction were complete
        if taken or daemon.held:
            lsns = [lsn for lsn, _ in taken] + ([daemon.held_first] if daemon.held else [])
            kept = {
                table: tuple(n for n, t in taken if t == table and self._is_new(daemon, n, table))
                for table in self.tables
            }
            left = tuple((table, rows) for table, rows in kept.items() if rows)
            closed = daemon._replace(
                committing=Committing(min(lsns), end, left), start=end, at=end, rows=0
            )
            yield (
                f"closes epoch {daemon.epoch + 1}, {min(lsns)} to {end}",
                _with(world, number, closed),
            )
        elif daemon.at > daemon.start:
            yield self._swap(world, number, 0, Position(daemon.at), "records its position") or (
                "is refused by _epochs",
                _down(world, number),
            )

    def _is_new(self, daemon: Daemon, lsn: int, table: int) -> bool:
        mark = daemon.marks[table - 1]
        if Broken.SKIP_BELOW_WATERMARK in self.broken or not mark:
            return True
        if Broken.SKIP_COMPARES_POSITIONS in self.broken:
            return table not in daemon.held  # it has rows of this epoch, so it has them all
        return lsn > mark if Broken.SKIP_BELOW_ONLY in self.broken else lsn >= mark

    def _committed(
        self, world: World, number: int, daemon: Daemon, closed: Committing
    ) -> Iterator[tuple[str, World]]:
        refused = "is refused by _epochs", _down(world, number)
        missing = [table for table, _ in closed.left if not daemon.known[table]]
        if missing:
            made = _making(world, number, closed._replace(has_made=True))
            step = f"makes table {missing[0]}"
            found = f"finds table {missing[0]} made, and gives up", _down(world, number)
            yield self._swap(made, number, missing[0], Empty(), step) or found
            return
        if closed.has_made and Broken.VOUCH not in self.broken:
            vouched = _making(world, number, closed._replace(has_made=False))
            yield self._swap(vouched, number, 0, Empty(), "vouches for itself") or refused
            return
        for place, (table, lsns) in enumerate(closed.left):
            commit = Rows(daemon.epoch + 1, lsns, closed.end)
            late = (f"is refused by table {table}", _down(world, number))
            step = f"commits {lsns} to table {table}"
            after = self._swap(world, number, table, commit, step)
            if after is not None:
                left = closed.left[:place] + closed.left[place + 1 :]
                done = (*closed.done, (table, len(after[1].logs[table]) - 1))
                now = after[1].daemons[number]
                now = now._replace(committing=closed._replace(left=left, done=done))
                after = after[0], _with(after[1], number, now)
            yield after or late
        if closed.left and Broken.TABLES_BEFORE_EPOCH not in self.broken:
            return
        versions = dict(closed.done)
        for table in daemon.held:
            versions.setdefault(table, daemon.known[table] - 1)
        epoch = Epoch(closed.first, closed.end, tuple(sorted(versions.items())))
        step = f"commits epoch {daemon.epoch + 1}"
        yield self._swap(world, number, 0, epoch, step) or refused

    def _swap(
        self, world: World, number: int, log: int, commit: Commit, step: str
    ) -> tuple[str, World] | None:
        """Commit if the log is as it is known to be; None if that is refused."""
        daemon = world.daemons[number]
        present = len(world.logs[log])
        if present != daemon.known[log] and Broken.COMPARE_AND_SWAP not in self.broken:
            return None
        known = (*daemon.known[:log], present + 1, *daemon.known[log + 1 :])
        daemon = daemon._replace(known=known)
        if isinstance(commit, Epoch):
            daemon = daemon._replace(
                epoch=daemon.epoch + 1, held=(), committing=None, to_confirm=commit.end
            )
        elif isinstance(commit, Position):
            daemon = daemon._replace(start=commit.at, to_confirm=commit.at)
        return step, _with(_append(world, log, commit), number, daemon)


def _with(world: World, number: int, daemon: Daemon) -> World:
    daemons = (*world.daemons[:number], daemon, *world.daemons[number + 1 :])
    return world._replace(daemons=daemons)


def _making(world: World, number: int, closed: Committing) -> World:
    return _with(world, number, world.daemons[number]._replace(committing=closed))


def _append(world: World, log: int, commit: Commit) -> World:
    logs = (*world.logs[:log], (*world.logs[log], commit), *world.logs[log + 1 :])
    return world._replace(logs=logs)


def _plus_one(known: tuple[int, ...], log: int) -> tuple[int, ...]:
    return (*known[:log], known[log] + 1, *known[log + 1 :])


def _without_sessions(world: World, number: int) -> World:
    return world._replace(
        claim=NOBODY if world.claim == number else world.claim,
        stream=NOBODY if world.stream == number else world.stream,
    )


def _down(world: World, number: int) -> World:
    return _with(_without_sessions(world, number), number, Daemon())


def _log(number: int) -> str:
    return f"table {number}" if number else "_epochs"
