"""What a lake's own bookkeeping says, read as the daemon reads it: without Spark."""

from __future__ import annotations

from collections.abc import Mapping

from ingestd.config import Config
from ingestd.positions import Lsn
from ingestd.recorded import RegisteredTable
from ingestd.schema import TableId
from ingestd.sink.append_log import AppendLog
from ingestd.sink.marker import read_marker
from ingestd.sink.paths import Layout
from ingestd.sink.registry import RegistryTable
from ingestd.sink.store import open_store


def lake_position(config: Config, source: str) -> Lsn | None:
    """Give the position up to which the lake has everything; None for an empty lake.

    The app transaction of `_epochs`: an idle source has a position above its last epoch.
    """
    log = _log(config, source, Layout(source).epochs)
    log.load()
    version = log.app_version()
    return None if version is None else Lsn(version)


def known_tables(config: Config, source: str) -> Mapping[TableId, RegisteredTable]:
    """Give what the lake has of the source's tables."""
    registry = RegistryTable(_log(config, source, Layout(source).tables), lambda _: None)
    registry.load()
    return {table.table: table for table in registry.tables().values()}


def _log(config: Config, source: str, folder: str) -> AppendLog:
    options = {k: v.get_secret_value() for k, v in config.lake.storage_options.items()}
    store = open_store(config.lake.uri, options or None)
    read_marker(store)
    return AppendLog(store, folder, Layout(source).app_id())
