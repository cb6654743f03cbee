"""Which config file is meant where none is named."""

from __future__ import annotations

from pathlib import Path

DEFAULT_CONFIG = Path("ingestd.toml")
"""Where `init` writes, and where the others look."""


def daemon_config(config: Path | None, url: str | None) -> Path | None:
    """Return the config that says which daemon is asked; None where its URL does."""
    return DEFAULT_CONFIG if config is None and url is None else config
