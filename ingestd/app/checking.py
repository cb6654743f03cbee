"""`ingestd check`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ingestd.app.parts import connector_of, lake_of, load, storage_options
from ingestd.capture.advisory import claim_of
from ingestd.capture.reference import check_references
from ingestd.checks import CheckLine
from ingestd.config import Config, SourceSettings
from ingestd.errors import IngestdError
from ingestd.observe.protection import check_http
from ingestd.sink.probe import probe
from ingestd.sink.writer import SEPARATE, Writer, drop_of


def check(config_path: Path) -> list[CheckLine]:
    """Look for everything that would make a run fail. Raises ConfigError."""
    config = load(config_path)
    lake = probe(config.lake.uri, storage_options(config))
    writers = [] if lake.level == "fail" else asyncio.run(_check_writers(config))
    lines = [lake, *writers, check_http(config.http)]
    return [*filter(None, lines), *asyncio.run(_check_sources(config))]


async def _check_writers(config: Config) -> list[CheckLine | None]:
    return await asyncio.gather(*(_check_writer(config, n, s) for n, s in config.sources.items()))


async def _check_writer(config: Config, name: str, settings: SourceSettings) -> CheckLine | None:
    """Say if another ingestd wrote the source's lake last, one that may live."""
    subject = f"lake {config.lake.uri}"
    lake = lake_of(config, name, Writer(claim_of(settings)), is_claimed=False)
    try:
        other = await lake.last_claim()
    except IngestdError as error:
        return CheckLine(name, subject, "warn", error.what, error.remedy)
    finally:
        await lake.close()
    if other is None:
        return None
    detail = f"last written by {other}, which is not this config's; `ingestd run` takes it over"
    remedy = f"if that one is to go on, {SEPARATE}{drop_of(other)}"
    return CheckLine(name, subject, "warn", detail, remedy)


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
