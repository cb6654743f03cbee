"""Delays before a retry (design section 6)."""

from __future__ import annotations

from ingestd.model.errors import IngestdError, TransientError

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
OPERATOR_DELAY_S = 60.0
HELD_DELAY_S = 3.0
"""Longest delay while another daemon, or an old connection, has the source: it usually ends soon,
most often in an upgrade, and an attempt costs one connection."""
_HELD = {"claimed", "claim_lost", "slot_active"}


def retry_delay_s(error: IngestdError, attempt: int, jitter: float) -> float:
    """Return the delay after the `attempt`-th failure in a row (from 1); `jitter` in [0, 1)."""
    if not isinstance(error, TransientError):
        return OPERATOR_DELAY_S
    longest_s = HELD_DELAY_S if error.reason in _HELD else LONGEST_DELAY_S
    ceiling = min(longest_s, FIRST_DELAY_S * 2.0 ** (min(attempt, 16) - 1))
    return float(ceiling * (0.5 + 0.5 * jitter))
