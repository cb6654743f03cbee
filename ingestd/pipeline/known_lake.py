"""Whether a lake is the one that a source was last written to, and what is agreed if it is not.

Who says that it is not::

    the capture    `LakeLost`: the source was read further than this lake says (the slot of `wal`)
    this process   `KnownLake`: it has seen another id in the marker, or was further itself
    its sources    `LakeRoot`: a lake without a marker is begun by nobody while the slot of one
                   source shows that there was a lake

What happens then, before anything is written and before the source is touched::

    lake_lost = "stop"             LakeLostError; tried again every 60 s, so a lake that comes back
                                   is taken up where it ends
    agreed for this start, or      nothing in the lake: a first start, from where the source is
    lake_lost = "resnapshot"       something in it: every table is read again, as after a lost slot

A first start writes, in this order: the marker, the source's record in `_epochs`, the publication,
the slot. So a slot without the record is no first start, wherever that was killed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from ingestd.model.errors import LakeLostError
from ingestd.model.lake_state import LakeState
from ingestd.model.lsn import Lsn
from ingestd.ports import ChangeCapture, Continuity, LakeLost, Sink

PATIENCE_S = 10.0
"""How long a source waits for what the others know of a lake without a marker."""
_LOOKS = 5


@dataclass(slots=True)
class KnownLake:
    """What this process knows of a source's lake, over all its attempts.

    `lake`: the id in its marker; `position`: up to where it was durable, None before.
    `is_accepted`: whether someone agreed that the source begins in another lake: until it has.
    `found`, `lost`: which of the two the last look said; at first neither.
    """

    lake: str | None = None
    position: Lsn | None = None
    is_accepted: bool = False
    found: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)

    def difference(self, committed: LakeState) -> str | None:
        """Say why this is not the lake that this process wrote; None if it may be."""
        if self.lake is not None and committed.lake not in {None, self.lake}:
            return f"it is another lake: its id is {committed.lake}, and was {self.lake}"
        if self.position is None or (committed.position or Lsn(0)) >= self.position:
            return None
        if committed.has_nothing:
            return "it has nothing of this source any more: it was removed, or is not mounted"
        return (
            f"it ends at {committed.position}, and was written to {self.position}: it is an older "
            "copy"
        )

    def is_found(self, lake: str) -> None:
        """Record that the source is written to this lake."""
        self.lake = lake
        self.lost.clear()
        self.found.set()

    def is_lost(self) -> None:
        """Record that nothing may be written."""
        self.found.clear()
        self.lost.set()

    def has_begun(self, position: Lsn) -> None:
        """Take a position that is durable: what was agreed to is done."""
        self.position = position
        self.is_accepted = False


class LakeRoot:
    """What the sources of one daemon say of their one lake while it has no marker."""

    def __init__(self) -> None:
        self._said: dict[str, str | None] = {}
        self._waited_for: set[str] = set()
        self._news = asyncio.Event()

    def expect(self, source: str) -> None:
        """Take a source that has not said anything yet."""
        self._said.pop(source, None)
        self._waited_for.add(source)

    def forget(self, source: str) -> None:
        """Record that a source is not there any more."""
        self._said.pop(source, None)
        self._settle(source)

    def say(self, source: str, lost: str | None) -> None:
        """Take why a source's lake is lost; None if nothing speaks against it."""
        self._said[source] = lost
        self._settle(source)

    def fail(self, source: str) -> None:
        """Record that an attempt of a source ended: nobody waits for what it knows."""
        self._settle(source)

    def _settle(self, source: str) -> None:
        self._waited_for.discard(source)
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def may_begin(self, source: str) -> None:
        """Return if no other source says that the lake is lost, or knows nothing for too long.

        Raises LakeLostError.
        """
        self._settle(source)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while self._waited_for - {source} and not self._others(source):
                    await self._news.wait()
        except TimeoutError:
            pass
        lost = self._others(source)
        if lost:
            raise LakeLostError(
                f"source {source}: the lake has no marker, and it is not begun while it is lost to "
                f"source {lost[0]}",
                remedy=f"put the lake back; or do what source {lost[0]} says",
            )

    def _others(self, source: str) -> list[str]:
        return [name for name, why in self._said.items() if why is not None and name != source]


async def look(sink: Sink, capture: ChangeCapture) -> tuple[LakeState, Continuity]:
    """Read the lake, and ask the source about it. Changes nothing; needs no claim.

    Without a claim, or before the fence, someone may commit and confirm between the two: then the
    lake has grown since.
    """
    committed = await sink.open()
    for _ in range(_LOOKS):
        verdict = await capture.continuity(committed)
        if not isinstance(verdict, LakeLost):
            break
        again = await sink.open()
        has_grown = again.position != committed.position
        committed = replace(again, notices=(*committed.notices, *again.notices))
        if not has_grown:
            break
    return committed, verdict


def lake_lost(source: str, why: str) -> LakeLostError:
    """Make the error for a lake that is lost: what happened, and what can be done."""
    return LakeLostError(
        f"source {source}: the lake is lost: {why}",
        remedy="put the lake back (mount it, restore it, or correct lake.uri): it is tried again "
        "every 60 s and goes on where it ended. Or begin with the lake that is there, and read all "
        f"tables again: ingestd run --accept-empty-lake {source}, once; or lake_lost = "
        f'"resnapshot" in [sources.{source}], always',
    )
