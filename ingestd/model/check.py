"""What a preflight finds: the lines of `ingestd check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class CheckLine:
    """One thing looked at.

    `source`: its name in the config, empty for the lake and the process. `subject`: what was looked
    at (`wal_level`, `table public.orders`). `detail`: what was found. `remedy`: the SQL or command
    that puts it right, ready to paste.
    """

    source: str
    subject: str
    level: Level
    detail: str
    remedy: str | None = None
