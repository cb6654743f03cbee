"""Local stores that behave as other kinds do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync

if TYPE_CHECKING:
    from pathlib import Path


class StoreWithoutPut(LocalStore):
    """Has no conditional put, so that deltalake commits."""

    supports_conditional_put = False


def lake_by(kind: type[LocalStore], root: Path, **options: Any) -> DeltaLake:
    """Return a lake of source shop whose store is of that kind."""
    return DeltaLake(str(root), "shop", store=kind(root, Fsync()), **options)
