"""Reads of a lake's own bookkeeping by the daemon's code, without Spark."""

from __future__ import annotations

from collections.abc import Mapping

from ingestd.config import Config
from ingestd.lake.delta.append_log import AppendLog
from ingestd.lake.lake_id import read_lake_id
from ingestd.lake.layout import Layout
from ingestd.lake.registry_table import RegistryTable
from ingestd.lake.store.store import open_store
from ingestd.model.lake_state import RegisteredTable
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId


def lake_position(config: Config, source: str) -> Lsn | None:
    """Return the position up to which the lake is complete; None for an empty lake.

    It is the app transaction of `_epochs`: an idle source's position is above its last epoch.
    """
    log = _log(config, source, Layout(source).epochs)
    log.load()
    version = log.app_version()
    return None if version is None else Lsn(version)


def known_tables(config: Config, source: str) -> Mapping[TableId, RegisteredTable]:
    """Return the source's tables that are registered in the lake."""
    registry = RegistryTable(_log(config, source, Layout(source).tables), lambda _: None)
    registry.load()
    return {table.table: table for table in registry.tables().values()}


def _log(config: Config, source: str, folder: str) -> AppendLog:
    options = {k: v.get_secret_value() for k, v in config.lake.storage_options.items()}
    store = open_store(config.lake.uri, options or None)
    read_lake_id(store)
    return AppendLog(store, folder, Layout(source).app_id())
