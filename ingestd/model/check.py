"""The findings of a preflight: the lines of `ingestd check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class CheckLine:
    """One check.

    `source`: its name in the config, empty for the lake and the process. `subject`: the object
    checked (`wal_level`, `table public.orders`). `detail`: the finding. `remedy`: the SQL or
    command that fixes it, ready to paste.
    """

    source: str
    subject: str
    level: Level
    detail: str
    remedy: str | None = None
