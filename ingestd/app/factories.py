"""Factories for connectors, lakes and tables from a config."""

from __future__ import annotations

import os
from pathlib import Path

from ingestd.app.connectors import FACTORIES
from ingestd.app.lakes import LAKES
from ingestd.config import Config, SourceSettings, load_config
from ingestd.model.errors import ConfigError
from ingestd.model.memory_shares import CONNECTOR, bytes_of, source_bytes
from ingestd.pipeline.filling_epoch import EpochPolicy
from ingestd.pipeline.policy import PipelinePolicy
from ingestd.ports import Connector, LakeFactory, PauseMark
from ingestd.postgres.settings import SETTINGS


def load(path: Path) -> Config:
    """Read the config. Raises ConfigError."""
    return load_config(path, SETTINGS, os.environ)


def require_source(config: Config, source: str) -> None:
    """Raise ConfigError if there is no such source."""
    if source not in config.sources:
        there = ", ".join(sorted(config.sources))
        raise ConfigError(f"sources.{source}: no such source; there is {there}")


def lake_of(config: Config) -> LakeFactory:
    """Return the factory of the config's lake. The daemon has one until it ends."""
    return LAKES[config.lake.kind](config.lake, config.limits.memory)


def connector_bytes(config: Config) -> int:
    """Return how much memory what reads a source may read ahead with."""
    return bytes_of(CONNECTOR, share_bytes(config))


def share_bytes(config: Config) -> int:
    """Return each source's share of `limits.memory`."""
    return source_bytes(config.limits.memory, len(config.sources))


def connector_of(config: Config, name: str, settings: SourceSettings) -> Connector:
    """Return the connector of a source."""
    factory = FACTORIES[settings.kind]
    return factory.create(name, settings, memory_bytes=connector_bytes(config))


def policy_of(config: Config, settings: SourceSettings) -> PipelinePolicy:
    """Return the config's policy for a source's pipeline."""
    return PipelinePolicy(
        epoch=EpochPolicy(config.epoch.max_delay, config.epoch.max_bytes),
        reads_existing_rows=getattr(settings, "snapshot", "initial") == "initial",
        resnapshot_when_lost=getattr(settings, "slot_lost", "resnapshot") == "resnapshot",
        resnapshot_when_lake_lost=getattr(settings, "lake_lost", "stop") == "resnapshot",
        resnapshot_rewritten=getattr(settings, "on_rewrite", "resnapshot") == "resnapshot",
    )


def pause_mark(config_path: Path, source: str) -> PauseMark:
    """Return the pause mark of a source in a config file. Raises ConfigError."""
    config = load(config_path)
    require_source(config, source)
    return lake_of(config).pause_mark(source)
