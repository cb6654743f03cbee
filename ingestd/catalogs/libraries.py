"""Client libraries that are installed with an extra."""

from __future__ import annotations

import importlib
from typing import Any

from ingestd.model.errors import OperatorError


def optional_client(module: str, package: str, extra: str) -> Any:  # noqa: ANN401 - a module
    """Return a client library. Raise OperatorError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise OperatorError(
            f"{package} is not installed", remedy=f"pip install 'ingestd[{extra}]'"
        ) from error
