"""The advisory lock by which a daemon claims a source (I5)."""

from __future__ import annotations

import hashlib


def claim_key(name: str) -> int:
    """Give the lock's key for a slot's or source's name: a signed 64-bit number."""
    digest = hashlib.sha256(f"ingestd/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
