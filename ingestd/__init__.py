"""ingestd: Postgres changes into a Delta lake, exactly once.

ARCHITECTURE.md introduces the code. Docstrings that cite `design section N` refer to
docs/internals/design.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingestd.app.capture import Capture, CapturedEpoch
    from ingestd.reading.lake import Lake

__all__ = ["Capture", "CapturedEpoch", "__version__", "open_lake"]
__version__ = "0.1.0"


def open_lake(
    uri: str, storage_options: Mapping[str, str] | None = None, *, cache: str | None = None
) -> Lake:
    """Open a lake for reading, without a daemon and without Spark.

    ``ingestd.open_lake("./lake").source("shop").table("public.orders").current()`` returns the
    current rows of a table. The config is not read, so its masks and excluded columns don't apply:
    rows that were written before a mask have their values in the clear. `uri`: as `lake.uri` in the
    config; `storage_options`: as `[lake.storage_options]`. `cache`: a private folder, created if it
    is missing. It keeps current rows of tables with a key, in the clear, so that later reads take
    only changes from the lake.

    Raise OperatorError if there is no lake, if a newer version wrote it, or without access to it;
    TransientError for a fault that passes.
    """
    from ingestd.reading import lake  # noqa: PLC0415 - no command needs it

    return lake.open_lake(uri, storage_options, cache=cache)


def __getattr__(name: str) -> object:
    """Import the public classes when they are first used: a command needs none of them."""
    if name in {"Capture", "CapturedEpoch"}:
        from ingestd.app import capture  # noqa: PLC0415

        return getattr(capture, name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
