"""What a process of this package does not import."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType


class _NoPandas(importlib.abc.MetaPathFinder):
    """Reports pandas as not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Raise ModuleNotFoundError for pandas."""
        del path, target
        if fullname == "pandas":
            raise ModuleNotFoundError(name=fullname)


def without_pandas() -> None:
    """Keep pyarrow from importing pandas, for as long as this process lives.

    Where pandas is installed, the first array that pyarrow makes of a list imports it. A daemon
    would start a sixth later, with tens of MB that nothing uses. For the daemon only: other
    commands use libraries that ask whether pandas is installed.
    """
    sys.meta_path.insert(0, _NoPandas())
