"""The folders of a job's tables below its target (names are mapped as in the lake)."""

from __future__ import annotations

from ingestd.lake.layout import segment
from ingestd.model.schema import TableId

MIRRORS = "_mirror"
"""The mirror job's log of cuts."""
HISTORIES = "_history"
"""The history job's log of cuts."""
FEEDS = "_feed"
"""The feed job's log of cuts."""


def table_path(target: str, table: str) -> str:
    """Return the folder of a table ("schema.table"). Raises ValueError for any other text."""
    named = TableId.parse(table)
    return f"{target.rstrip('/')}/{segment(named.schema)}/{segment(named.name)}"
