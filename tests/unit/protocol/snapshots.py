"""A table that is read while its changes are streamed: at one point, in splits, once or again.

The n-th change of the source is at position n, a put or a delete of a key; a put's value is n. The
lake has rows (position, seq, op, key, value); an epoch's commit is one step here, with its row of
`_epochs` (`protocol` has what is within). A snapshot at point L has the table as it is after the
changes below L. Its splits are given in any epochs. Once the table was out of the publication, so
that changes are missed (`gap`), it is read again; so it is on request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

Change = tuple[str, int]
"""What is done to which key: put or delete."""
State = dict[int, int]


class Broken(Enum):
    """A rule that is left out."""

    GATE = auto()
    MARKER = auto()
    MARKER_LAST = auto()
    LIVE_WHEN_DURABLE = auto()
    LIVE_WHEN_WHOLE = auto()
    ALL_CHANGES_MEANWHILE = auto()


class Row(NamedTuple):
    """A row of the raw table, in the order of positions."""

    lsn: int
    seq: int
    op: str
    key: int = -1
    value: int = -1


class Reading(NamedTuple):
    """A snapshot under way. `left`: splits that are not given yet."""

    point: int
    left: tuple[tuple[Row, ...], ...]
    marker_due: bool


class World(NamedTuple):
    """`raw`, `durable`, `is_live`, `is_requested`: what the lake has. The rest goes with a kill.

    `has_lived`: it was complete once, nothing was missed since. `given`: all of a snapshot is in
    the epoch that fills.
    """

    raw: tuple[Row, ...] = ()
    durable: int = 0
    is_live: bool = False
    has_lived: bool = False
    written: int = 0
    kills: int = 0
    asks: int = 0
    gaps: int = 0
    is_up: bool = False
    at: int = 0
    filling: tuple[Row, ...] = ()
    reading: Reading | None = None
    given: bool = False


@dataclass(frozen=True)
class Source:
    """`changes` of a table. `kills`, `asks`, `gaps`: how often each may be."""

    changes: tuple[Change, ...]
    kills: int = 1
    asks: int = 1
    gaps: int = 0
    broken: frozenset[Broken] = field(default_factory=frozenset)

    def start(self) -> World:
        """Nothing exists."""
        return World(kills=self.kills, asks=self.asks, gaps=self.gaps)

    def state(self, position: int) -> State:
        """Return the table after the changes below a position."""
        found: State = {}
        for value, (op, key) in enumerate(self.changes[:position]):
            found.pop(key, None)
            if op == "put":
                found[key] = value
        return found

    def is_done(self, world: World) -> bool:
        """Whether all is in the lake, and the table is complete."""
        return world.is_live and world.durable == len(self.changes)

    def fault_of(self, world: World) -> str | None:
        """I6: a table that is live, or was and missed nothing, is the source at the epoch's end."""
        if world.is_live or world.has_lived:
            found, there = fold(world.raw), self.state(world.durable)
            if found != there:
                return f"I6: the lake has {found}, the source {there} at {world.durable}"
        return None

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        """Return all that can happen next."""
        if world.written < len(self.changes):
            yield "the source commits", world._replace(written=world.written + 1)
        if not world.is_up:
            # Those that were read in part begin again; what is live is not read.
            yield "starts", world._replace(is_up=True, at=world.durable)
            return
        if world.kills:
            yield "is killed", _killed(world)
        if world.asks and world.is_live:
            yield "is asked to read it again", world._replace(asks=world.asks - 1, is_live=False)
        if world.at < world.written:
            yield f"receives change {world.at}", self._received(world)
            if world.gaps and not world.filling and world.reading is None and not world.given:
                yield f"misses change {world.at}", _missed(world)
        yield from self._reading(world)
        if world.filling or world.given or world.at > world.durable:
            yield f"commits up to {world.at}", self._committed(world)

    def _received(self, world: World) -> World:
        op, key = self.changes[world.at]
        row = Row(world.at, 1, op, key, world.at if op == "put" else -1)
        is_left_out = (
            Broken.ALL_CHANGES_MEANWHILE in self.broken
            and world.reading is not None
            and world.at >= world.reading.point
        )
        filling = world.filling if is_left_out else (*world.filling, row)
        return world._replace(at=world.at + 1, filling=tuple(sorted(filling)))

    def _reading(self, world: World) -> Iterator[tuple[str, World]]:
        reading = world.reading
        if reading is None:
            if not world.is_live and not world.given:
                yield f"takes a snapshot at {world.written}", self._begun(world)
            return
        if world.at < reading.point and Broken.GATE not in self.broken:
            return
        if reading.left:
            for number, split in enumerate(reading.left):
                left = reading.left[:number] + reading.left[number + 1 :]
                after = world._replace(reading=reading._replace(left=left))
                yield (
                    f"gives split {split}",
                    after._replace(filling=tuple(sorted((*world.filling, *split)))),
                )
        else:
            marker = (Row(reading.point, -1, "t"),) if reading.marker_due else ()
            filling = tuple(sorted((*world.filling, *marker)))
            after = world._replace(reading=None, filling=filling)
            if Broken.LIVE_WHEN_DURABLE in self.broken:
                yield "gives the last, live", after._replace(is_live=True)
            else:
                yield "gives the last", after._replace(given=True)

    def _begun(self, world: World) -> World:
        """The `t` comes first into a table without rows, last into one whose rows serve."""
        point = world.written
        rows = [Row(point, 0, "put", key, value) for key, value in self.state(point).items()]
        comes_last = bool(world.raw) and Broken.MARKER_LAST not in self.broken
        has_marker = Broken.MARKER not in self.broken
        first = (Row(point, -1, "t"),) if has_marker and not comes_last else ()
        splits = tuple((row,) for row in rows)
        if first:
            splits = (first, *splits)
        return world._replace(reading=Reading(point, splits, has_marker and comes_last))

    def _committed(self, world: World) -> World:
        is_live = world.is_live or world.given
        if Broken.LIVE_WHEN_WHOLE in self.broken and world.reading is not None:
            is_live = True  # a part of it counts as all
        return world._replace(
            raw=tuple(sorted({*world.raw, *world.filling})),  # readers go by position
            durable=world.at,
            is_live=is_live,
            has_lived=world.has_lived or is_live,
            filling=(),
            given=False,
        )


def _killed(world: World) -> World:
    return world._replace(
        kills=world.kills - 1, is_up=False, at=0, filling=(), reading=None, given=False
    )


def _missed(world: World) -> World:
    """It is noticed, and recorded before anything beyond is confirmed."""
    return world._replace(
        at=world.at + 1,
        durable=world.at + 1,
        gaps=world.gaps - 1,
        is_live=False,
        has_lived=False,
    )


def fold(raw: tuple[Row, ...]) -> State:
    """Return the current rows, by position: what readers do."""
    rows = sorted(raw)
    void = max((row[:2] for row in rows if row.op == "t"), default=(-1, -1))
    found: State = {}
    for row in rows:
        if row[:2] > void and row.op != "t":
            found.pop(row.key, None)
            if row.op == "put":
                found[row.key] = row.value
    return found
