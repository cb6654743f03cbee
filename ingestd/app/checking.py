"""`ingestd check`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ingestd.app.parts import connector_of, load, storage_options
from ingestd.capture.reference import check_references
from ingestd.checks import CheckLine
from ingestd.config import Config
from ingestd.observe.protection import check_http
from ingestd.sink.probe import probe


def check(config_path: Path) -> list[CheckLine]:
    """Look for everything that would make a run fail. Raises ConfigError."""
    config = load(config_path)
    lines = [probe(config.lake.uri, storage_options(config)), check_http(config.http)]
    return [*filter(None, lines), *asyncio.run(_check_sources(config))]


async def _check_sources(config: Config) -> list[CheckLine]:
    connectors = [connector_of(config, n, s) for n, s in config.sources.items()]
    try:
        found = await asyncio.gather(
            *(c.check() for c in connectors),
            *(check_references(n, s) for n, s in config.sources.items()),
        )
    finally:
        for connector in connectors:
            await connector.close()
    return [line for lines in found for line in lines]
