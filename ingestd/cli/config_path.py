"""The default config file."""

from __future__ import annotations

from pathlib import Path

DEFAULT_CONFIG = Path("ingestd.toml")
"""`init` writes this file; the other commands read it."""


def daemon_config(config: Path | None, url: str | None) -> Path | None:
    """Return the config that names the daemon; None if a URL names it."""
    return DEFAULT_CONFIG if config is None and url is None else config
