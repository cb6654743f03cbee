"""The clock of this host."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_now() -> datetime:
    """Return the time in UTC."""
    return datetime.now(UTC)
