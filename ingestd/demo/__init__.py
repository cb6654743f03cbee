"""The demo: an embedded Postgres, a shop, the real daemon, and a comparison at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def main(
    *, seconds: float = 30, path: Path | None = None, spark: bool = True, keep: bool = False
) -> int:
    """Run the demo; return the exit code, 0 only if the lake equals the source.

    `seconds`: how long customers and daemon run; the daemon is killed in the middle. `path`: the
    demo's folder (config, log, lake), ``demo-lake`` by default; an earlier demo in it is replaced.
    `spark`: read the lake with PySpark at the end, if installed. `keep`: leave Postgres running at
    the end, until Ctrl-C. Raises OperatorError.
    """
    from ingestd.demo.tour import run_demo  # noqa: PLC0415 - slow

    return run_demo(seconds=seconds, path=path, spark=spark, keep=keep)
