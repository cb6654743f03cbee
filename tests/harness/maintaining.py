"""Orders for the process of `ingestd.lake.maintenance.process`."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RETENTION_S = 24 * 3600.0
"""Longer than any test's data exists, so no commit of a log is removed."""


def order_of(lake: Path, source: str = "shop", only: Sequence[str] | None = None) -> str:
    """Return an input line for the process: compact and clean these tables, or all."""
    order = {
        "uri": str(lake),
        "storage_options": {},
        "source": source,
        "target_bytes": 64 << 20,
        "retention_s": RETENTION_S,
        "began_s": time.time(),
        "joins": True,
        "cleans": True,
        "only": only,
        "references": [],
    }
    return f"{json.dumps(order)}\n"
