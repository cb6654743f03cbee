"""Config texts for a daemon under test."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MAX_DELAY = "200ms"


def wal_config(
    *,
    lake: Path | str,
    dsn: str,
    source: str = "shop",
    tables: Sequence[str] = ("public.*",),
    max_delay: str = MAX_DELAY,
    epoch: str = "",
    source_extra: str = "",
    extra: str = "",
) -> str:
    """Return TOML of a daemon with one source of kind `wal`; extras are inserted verbatim.

    `epoch`: into `[epoch]`, `source_extra`: into the source, `extra`: at the end.
    """
    quoted = json.dumps  # a JSON string is a TOML basic string
    return f"""\
[lake]
uri = {quoted(str(lake))}

[epoch]
max_delay = {quoted(max_delay)}
{epoch}

[sources.{source}]
kind = "wal"
dsn = {quoted(dsn)}
tables = [{", ".join(map(quoted, tables))}]
{source_extra}

{extra}
"""


def polling_config(
    *,
    lake: Path | str,
    dsn: str,
    source: str = "shop",
    tables: Sequence[str] = ("public.*",),
    interval: str = "100ms",
    max_delay: str = MAX_DELAY,
    source_extra: str = "",
    extra: str = "",
) -> str:
    """Return TOML of a daemon with one source of kind `polling`; extras are inserted verbatim.

    `source_extra`: into the source, `extra`: at the end, such as the tables' sections.
    """
    quoted = json.dumps
    return f"""\
[lake]
uri = {quoted(str(lake))}

[epoch]
max_delay = {quoted(max_delay)}

[sources.{source}]
kind = "polling"
dsn = {quoted(dsn)}
tables = [{", ".join(map(quoted, tables))}]
interval = {quoted(interval)}
discover_interval = "500ms"
{source_extra}

{extra}
"""
