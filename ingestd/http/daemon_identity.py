"""Which daemon is meant, of those that may listen where a config says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ingestd.model.errors import OperatorError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ingestd.config.units import Address


@dataclass(frozen=True, slots=True)
class DaemonIdentity:
    """The daemon of a config, told without secrets, as /status does.

    `lake`: its URI as written, `claims`: what each source works by.
    """

    lake: str
    claims: Mapping[str, str]

    def difference(self, status: Mapping[str, Any]) -> str | None:
        """Say why the daemon that gave this /status is another; None if it is the one."""
        sources = status["sources"]
        if set(sources) != set(self.claims):
            return f"its sources are {', '.join(sources)}"
        if (lake := status.get("lake", self.lake)) != self.lake:
            return f"its lake is {lake}, not {self.lake}"
        for name, claim in self.claims.items():
            if (other := sources[name].get("claim", claim)) != claim:
                return f"its source {name} works by {other}, not {claim}"
        return None

    def require(self, listen: Address, status: Mapping[str, Any]) -> None:
        """Raise OperatorError if the daemon that gave this /status is another."""
        why = self.difference(status)
        if why is not None:
            raise OperatorError(
                f"the daemon on {listen} is another: {why}",
                remedy="give the config that it runs with, or --url",
            )
