from __future__ import annotations

from tests.harness.virtual_time import VirtualTimeLoop


def pytest_asyncio_loop_factories() -> dict[str, type[VirtualTimeLoop]]:
    """Let these tests, which are in memory, wait for a lake without it taking time."""
    return {"virtual time": VirtualTimeLoop}
