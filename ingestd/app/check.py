"""`ingestd check`: a preflight of server, slot, lake and HTTP."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from ingestd.app.factories import connector_of, lake_of, load, policy_of
from ingestd.app.lake_check import check_lakes
from ingestd.app.register import check_catalog
from ingestd.config import Config
from ingestd.http.auth import check_http
from ingestd.model.check import CheckLine
from ingestd.model.errors import IngestdError
from ingestd.pipeline.preflight import StartRehearsal
from ingestd.ports import Connector
from ingestd.postgres.connection.claim_names import signature_of
from ingestd.postgres.reference_copy import check_references
from ingestd.postgres.server_capacity import room_lines


def check(config_path: Path) -> list[CheckLine]:
    """Return everything that would make a run fail, and warnings. Raises ConfigError."""
    config = load(config_path)
    of_lake: list[CheckLine | None] = [*lake_of(config).check()]
    has_lake = all(line.level != "fail" for line in of_lake if line is not None)
    if has_lake:
        of_lake += asyncio.run(check_lakes(config))
        of_lake += asyncio.run(_check_writers(config))
    lines = [*of_lake, check_http(config.http, os.environ), *check_catalog(config)]
    return [*filter(None, lines), *asyncio.run(_check_sources(config, has_lake=has_lake))]


async def _check_writers(config: Config) -> list[CheckLine | None]:
    lake = lake_of(config)
    claims = {name: signature_of(settings) for name, settings in config.sources.items()}
    return await asyncio.gather(*(lake.check_writer(name, c) for name, c in claims.items()))


async def _check_sources(config: Config, *, has_lake: bool) -> list[CheckLine]:
    connectors = {n: connector_of(config, n, s) for n, s in config.sources.items()}
    try:
        found = dict(
            zip(
                connectors,
                await asyncio.gather(
                    *(_check_source(config, n, c, has_lake=has_lake) for n, c in connectors.items())
                ),
                strict=True,
            )
        )
        room = await _check_room({n: c for n, c in connectors.items() if _answers(found[n])})
    finally:
        for connector in connectors.values():
            await connector.close()
    # The combined need of all sources replaces the line about a single source's need.
    together = {(line.source, line.subject) for line in room}
    alone = [line for lines in found.values() for line in lines]
    return [line for line in alone if (line.source, line.subject) not in together] + room


async def _check_source(
    config: Config, name: str, connector: Connector, *, has_lake: bool
) -> list[CheckLine]:
    settings = config.sources[name]
    lines = [*await connector.check(), *await check_references(name, settings)]
    if not has_lake or not _answers(lines):
        return lines
    return _merged(lines, await _rehearsed(config, name, connector))


async def _rehearsed(config: Config, name: str, connector: Connector) -> list[CheckLine]:
    """Return what would make a start fail, from a rehearsal of its steps."""
    lake = lake_of(config)
    sink = lake.sink(name)
    capture = connector.capture(sink)
    try:
        demand = await connector.demand()
        policy = policy_of(config, config.sources[name])
        start = StartRehearsal(
            name,
            capture,
            sink,
            policy,
            claimed_by=demand.claimed_by,
            placed=partial(lake.place, name),
        )
        return await start.lines()
    except IngestdError as error:
        return [CheckLine(name, "start", "fail", error.what, error.remedy)]
    finally:
        await sink.close()
        await capture.close()


async def _check_room(connectors: Mapping[str, Connector]) -> list[CheckLine]:
    """Return which capacity a server lacks for all the sources that share it."""
    if len(connectors) < 2:  # noqa: PLR2004 - for one source, its own preflight reports this
        return []
    try:
        demands = {name: await connector.demand() for name, connector in connectors.items()}
    except IngestdError:
        return []  # a source that no longer responds is reported by the next check
    return room_lines(demands)


def _answers(lines: Sequence[CheckLine]) -> bool:
    """Return whether the source's server responds, so that more can be checked."""
    return not any(x.level == "fail" and x.subject in {"connection", "server"} for x in lines)


def _merged(lines: Sequence[CheckLine], rehearsed: Sequence[CheckLine]) -> list[CheckLine]:
    """Return both without duplicates; a table that a start refuses is not listed as captured."""
    refused = {line.subject for line in rehearsed if line.level == "fail"}
    kept = [line for line in lines if line.level == "fail" or line.subject not in refused]
    reported = {(line.detail, line.remedy) for line in kept}
    return kept + [line for line in rehearsed if (line.detail, line.remedy) not in reported]
