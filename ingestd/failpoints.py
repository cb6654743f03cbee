"""Named points at which tests inject a fault. Inactive unless INGESTD_FAILPOINTS is set.

::

    INGESTD_FAILPOINTS="sink.raw_commit.before=crash@3"
    INGESTD_FAILPOINTS="sink.fsync.after=delay:0.2@1+,capture.confirm.before=error>sink.checkpoint.after=crash"

An entry is POINT=ACTION. @N selects the Nth time the process reaches the point (@1 if omitted); @N+
selects that time and every later one. Entries separated by commas count independently; those after
a `>` start to count once all before it have acted.

=============  ====================================================================================
action         what happens
=============  ====================================================================================
crash          SIGKILL to this process
error          raise what the real component raises when its connection or storage fails
delay[:S]      wait S seconds (0.2)
=============  ====================================================================================

The module holds global state, the only such switch in the process, because any code may reach a
point. When inactive, a point costs one call and one comparison. docs/failpoints.md describes how
the points are tested.
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
    "capture.publication.before": "about to create or alter the publication",
    "capture.publication.after": "this is committed",
    "capture.slot.before": "about to create the slot; an unusable one is dropped",
    "capture.slot.after": "the slot exists",
    "capture.point.before": "about to create a temporary slot: for a consistent snapshot, or as "
    "the point to which a new slot is advanced",
    "capture.point.after": "it exists, its snapshot is exported",
    "capture.split.before": "about to read a split of a snapshot",
    "capture.split.after": "all its rows are read and handed over",
    "capture.slot_copy.before": "about to copy the slot, to drain a backlog",
    "capture.slot_copy.after": "the copy exists",
    "capture.drain.before": "the server is about to decode a part of the backlog",
    "capture.drain.after": "the part has been read",
    "capture.slot_advance.before": "about to advance the slot while a backlog is drained",
    "capture.slot_advance.after": "it is advanced",
    "capture.stream_begin.before": "about to start the stream, where the backlog ends",
    "capture.stream_begin.after": "START_REPLICATION was answered",
    "capture.receive.before": "about to receive more of the stream",
    "capture.receive.after": "it is received, not decoded yet",
    "capture.decode.before": "about to decode a block",
    "capture.decode.after": "it is decoded, not delivered yet",
    "capture.confirm.before": "about to confirm what is durable",
    "capture.confirm.after": "the confirm is sent to the server, or noted for the next stream",
    "sink.marker.before": "about to write the id file of a new lake, before anything else",
    "sink.marker.after": "it exists, nothing else of the lake does",
    "sink.adopt.before": "about to record a source's server in `_epochs`",
    "sink.adopt.after": "the record exists, `_tables` perhaps not",
    "sink.parquet.before": "about to write rows to a Parquet file",
    "sink.parquet.after": "they are written, the file is open",
    "sink.fsync.before": "about to make files and their folder durable",
    "sink.fsync.after": "they are durable",
    "sink.raw_create.before": "about to create a raw table, without rows",
    "sink.raw_create.after": "it exists",
    "sink.new_columns.before": "about to add columns to a raw table",
    "sink.new_columns.after": "it has them, without rows",
    "sink.raw_commit.before": "about to commit a raw table's rows of an epoch",
    "sink.raw_commit.after": "they are durable, other tables' rows and `_epochs` perhaps not",
    "sink.commit_put.before": "about to put a commit (on a disk: it is durable under another name)",
    "sink.commit_put.after": "it exists (on a disk: its folder is not durable yet)",
    "sink.tables_commit.before": "about to commit events to `_tables`",
    "sink.tables_commit.after": "they are durable",
    "sink.epochs_commit.before": "all tables' rows are durable, the row of `_epochs` is written",
    "sink.epochs_commit.after": "the epoch is durable, not confirmed yet",
    "sink.advance.before": "about to record a position without changes in `_epochs`",
    "sink.advance.after": "it is durable, not confirmed yet",
    "sink.checkpoint.before": "about to write a checkpoint of a table's log",
    "sink.checkpoint.after": "it is written, not durable",
    "maintenance.write.before": "about to compact files into one",
    "maintenance.commit.before": "the file is durable, the exchange not committed",
    "maintenance.commit.after": "the exchange is committed",
    "maintenance.clean.before": "about to remove old versions",
}
"""Every point, with the state of a process there. The last group: in the maintenance process."""

Fault = Callable[[str], Exception]
ReportHit = Callable[[str, str, int], None]
"""Called each time before a point acts, with the point, the action and its count so far."""

_ENTRY = re.compile(
    r"(?P<point>[^=]+)=(?P<action>[a-z]+)(?::(?P<seconds>\d+(?:\.\d+)?))?(?:@(?P<time>\d+)(?P<on>\+)?)?"
)
_ACTIONS = ("crash", "error", "delay")


def os_error(text: str) -> Exception:
    """Return the error that a local file system raises for a momentary failure."""
    return OSError(errno.EIO, text)


def lost(text: str) -> Exception:
    """Return the error that code above the drivers raises when a connection or storage fails."""
    return TransientError(text, reason="failpoint")


@dataclass(slots=True)
class Failpoint:
    """One entry of the variable. `has_acted`: at least once."""

    point: str
    action: str
    seconds: float
    time: int
    is_lasting: bool
    has_acted: bool = False

    def is_due(self, count: int) -> bool:
        """Return whether the entry acts at the `count`-th time."""
        return count == self.time or (self.is_lasting and count > self.time)


class ArmedFailpoints:
    """The entries of one process, from `parse`. Thread-safe."""

    def __init__(self, stages: list[list[Failpoint]], report: ReportHit) -> None:
        self._stages = stages
        self._report = report
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def act(self, point: str, fault: Fault) -> float:
        """Run the action due at a point. Return the seconds to wait. Raise what `fault` returns."""
        if point not in POINTS:
            raise KeyError(point)
        with self._lock:
            entry, count = self._due(point)
        if entry is None:
            return 0.0
        self._report(point, entry.action, count)
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


def arm(text: str, report: ReportHit, *, only: str = "") -> bool:
    """Activate the entries of `text` in this process. Return whether there are any.

    Called at process start. An empty text deactivates all points. `only`: a prefix; entries of
    other points are left to other processes. Raises ConfigError.
    """
    stages = [[e for e in stage if e.point.startswith(only)] for stage in parse(text)]
    stages = [stage for stage in stages if stage]
    _Switch.armed = ArmedFailpoints(stages, report) if stages else None
    return bool(stages)


def parse(text: str) -> list[list[Failpoint]]:
    """Parse the variable into stages of entries. Raises ConfigError."""
    stages = [[part.strip() for part in stage.split(",")] for stage in text.split(">")]
    return [[_entry(part) for part in stage if part] for stage in stages if any(stage)]


def _entry(text: str) -> Failpoint:
    found = _ENTRY.fullmatch(text)
    if found is None or found["action"] not in _ACTIONS:
        raise ConfigError(
            f"{VARIABLE}: {text!r} is not a valid entry",
            remedy="write POINT=crash, POINT=error or POINT=delay:SECONDS, with @N: the Nth time",
        )
    point = found["point"]
    if point not in POINTS:
        near = difflib.get_close_matches(point, POINTS, n=1, cutoff=0.0)
        raise ConfigError(f"{VARIABLE}: no such point: {point!r}", remedy=f"write {near[0]!r}")
    seconds = float(found["seconds"] or DELAY_S) if found["action"] == "delay" else 0.0
    return Failpoint(point, found["action"], seconds, int(found["time"] or 1), bool(found["on"]))


def reach(point: str, fault: Fault = os_error) -> None:
    """Run the action that is due at `point`, in a thread. Raise what `fault` returns, if any."""
    if _Switch.armed is not None:
        time.sleep(_Switch.armed.act(point, fault))


async def reach_async(point: str, fault: Fault = lost) -> None:
    """Run the action that is due at `point`, in a coroutine. A delay blocks only the caller."""
    if _Switch.armed is not None:
        await asyncio.sleep(_Switch.armed.act(point, fault))
