"""A check that the daemon at a config's address is the one of that config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ingestd.model.errors import OperatorError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ingestd.config.units import Address


@dataclass(frozen=True, slots=True)
class DaemonIdentity:
    """The identity of a config's daemon, without secrets, as in /status.

    `lake`: its URI as written. `claims`: by source, its slot or polled database.
    """

    lake: str
    claims: Mapping[str, str]

    def difference(self, status: Mapping[str, Any]) -> str | None:
        """Return how the daemon with this /status differs; None if it is the same."""
        sources = status["sources"]
        if set(sources) != set(self.claims):
            return f"its sources are {', '.join(sources)}"
        if (lake := status.get("lake", self.lake)) != self.lake:
            return f"its lake is {lake}, not {self.lake}"
        for name, claim in self.claims.items():
            if (other := sources[name].get("claim", claim)) != claim:
                return f"its source {name} uses {other}, not {claim}"
        return None

    def require(self, listen: Address, status: Mapping[str, Any]) -> None:
        """Raise OperatorError if the daemon with this /status is another."""
        why = self.difference(status)
        if why is not None:
            raise OperatorError(
                f"another daemon listens on {listen}: {why}",
                remedy="give the config that it was started with, or --url",
            )
