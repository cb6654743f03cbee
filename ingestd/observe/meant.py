"""Which daemon is meant, of those that may listen where a config says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ingestd.errors import OperatorError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ingestd.config import Config
    from ingestd.quantities import Address


@dataclass(frozen=True, slots=True)
class MeantDaemon:
    """The daemon of a config. `lake`: its URI as written, `slots`: by source, None for no slot."""

    lake: str
    slots: Mapping[str, str | None]

    @classmethod
    def of(cls, config: Config) -> MeantDaemon:
        """Say it without secrets, as /status does."""
        slots = {name: getattr(found, "slot", None) for name, found in config.sources.items()}
        return cls(config.redactor.text(config.lake.uri), slots)

    def difference(self, status: Mapping[str, Any]) -> str | None:
        """Say why the daemon that gave this /status is another; None if it is the one."""
        sources = status["sources"]
        if set(sources) != set(self.slots):
            return f"its sources are {', '.join(sources)}"
        if (lake := status.get("lake", self.lake)) != self.lake:
            return f"its lake is {lake}, not {self.lake}"
        for name, slot in self.slots.items():
            if (other := sources[name].get("slot", slot)) != slot:
                return f"its source {name} works by {_told(other)}, not {_told(slot)}"
        return None

    def require(self, listen: Address, status: Mapping[str, Any]) -> None:
        """Raise OperatorError if the daemon that gave this /status is another."""
        why = self.difference(status)
        if why is not None:
            raise OperatorError(
                f"the daemon on {listen} is another: {why}",
                remedy="give the config that it runs with (SIGHUP has it read anew), or --url",
            )


def _told(slot: str | None) -> str:
    return "no slot" if slot is None else f"slot {slot!r}"
