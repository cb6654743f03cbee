"""Another owner's table beside one whose owner attacks, and a daemon that captures both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ingestd.lake.delta.read import read_raw
from ingestd.model.schema import TableId
from tests.harness.config import polling_config, wal_config

if TYPE_CHECKING:
    from ingestd.testing.embedded.daemon import Daemon
    from tests.harness.databases import Database

GOOD = ("CREATE TABLE good (id int PRIMARY KEY)", "INSERT INTO good VALUES (1)")
"""The other owner's table."""


def config_for(kind: str, database: Database, lake: Path, extra: str = "", more: str = "") -> str:
    """Return a config for all tables. `extra`: in the source's section; `more`: at the end."""
    name = f"ingestd_{database.name}"
    if kind == "wal":
        source = f'slot = "{name}"\npublication = "{name}"\n{extra}'
        return wal_config(lake=lake, dsn=database.dsn, source_extra=source, extra=more)
    return polling_config(lake=lake, dsn=database.dsn, source_extra=extra, extra=more)


def ids_in(lake: Path, table: str = "good") -> set[int]:
    """Return the ids of a table's rows in the lake; empty if there is no table."""
    try:
        rows = read_raw(str(lake), "shop", TableId("public", table))
    except Exception:  # noqa: BLE001 - not there yet
        return set()
    return set(rows["id"].to_pylist())


def peak_mb(daemon: Daemon) -> int:
    """Return the most memory that the daemon ever had."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{daemon.pid}/status").read_text())
    assert found is not None
    return int(found[1]) >> 10
