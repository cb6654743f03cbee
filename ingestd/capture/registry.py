"""The kinds of capture, by the config's `kind`. A new one is a module and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from ingestd.capture.polling.connector import PollingFactory
from ingestd.capture.wal.connector import WalFactory
from ingestd.ports import ConnectorFactory

FACTORIES: Mapping[str, ConnectorFactory] = {f.name: f for f in (WalFactory(), PollingFactory())}
