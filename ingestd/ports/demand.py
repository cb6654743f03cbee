"""What a source needs of its server, and what that has: other sources may share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServerCapacity:
    """How many of something a server allows, how many are in use, what to do if none is left."""

    total: int
    used: int
    remedy: str

    @property
    def free(self) -> int:
        """How many are left."""
        return max(0, self.total - self.used)


@dataclass(frozen=True, slots=True)
class ServerDemand:
    """What a run of a source would take of its server beyond what is in use.

    `server`: the same for sources on one server. `claimed_by`: the session that holds the source's
    claim, for people; None if none does. `needed` and `room`: by the name of the limit.
    """

    server: str
    claimed_by: str | None = None
    needed: Mapping[str, int] = field(default_factory=dict)
    room: Mapping[str, ServerCapacity] = field(default_factory=dict)
