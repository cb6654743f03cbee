"""Named points at which tests have a fault happen; nothing does unless INGESTD_FAILPOINTS is set.

::

    INGESTD_FAILPOINTS="sink.raw_commit.before=crash@3"
    INGESTD_FAILPOINTS="sink.fsync.after=delay:0.2@1+,capture.confirm.before=error>sink.checkpoint.after=crash"

An entry is POINT=ACTION, with @N for the Nth time that the process comes there (@1 if left out) and
@N+ for that time and every later one. Entries between commas count side by side; those after a `>`
begin to count when all before it have acted.

=============  ====================================================================================
action         what happens
=============  ====================================================================================
crash          SIGKILL to this process
error          what the real part raises there when its connection or its storage fails
delay[:S]      it takes S seconds (0.2) longer
=============  ====================================================================================

This module holds the process's only switch, because a point is anywhere: off, a point costs a call
and a comparison. docs/failpoints.md says how the points are tested.
"""

from __future__ import annotations

import asyncio
import difflib
import errno
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ingestd.model.errors import ConfigError, TransientError

VARIABLE = "INGESTD_FAILPOINTS"
DELAY_S = 0.2

POINTS: Mapping[str, str] = {
    "capture.publication.before": "the publication is about to be made or altered",
    "capture.publication.after": "that is committed",
    "capture.slot.before": "the slot is about to be made; one that was of no use is dropped",
    "capture.slot.after": "the slot is there",
    "capture.point.before": "a temporary slot is about to be made, for a snapshot at one point, or "
    "as what a new slot is moved past its making by",
    "capture.point.after": "it is there, its snapshot exported",
    "capture.split.before": "a split of a snapshot is about to be read",
    "capture.split.after": "all its rows are read and given",
    "capture.slot_copy.before": "the slot is about to be copied, to drain a backlog",
    "capture.slot_copy.after": "the copy is there",
    "capture.drain.before": "the server is about to decode a part of the backlog",
    "capture.drain.after": "the part has been read",
    "capture.slot_advance.before": "the slot is about to be moved while a backlog is drained",
    "capture.slot_advance.after": "it is moved",
    "capture.stream_begin.before": "the stream is about to be begun, where the backlog ends",
    "capture.stream_begin.after": "START_REPLICATION was answered",
    "capture.receive.before": "more of the stream is about to be taken",
    "capture.receive.after": "it is taken, not decoded yet",
    "capture.decode.before": "a block is about to be decoded",
    "capture.decode.after": "it is decoded, not delivered yet",
    "capture.confirm.before": "what is durable is about to be confirmed",
    "capture.confirm.after": "it is sent to the server, or noted for the next stream",
    "sink.marker.before": "the marker of a new lake is about to be written, before all else",
    "sink.marker.after": "it is there, nothing else of the lake",
    "sink.adopt.before": "the record of a source's server is about to be made, in `_epochs`",
    "sink.adopt.after": "it is there, `_tables` perhaps not",
    "sink.parquet.before": "rows are about to be written to a Parquet file",
    "sink.parquet.after": "they are written, the file is open",
    "sink.fsync.before": "files and their folder are about to be made durable",
    "sink.fsync.after": "they are durable",
    "sink.raw_create.before": "a raw table is about to be made, without rows",
    "sink.raw_create.after": "it is there",
    "sink.new_columns.before": "a raw table is about to get more columns",
    "sink.new_columns.after": "it has them, without rows",
    "sink.raw_commit.before": "a raw table's part of an epoch is about to be committed",
    "sink.raw_commit.after": "it is durable, other tables' parts and `_epochs` perhaps not",
    "sink.commit_put.before": "a commit is about to be put (on a disk: is durable by another name)",
    "sink.commit_put.after": "it is there (on a disk: its folder not durable yet)",
    "sink.tables_commit.before": "events are about to be committed to `_tables`",
    "sink.tables_commit.after": "they are durable",
    "sink.epochs_commit.before": "all tables' parts are durable, the row of `_epochs` is written",
    "sink.epochs_commit.after": "the epoch is durable, not confirmed yet",
    "sink.advance.before": "a position without changes is about to be recorded in `_epochs`",
    "sink.advance.after": "it is durable, not confirmed yet",
    "sink.checkpoint.before": "a table's log is about to get a checkpoint",
    "sink.checkpoint.after": "it is written, not durable",
    "maintenance.write.before": "files are about to be joined into one",
    "maintenance.commit.before": "the file is durable, the exchange not committed",
    "maintenance.commit.after": "the exchange is committed",
    "maintenance.clean.before": "old versions are about to be removed",
}
"""Every point, and what is so when a process is there. The last group: in maintenance's own."""

Fault = Callable[[str], Exception]
Tell = Callable[[str, str, int], None]
"""Told each time before a point acts: the point, the action, how often it was reached."""

_ENTRY = re.compile(
    r"(?P<point>[^=]+)=(?P<action>[a-z]+)(?::(?P<seconds>\d+(?:\.\d+)?))?(?:@(?P<time>\d+)(?P<on>\+)?)?"
)
_ACTIONS = ("crash", "error", "delay")


def os_error(text: str) -> Exception:
    """Make what a local file system raises that fails for a moment."""
    return OSError(errno.EIO, text)


def lost(text: str) -> Exception:
    """Make what a part above the drivers raises when a connection or a storage fails."""
    return TransientError(text, reason="failpoint")


@dataclass(slots=True)
class Failpoint:
    """One entry of the variable. `has_acted`: at least once."""

    point: str
    action: str
    seconds: float
    time: int
    goes_on: bool
    has_acted: bool = False

    def is_due(self, count: int) -> bool:
        """Return whether it acts at the `count`-th time."""
        return count == self.time or (self.goes_on and count > self.time)


class ArmedFailpoints:
    """The entries of one process. Made by `parse`; from any thread."""

    def __init__(self, stages: list[list[Failpoint]], tell: Tell) -> None:
        self._stages = stages
        self._tell = tell
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def act(self, point: str, fault: Fault) -> float:
        """Do what is due there; give how many seconds to wait. Raises what `fault` makes."""
        if point not in POINTS:
            raise KeyError(point)
        with self._lock:
            entry, count = self._due(point)
        if entry is None:
            return 0.0
        self._tell(point, entry.action, count)
        if entry.action == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if entry.action == "error":
            raise fault(f"failpoint {point}")
        return entry.seconds

    def _due(self, point: str) -> tuple[Failpoint | None, int]:
        if not self._stages:
            return None, 0
        self._counts[point] += 1
        count = self._counts[point]
        stage = self._stages[0]
        due = next((e for e in stage if e.point == point and e.is_due(count)), None)
        if due is not None:
            due.has_acted = True
            if len(self._stages) > 1 and all(e.has_acted for e in stage):
                self._stages.pop(0)
                self._counts.clear()
        return due, count


class _Switch:
    armed: ArmedFailpoints | None = None


def arm(text: str, tell: Tell, *, only: str = "") -> bool:
    """Have the entries of `text` act in this process; none are there if it is empty. At its start.

    `only`: entries of other points than those that begin so are left to other processes. Gives
    whether there is any. Raises ConfigError.
    """
    stages = [[e for e in stage if e.point.startswith(only)] for stage in parse(text)]
    stages = [stage for stage in stages if stage]
    _Switch.armed = ArmedFailpoints(stages, tell) if stages else None
    return bool(stages)


def parse(text: str) -> list[list[Failpoint]]:
    """Read what the variable says: stages of entries. Raises ConfigError."""
    stages = [[part.strip() for part in stage.split(",")] for stage in text.split(">")]
    return [[_entry(part) for part in stage if part] for stage in stages if any(stage)]


def _entry(text: str) -> Failpoint:
    found = _ENTRY.fullmatch(text)
    if found is None or found["action"] not in _ACTIONS:
        raise ConfigError(
            f"{VARIABLE}: {text!r} is no entry",
            remedy="write POINT=crash, POINT=error or POINT=delay:SECONDS, with @N: the Nth time",
        )
    point = found["point"]
    if point not in POINTS:
        near = difflib.get_close_matches(point, POINTS, n=1, cutoff=0.0)
        raise ConfigError(f"{VARIABLE}: there is no point {point!r}", remedy=f"write {near[0]!r}")
    seconds = float(found["seconds"] or DELAY_S) if found["action"] == "delay" else 0.0
    return Failpoint(point, found["action"], seconds, int(found["time"] or 1), bool(found["on"]))


def reach(point: str, fault: Fault = os_error) -> None:
    """Record that a thread is at `point`. Raises what `fault` makes of a text, if it is to."""
    if _Switch.armed is not None:
        time.sleep(_Switch.armed.act(point, fault))


async def reach_async(point: str, fault: Fault = lost) -> None:
    """Record that a coroutine is at `point`; a delay holds up nothing else."""
    if _Switch.armed is not None:
        await asyncio.sleep(_Switch.armed.act(point, fault))
