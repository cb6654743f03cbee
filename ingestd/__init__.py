"""ingestd: Postgres changes into a Delta lake, exactly once.

ARCHITECTURE.md introduces the code. Docstrings that cite `design section N` refer to
docs/internals/design.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingestd.reading.lake import Lake

__version__ = "0.1.0"


def open_lake(uri: str, storage_options: Mapping[str, str] | None = None) -> Lake:
    """Open a lake for reading, without a daemon and without Spark.

    ``ingestd.open_lake("./lake").source("shop").table("public.orders").current()`` returns the
    current rows of a table. `uri`: as `lake.uri` in the config; `storage_options`: as
    `[lake.storage_options]`. Raise OperatorError if there is no lake, if a newer version wrote it,
    or without access to it; TransientError for a fault that passes.
    """
    from ingestd.reading import lake  # noqa: PLC0415 - imported by every command otherwise

    return lake.open_lake(uri, storage_options)
