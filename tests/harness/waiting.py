"""`await_until(condition, limit_s, what)`: a test never sleeps to wait."""

from __future__ import annotations

from ingestd.testing.embedded.waiting import await_until

__all__ = ["await_until"]
