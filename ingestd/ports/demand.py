"""The resources a source needs from its server and what is free: other sources may share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServerCapacity:
    """How many of a resource a server allows and has in use, and the remedy if none is free."""

    total: int
    used: int
    remedy: str

    @property
    def free(self) -> int:
        """How many are free."""
        return max(0, self.total - self.used)


@dataclass(frozen=True, slots=True)
class ServerDemand:
    """The resources a run of a source would take from its server beyond those in use.

    `server`: the same for all sources on one server. `claimed_by`: the session that holds the
    source's claim, for display; None if none does. `needed` and `room`: by the name of the limit.
    """

    server: str
    claimed_by: str | None = None
    needed: Mapping[str, int] = field(default_factory=dict)
    room: Mapping[str, ServerCapacity] = field(default_factory=dict)
