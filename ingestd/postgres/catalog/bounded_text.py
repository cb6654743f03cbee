"""Limits for texts of the catalog whose size a table's owner determines.

Comments, defaults, expressions, conditions and labels have no limit of their own, or one per object
that is far too high for all objects of a table. A catalog query covers all tables of a source, so
an answer that is too large would stop all of them. Therefore the server compares the sizes, and
sends only what is within the limit; what exceeds it is the fault of its table.
"""

from __future__ import annotations

from typing import LiteralString


def at_most(
    limit_bytes: int, text: LiteralString, *, total: LiteralString = "", of: LiteralString = ""
) -> LiteralString:
    """Return the SQL of a text, null if it exceeds a limit together with those before it.

    `of`: the window within which the texts are added; `total`: their sum, if it is known. Comparing
    the sizes does not decompress the texts.
    """
    size = total or f"pg_catalog.sum(pg_catalog.octet_length({text})) OVER ({of})"
    return f"CASE WHEN {size} <= {limit_bytes:d} THEN {text} END"


def shortened(limit_bytes: int, text: LiteralString) -> LiteralString:
    """Return the SQL of a text that is only compared: its digest if it exceeds a limit."""
    size = f"pg_catalog.octet_length({text})"
    return f"CASE WHEN {size} <= {limit_bytes:d} THEN {text} ELSE pg_catalog.md5({text}) END"
