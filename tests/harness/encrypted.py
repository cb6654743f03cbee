"""Connections that are taken for encrypted ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ingestd.capture.wal import drain_slot

if TYPE_CHECKING:
    import pytest


def as_if_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have messages packed by the server, and read by libpq."""

    async def is_plain(_: object) -> bool:
        return False

    monkeypatch.setattr(drain_slot, "is_plain", is_plain)
