"""Where a job's tables lie below its target (the same mapping of names as in the lake)."""

from __future__ import annotations

from ingestd.lake.layout import segment
from ingestd.model.schema import TableId

MIRRORS = "_mirror"
"""The mirror's log of cuts."""
HISTORIES = "_history"
"""The history's."""


def table_path(target: str, table: str) -> str:
    """Return the folder of a table ("schema.table"). Raises ValueError for another text."""
    named = TableId.parse(table)
    return f"{target.rstrip('/')}/{segment(named.schema)}/{segment(named.name)}"
