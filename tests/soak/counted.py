"""The daemon, which on SIGUSR2 reports what it holds: as JSON, in the file that VARIABLE names.

``python -m tests.soak.counted run ...`` is as ``ingestd run ...``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from ingestd.cli import main

if TYPE_CHECKING:
    from types import FrameType

VARIABLE = "INGESTD_COUNTS"


def tell_counts(_number: int, _frame: FrameType | None) -> None:
    """Write how many tasks and blocks of memory there are, and the bytes that Arrow holds.

    Not `gc.get_objects`: it gives tuples that another thread is still filling, and holding these
    makes that thread fail with a SystemError.
    """
    counts = {
        "tasks": len(asyncio.all_tasks()),
        "blocks": sys.getallocatedblocks(),
        "arrow_bytes": pa.total_allocated_bytes(),
    }
    path = Path(os.environ[VARIABLE])
    path.with_suffix(".new").write_text(json.dumps(counts), encoding="ascii")
    path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, tell_counts)
    main()
