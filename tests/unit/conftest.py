from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Iterator[None]:
    """Leave files and folders to the page cache: unit tests called fsync(2) 14,000 times.

    Only a cut of power would show it. What is synced, and when, is asked of a `Durability`; the
    daemons of the other tests sync.
    """
    fsync = os.fsync

    def fsync_others(descriptor: int) -> None:
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            fsync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync_others)
        yield
