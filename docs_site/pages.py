"""The reference pages: their generators by file name, and their folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from docs_site import commands, configuration, errors, events, metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "reference"
PAGES: Mapping[str, Callable[[], str]] = {
    "commands.md": commands.page,
    "configuration.md": configuration.page,
    "metrics.md": metrics.page,
    "events.md": partial(events.page, ROOT / "ingestd", ROOT / "spark_jobs"),
    "errors.md": partial(errors.page, ROOT),
}
"""Generators that read the current code."""
