"""`await_until(condition, limit_s, what)`: a test waits for a condition, never for a time."""

from __future__ import annotations

from ingestd.testing.embedded.waiting import await_until

__all__ = ["await_until"]
