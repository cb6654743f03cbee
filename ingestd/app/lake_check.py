"""The part of `ingestd check` that finds out whether `run` could start with the lake."""

from __future__ import annotations

import asyncio

from ingestd.app.factories import connector_of, lake_of
from ingestd.config import Config, SourceSettings
from ingestd.model.check import CheckLine
from ingestd.model.errors import IngestdError
from ingestd.pipeline.known_lake import lake_lost, read_lake
from ingestd.ports import LakeLost


async def check_lakes(config: Config) -> list[CheckLine | None]:
    """Return a line for each source whose lake is lost. Read-only; safe while a daemon runs."""
    return await asyncio.gather(*(_check(config, n, s) for n, s in config.sources.items()))


async def _check(config: Config, name: str, settings: SourceSettings) -> CheckLine | None:
    connector = connector_of(config, name, settings)
    lake = lake_of(config).sink(name)
    capture = connector.capture(lake)
    try:
        _, continuity = await read_lake(lake, capture)
    except IngestdError:
        return None  # reported by the lines about connection, server, slot and lake
    finally:
        await lake.close()
        await capture.close()
        await connector.close()
    if not isinstance(continuity, LakeLost):
        return None
    error = lake_lost(name, continuity.reason)
    subject = f"lake {config.lake.uri}"
    if getattr(settings, "lake_lost", "stop") == "stop":
        return CheckLine(name, subject, "fail", error.what, error.remedy)
    detail = f'{error.what}; lake_lost = "resnapshot": all tables are re-snapshotted'
    return CheckLine(name, subject, "warn", detail, error.remedy)
