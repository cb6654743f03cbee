"""Factories for connectors, lakes and tables from a config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

from ingestd.app.connectors import FACTORIES
from ingestd.config import Config, SourceSettings, load_config
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.fencing import WriterIdentity
from ingestd.lake.pause_mark import LakePauseMark
from ingestd.lake.reference.source import RawReferenceSource
from ingestd.lake.reference.table import DeltaReferenceTable
from ingestd.lake.store.pending_calls import StorageCalls
from ingestd.model.errors import ConfigError
from ingestd.model.memory_shares import (
    CONNECTOR,
    EPOCH_BUFFER,
    REFERENCE_BUFFER,
    REFERENCE_FOLD,
    bytes_of,
    source_bytes,
)
from ingestd.model.schema import TableId
from ingestd.pipeline.filling_epoch import EpochPolicy
from ingestd.pipeline.policy import PipelinePolicy
from ingestd.ports import Connector, PauseMark, ReferenceTableSource
from ingestd.postgres.settings import SETTINGS
from ingestd.process.memory import Trimming


def load(path: Path) -> Config:
    """Read the config. Raises ConfigError."""
    return load_config(path, SETTINGS, os.environ)


def require_source(config: Config, source: str) -> None:
    """Raise ConfigError if there is no such source."""
    if source not in config.sources:
        there = ", ".join(sorted(config.sources))
        raise ConfigError(f"sources.{source}: no such source; there is {there}")


def storage_options(config: Config) -> Mapping[str, str] | None:
    """Return the lake's storage options for deltalake; None if there are none."""
    options = {k: v.get_secret_value() for k, v in config.lake.storage_options.items()}
    return options or None


def connector_bytes(config: Config) -> int:
    """Return how much memory what reads a source may read ahead with."""
    return _share(config, CONNECTOR)


def share_bytes(config: Config) -> int:
    """Return each source's share of `limits.memory`."""
    return source_bytes(config.limits.memory, len(config.sources))


def _share(config: Config, part: Fraction) -> int:
    return bytes_of(part, share_bytes(config))


def connector_of(config: Config, name: str, settings: SourceSettings) -> Connector:
    """Return the connector of a source."""
    factory = FACTORIES[settings.kind]
    return factory.create(name, settings, memory_bytes=connector_bytes(config))


def lake_of(
    config: Config,
    source: str,
    writer: WriterIdentity | None = None,
    trimming: Trimming | None = None,
    *,
    is_claimed: bool = True,
    calls: StorageCalls | None = None,
) -> DeltaLake:
    """Return a source's lake. `is_claimed`: the caller holds the source's claim."""
    return DeltaLake(
        config.lake.uri,
        source,
        storage_options=storage_options(config),
        buffer_bytes=_share(config, EPOCH_BUFFER),
        trimming=trimming,
        writer=writer,
        is_claimed=is_claimed,
        calls=calls,
    )


def reference_table_of(
    config: Config,
    source: str,
    table: TableId,
    *,
    is_claimed: bool = True,
    calls: StorageCalls | None = None,
) -> DeltaReferenceTable:
    """Return the reference table of a source's table."""
    return DeltaReferenceTable(
        config.lake.uri,
        source,
        table,
        storage_options=storage_options(config),
        buffer_bytes=_share(config, REFERENCE_BUFFER),
        is_claimed=is_claimed,
        needs_marker=True,
        calls=calls,
    )


def raw_source_of(
    config: Config, source: str, table: TableId, calls: StorageCalls, position: int | None
) -> ReferenceTableSource:
    """Return a reference table's source that reads the raw table from `position` on."""
    made = RawReferenceSource(
        config.lake.uri,
        source,
        table,
        storage_options=storage_options(config),
        memory_bytes=_share(config, REFERENCE_FOLD),
        calls=calls,
    )
    if position is not None:
        made.resume(position)
    return made


def policy_of(config: Config, settings: SourceSettings) -> PipelinePolicy:
    """Return the config's policy for a source's pipeline."""
    return PipelinePolicy(
        epoch=EpochPolicy(config.epoch.max_delay, config.epoch.max_bytes),
        snapshot=getattr(settings, "snapshot", "initial") == "initial",
        resnapshot_when_lost=getattr(settings, "slot_lost", "resnapshot") == "resnapshot",
        resnapshot_when_lake_lost=getattr(settings, "lake_lost", "stop") == "resnapshot",
        resnapshot_rewritten=getattr(settings, "on_rewrite", "resnapshot") == "resnapshot",
    )


def pause_mark_of(config: Config, name: str, calls: StorageCalls | None = None) -> PauseMark:
    """Return the mark in the lake that records that a source is paused."""
    options = storage_options(config)
    return LakePauseMark(
        config.lake.uri, name, storage_options=options, needs_lake=True, calls=calls
    )


def pause_mark(config_path: Path, source: str) -> PauseMark:
    """Return the pause mark of a source in a config file. Raises ConfigError."""
    config = load(config_path)
    require_source(config, source)
    return pause_mark_of(config, source)
