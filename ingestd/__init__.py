"""ingestd: Postgres changes into a Delta lake, exactly once.

ARCHITECTURE.md introduces the code. Docstrings that cite `design section N` refer to
docs/internals/design.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingestd.app.capture import Capture, CapturedEpoch

__all__ = ["Capture", "CapturedEpoch", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import the public classes when they are first used: a command needs none of them."""
    if name in {"Capture", "CapturedEpoch"}:
        from ingestd.app import capture  # noqa: PLC0415

        return getattr(capture, name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
