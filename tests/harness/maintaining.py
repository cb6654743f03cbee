"""Orders for the process of `ingestd.lake.maintenance.process`."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RETENTION_S = 24 * 3600.0
"""Nothing of a test's is older: no commit of a log goes."""


def order_of(lake: Path, source: str = "shop", only: Sequence[str] | None = None) -> str:
    """Give the line that it reads: join and clean these tables, or all."""
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
