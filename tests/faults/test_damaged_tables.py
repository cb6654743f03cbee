"""An unusable raw table stops alone; its remedy lets it continue (I8)."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from ingestd.model.lake_state import TableState
from tests.faults.test_lake_faults import (
    ORDERS,
    VISITS,
    assert_equal,
    config,
    orders,
    shop,
    slot_of,
    write,
)
from tests.harness.command_line import run_command, snapshot_of
from tests.harness.compare import assert_lake_equals_source, registry
from tests.harness.damages import newest
from tests.harness.lake_faults import IMPATIENT, bound_by_permissions, close_folder
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

__all__ = ["shop"]
LIMIT_S = 60.0


def _garble(folder: Path) -> None:
    newest(folder).write_text("}{\n")


def _put_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


def _append(folder: Path) -> None:
    schema = pa.schema(DeltaTable(str(folder)).schema().to_arrow())
    nulls = pa.table([pa.nulls(1, f.type) for f in schema], schema=schema)
    write_deltalake(str(folder), nulls, mode="append")


def _overwrite(folder: Path) -> None:
    schema = pa.schema(DeltaTable(str(folder)).schema().to_arrow())
    write_deltalake(str(folder), schema.empty_table(), mode="overwrite")


AT_START: dict[str, Callable[[Path], None]] = {"garbage commit": _garble}
RUNNING: dict[str, Callable[[Path], None]] = {
    "locked": close_folder,
    "folder removed": shutil.rmtree,
    "foreign append": _append,
    "foreign overwrite": _overwrite,
    "file in place of the folder": _put_file,
}


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_damaged_raw_table_stops_alone_until_its_remedy(
    shop: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    daemon = make_daemon(config(shop, lake))
    daemon.program = bound_by_permissions(IMPATIENT)
    daemon.start_ready()
    assert_equal(shop, lake)
    for name, damage in RUNNING.items():
        before = len(daemon.events("table.stopped"))
        damage(orders(lake))
        write(shop)
        _goes_on_alone(name, shop, daemon, lake, before)
    for name, damage in AT_START.items():
        assert daemon.sigterm() == 0
        damage(orders(lake))
        before = len(daemon.events("table.stopped"))
        daemon.start()
        _goes_on_alone(name, shop, daemon, lake, before)
    assert daemon.events("source.failed") == []
    assert daemon.sigterm() == 0


def _goes_on_alone(name: str, shop: Database, daemon: Daemon, lake: Path, before: int) -> None:
    def told() -> list[dict[str, Any]]:
        return daemon.events("table.stopped")[before:]

    event = await_until(told, LIMIT_S, lambda: f"{name}\n{daemon.tail()}")[0]
    assert event["table"] == str(ORDERS), name
    rows = [row for row in registry(lake) if row["table"] == str(ORDERS)]
    assert rows[-1]["state"] == TableState.STOPPED, name
    shop.execute("INSERT INTO visits (note) VALUES ('goes on')")
    write(shop)
    assert_lake_equals_source(shop, lake, tables=[VISITS], slot=slot_of(shop), limit_s=LIMIT_S)
    if name == "locked":
        close_folder(orders(lake), yes=False)
    elif orders(lake).is_dir():
        shutil.rmtree(orders(lake))
    else:
        orders(lake).unlink(missing_ok=True)
    done = run_command(daemon.config_path, *snapshot_of(event["remedy"]))
    assert done.returncode == 0, (name, done.stderr)
    daemon.await_ready(LIMIT_S)
    write(shop)
    assert_equal(shop, lake)
