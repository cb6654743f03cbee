"""The status from slot and lake for `ingestd status` while no daemon responds."""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path
from typing import Any

from ingestd import __version__
from ingestd.app.factories import connector_of, lake_of, load
from ingestd.config import UNSTREAMED, Config, SourceSettings
from ingestd.model.errors import IngestdError, OperatorError, TableError
from ingestd.model.lake_state import TableState
from ingestd.observe.status import (
    DaemonStatus,
    ReferenceStatus,
    SourceState,
    SourceStatus,
)
from ingestd.observe.status_json import to_json
from ingestd.pipeline.known_lake import lake_lost, read_lake
from ingestd.ports import LakeFactory, LakeLost
from ingestd.postgres.connection.claim_names import claim_of
from ingestd.process.clock import utc_now


def status(config_path: Path, why: str) -> dict[str, Any]:
    """Return what is known from slot and lake, in the format of /status.

    `why`: why no daemon can be asked; it becomes `offline` and the reason of `not_ready_because`.
    """
    return asyncio.run(_status(load(config_path), why))


async def _status(config: Config, why: str) -> dict[str, Any]:
    now = utc_now()
    daemon = DaemonStatus(__version__, now, lake=config.lake.uri)
    for name, settings in config.sources.items():
        daemon.sources[name] = await _offline(config, name, settings, now)
    tree = config.redactor.tree(to_json(daemon))
    assert isinstance(tree, dict)
    unknown = {"started_at": None, "offline": why, "ready": False, "not_ready_because": [why]}
    return tree | unknown


async def _offline(
    config: Config, name: str, settings: SourceSettings, now: datetime
) -> SourceStatus:
    found = SourceStatus(name, now, SourceState.CLOSED, claim=claim_of(settings))
    capture = connector_of(config, name, settings).capture()
    lake = lake_of(config)
    sink = lake.sink(name)
    try:
        if (since := await lake.pause_mark(name).since()) is not None:
            found.pause(since)
        committed, continuity = await read_lake(sink, capture)
        found.resumed(epoch=committed.epoch, end_lsn=committed.position)
        for table in committed.tables.values():
            why = None if table.reason is None else OperatorError(table.reason)
            is_dropped = table.state is TableState.DROPPED
            since = (table.at if is_dropped else None) or now
            found.table(str(table.table), table.state, since, why, snapshot_lsn=table.snapshot_lsn)
        found.forget_dropped(now)
        for error in committed.damaged.values():
            found.table(str(error.table), TableState.STOPPED, now, error)
        lag = await capture.lag()
        found.measured(lag, None)
        if lag.confirmed_lsn is not None:
            found.confirmed(lag.confirmed_lsn)
        await _offline_references(lake, name, settings, found)
        if isinstance(continuity, LakeLost):
            found.lake_lost = True
            raise lake_lost(name, continuity.reason)
    except IngestdError as error:
        if found.state is SourceState.PAUSED:
            found.reason, found.remedy = error.what, error.remedy
        else:
            found.enter(SourceState.CLOSED, now, error)
    finally:
        await sink.close()
        await capture.close()
    return found


async def _offline_references(
    lake: LakeFactory, name: str, settings: SourceSettings, status: SourceStatus
) -> None:
    for table, controls in settings.references().items():
        shown, kind = str(table), controls.reference
        try:
            state = await lake.reference_table(name, table, is_claimed=False).open()
        except TableError as error:
            stopped = ReferenceStatus(shown, kind, TableState.STOPPED, status.since)
            stopped.reason, stopped.remedy = error.reason, error.remedy
            status.references[shown] = stopped
            continue
        if state is None:
            continue
        reference = ReferenceStatus(shown, kind, TableState.LIVE, status.since)
        reference.version, reference.rows = state.version, state.rows
        reference.epoch = state.position
        status.references[shown] = reference
        if kind in UNSTREAMED:
            status.table(shown, TableState.LIVE, status.since)
