"""Detects whether a lake is the one that a source was last written to, and handles a lost lake.

It is detected by::

    the capture    `LakeLost`: the source was read further than this lake says (the slot of `wal`)
    this process   `KnownLake`: it has seen another id of the lake, or has written further itself
    its sources    `LakeRoot`: a lake without an id is not started while the slot of one source
                   shows that there was a lake
    while it runs  `Pipeline` asks the lake every few seconds whether it still exists

The consequence, before anything is written and before the source is touched::

    lake_lost = "stop"             LakeLostError; retried every 60 s, so a lake that comes back
                                   continues where it ends
    agreed for this start, or      empty lake: a first start, from the source's position
    lake_lost = "resnapshot"       otherwise: every table is re-read, as after a lost slot

A first start writes, in this order: the lake's id, the source's record in `_epochs`, the
publication, the slot. So a slot without the record is never a first start, even if that one was
killed.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

from ingestd.model.errors import LakeLostError
from ingestd.model.lake_state import LakeState
from ingestd.model.lsn import ZERO, Lsn
from ingestd.ports import ChangeCapture, Continuity, LakeLost, Sink

_REREADS = 5
_CHECK_INTERVAL_S = 0.1


@dataclass(slots=True)
class KnownLake:
    """The state of a source's lake as this process knows it, over all attempts.

    `lake_id`: its id; `position`: the last durable position, None before. `is_accepted`:
    an operator agreed that the source starts in another lake; reset once it has. `found`, `lost`:
    the finding of the last check; at first neither is set.
    """

    lake_id: str | None = None
    position: Lsn | None = None
    is_accepted: bool = False
    found: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    def difference(self, committed: LakeState) -> str | None:
        """Return why this is not the lake that this process wrote; None if it may be."""
        if self.lake_id is not None and committed.lake_id not in {None, self.lake_id}:
            return f"it is another lake: its id is {committed.lake_id}, not {self.lake_id}"
        if self.position is None or (committed.position or Lsn(0)) >= self.position:
            return None
        if committed.has_nothing:
            return "it has nothing of this source any more: it was removed or is not mounted"
        return (
            f"it ends at {committed.position}, but was written to {self.position}: it is an older "
            "copy"
        )

    def mark_found(self, lake_id: str) -> None:
        """Record that the source is written to this lake."""
        self.lake_id = lake_id
        self.lost.clear()
        self.found.set()

    def mark_lost(self) -> None:
        """Record that nothing may be written."""
        self.found.clear()
        self.lost.set()

    def note_position(self, position: Lsn) -> None:
        """Record a durable position: it ends the operator's agreement."""
        self.position = position
        self.is_accepted = False


class LakeRoot:
    """The findings of a daemon's sources about their common lake while it has no id.

    `patience_s`: how long a source waits for the others' findings.
    """

    def __init__(self, patience_s: float = 10.0) -> None:
        self._patience_s = patience_s
        self._reports: dict[str, str | None] = {}
        self._waited_for: set[str] = set()
        self._news = asyncio.Event()

    def expect(self, source: str) -> None:
        """Expect a finding of this source."""
        self._reports.pop(source, None)
        self._waited_for.add(source)

    def drop_source(self, source: str) -> None:
        """Record that a source was removed."""
        self._reports.pop(source, None)
        self._settle(source)

    def report(self, source: str, lost: str | None) -> None:
        """Record why a source's lake is lost; None if there is no sign of that."""
        self._reports[source] = lost
        self._settle(source)

    def fail(self, source: str) -> None:
        """Record that an attempt of a source ended: other sources stop waiting for its finding."""
        self._settle(source)

    def _settle(self, source: str) -> None:
        self._waited_for.discard(source)
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def ensure_not_lost(self, source: str) -> None:
        """Return unless another source reports a lost lake. Waits for reports for a limited time.

        Raises LakeLostError.
        """
        self._settle(source)
        try:
            async with asyncio.timeout(self._patience_s):
                while self._waited_for - {source} and not self._others(source):
                    await self._news.wait()
        except TimeoutError:
            pass
        lost = self._others(source)
        if lost:
            raise LakeLostError(
                f"source {source}: the lake has no id file and is not started, because it is lost"
                f" to source {lost[0]}",
                remedy=f"put the lake back, or follow the remedy of source {lost[0]}",
            )

    def _others(self, source: str) -> list[str]:
        return [name for name, why in self._reports.items() if why is not None and name != source]


async def read_lake(
    sink: Sink, capture: ChangeCapture, patience_s: float = 0.0
) -> tuple[LakeState, Continuity]:
    """Read the lake, and compare it with the source. Changes nothing; needs no claim.

    The state and `patience_s`: see `open_lake`.

    Without a claim, or before the fence, another process may commit and confirm between the two
    steps: then the lake has grown since.
    """
    committed = await open_lake(sink, capture, patience_s)
    for _ in range(_REREADS):
        continuity = await capture.continuity(committed)
        if not isinstance(continuity, LakeLost):
            break
        again = await open_lake(sink, capture, patience_s)
        has_grown = again.position != committed.position
        committed = replace(again, notices=(*committed.notices, *again.notices))
        if not has_grown:
            break
    return committed, continuity


async def open_lake(sink: Sink, capture: ChangeCapture, patience_s: float = 0.0) -> LakeState:
    """Open the lake; the tables that the server has not reached are damaged in the result.

    `LakeState.position` comes from `_epochs`; a position above it comes from one raw table's log.
    It decides about that table alone: who can write to one table's folder can stop that table, but
    no other (I8). `patience_s`: how long a standby may take to receive what a table has.
    """
    committed = await sink.open()
    position = committed.position or ZERO
    if (committed.floor or ZERO) <= position:
        return committed
    until = time.monotonic() + patience_s
    while True:
        end = await capture.server_end(committed)
        is_awaited = any(
            lsn > max(end.lsn, position) and committed.is_active(table)
            for table, lsn in committed.reaches.items()
        )
        if not (is_awaited and end.in_recovery and time.monotonic() < until):
            break
        await asyncio.sleep(_CHECK_INTERVAL_S)
    refused = sink.refuse_beyond(max(end.lsn, position))
    return committed.without(refused) if refused else committed


def lake_lost(source: str, why: str) -> LakeLostError:
    """Return the error for a lost lake: the cause, and the remedies."""
    return LakeLostError(
        f"source {source}: the lake is lost: {why}",
        remedy="put the lake back (mount it, restore it, or correct lake.uri): it is retried "
        "every 60 s and continues where it ended. Or start with the current lake and re-read all "
        f"tables: ingestd run --accept-empty-lake {source}, once; or lake_lost = "
        f'"resnapshot" in [sources.{source}], always',
    )
