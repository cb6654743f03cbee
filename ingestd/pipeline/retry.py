"""When failed work is retried (design section 6)."""

from __future__ import annotations

from dataclasses import dataclass

from ingestd.model.backoff import Backoff
from ingestd.model.errors import IngestdError, TransientError

_TRANSIENT, _CLAIMED = Backoff(0.5, 30.0), Backoff(0.5, 3.0)
_CLAIMED_REASONS = {"claimed", "claim_lost", "slot_active"}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to wait before failed work is retried.

    `claimed`: while another daemon, or an old connection, has the source: that ends soon, most
    often in an update, and asking costs one connection. `operator_delay_s`: after a fault that
    needs an operator; `reference_delay_s`: after such a fault of a reference table, longer if an
    attempt takes long.
    """

    transient: Backoff = _TRANSIENT
    claimed: Backoff = _CLAIMED
    operator_delay_s: float = 60.0
    reference_delay_s: float = 5.0

    def delay_s(self, error: IngestdError, attempt: int, jitter: float) -> float:
        """Return the delay after the `attempt`-th failure in a row (from 1); `jitter` in [0, 1)."""
        if not isinstance(error, TransientError):
            return self.operator_delay_s
        backoff = self.claimed if error.reason in _CLAIMED_REASONS else self.transient
        return backoff.after(attempt) * (0.5 + 0.5 * jitter)


ONCE_ATTEMPTS = 5
"""How often what runs only once is tried in a row, if its faults are transient."""

RETRY = RetryPolicy()
"""The policy of a source that was given no other."""
