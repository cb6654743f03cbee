"""The kinds of lake by `LakeSettings.kind`. A new kind needs a module and a line here.

Nothing else outside of a lake's own folder imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingestd.config import LakeSettings
    from ingestd.model.schema import TableId
    from ingestd.ports import LakeFactory


def _delta(settings: LakeSettings, limit_bytes: int) -> LakeFactory:
    from ingestd.lake.factory import DeltaLakeFactory  # noqa: PLC0415

    return DeltaLakeFactory(settings, limit_bytes)


LAKES: dict[str, Callable[[LakeSettings, int], LakeFactory]] = {"delta": _delta}
"""Each builds the lake of these settings, for a process with this `limits.memory`."""


def local_tables(uri: str, source: str) -> Iterator[TableId]:
    """Return the tables of a source in a folder, fast enough for a shell. Raise OSError."""
    from ingestd.lake import layout  # noqa: PLC0415

    return layout.local_tables(Path(uri), source)
