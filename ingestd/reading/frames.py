"""Libraries that are not installed with ingestd: pandas, polars and DuckDB."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ingestd.model.errors import OperatorError


def optional_library(name: str, needed_for: str, package: str) -> Any:  # noqa: ANN401 - a module
    """Import a library. Raise OperatorError if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise OperatorError(
            f"{needed_for} needs {name}, which is not installed: {error}",
            remedy=f"pip install '{package}'",
        ) from error
