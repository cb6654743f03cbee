"""Any damage of a raw table stops it alone, and its remedy lets it continue (I8).

One table for each kind of damage, all damaged together: the others continue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ingestd.model.lake_state import TableState
from ingestd.model.schema import TableId
from tests.faults.test_lake_faults import config, slot_of
from tests.harness.command_line import run_command, snapshot_of
from tests.harness.compare import assert_lake_equals_source, registry
from tests.harness.damages import (
    ALTERED,
    ANYHOW,
    AT_START,
    EVER,
    HARMLESS,
    NEVER,
    Damage,
    move_away,
)
from tests.harness.lake_faults import IMPATIENT, bound_by_permissions, close_folder
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 90.0
WHENS = [
    "start",
    pytest.param("idle", marks=pytest.mark.long),
    pytest.param("kill", marks=pytest.mark.long),
]


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("when", WHENS)
def test_isolated_any_damage_of_a_raw_table_stops_it_alone(
    database: Database, make_daemon: MakeDaemon, lake: Path, when: str
) -> None:
    stops = EVER | ALTERED if when == "idle" else EVER | ALTERED | AT_START
    kinds = stops | NEVER | HARMLESS
    tables = {kind: TableId("public", kind) for kind in kinds}
    database.execute(*(f"CREATE TABLE {k} (id serial PRIMARY KEY, note text)" for k in kinds))
    daemon = make_daemon(config(database, lake))
    daemon.program = bound_by_permissions(IMPATIENT)
    _write(database, kinds)
    daemon.start_ready()
    for _ in range(2):
        _write(database, kinds)
        _assert_equal(database, lake, list(tables.values()))
    if when == "start":
        assert daemon.sigterm() == 0
    for kind, damage in kinds.items():
        damage(lake / "shop/public" / kind)
    _write(database, kinds)
    if when == "start":
        daemon.start()
    elif when == "kill":
        await_until(lambda: _told(daemon), LIMIT_S, daemon.tail)
        daemon.sigkill()
        _write(database, kinds)
        daemon.start()
    expected = set(stops) - (ANYHOW if when == "idle" else set())

    def stopped() -> set[str]:
        return {table.rpartition(".")[2] for table in _told(daemon)}

    await_until(lambda: expected <= stopped(), LIMIT_S, lambda: f"{expected - stopped()}")
    going_on = [tables[kind] for kind in kinds.keys() - stopped() - ANYHOW]
    _write(database, kinds)
    _assert_equal(database, lake, going_on)
    found = stopped()
    assert found <= expected | ANYHOW
    states = {row["table"]: row["state"] for row in registry(lake)}
    assert {k for k in kinds if states[str(tables[k])] == TableState.STOPPED} == found
    readiness = daemon.get("/readyz")
    assert readiness is not None
    assert readiness[0] == 503
    assert daemon.events("source.failed") == [], daemon.events("source.failed")
    if when == "idle":
        assert daemon.sigterm() == 0
        daemon.start()
        await_until(lambda: set(stops) <= stopped(), LIMIT_S, lambda: f"{set(stops) - stopped()}")
        found = stopped()
    _assert_not_read_again(daemon, "foreign_append")
    _follow_remedies(daemon, lake, found)
    daemon.await_ready(LIMIT_S)
    _write(database, kinds)
    _assert_equal(database, lake, list(tables.values()))
    assert daemon.events("source.failed") == []
    assert daemon.sigterm() == 0


def _write(database: Database, kinds: dict[str, Damage]) -> None:
    database.execute(*(f"INSERT INTO {k} (note) VALUES (md5(random()::text))" for k in kinds))


def _assert_equal(database: Database, lake: Path, tables: list[TableId]) -> None:
    assert_lake_equals_source(
        database, lake, tables=tables, slot=slot_of(database), limit_s=LIMIT_S
    )


def _told(daemon: Daemon) -> dict[str, str]:
    return {e["table"]: e["remedy"] for e in daemon.events("table.stopped")}


def _assert_not_read_again(daemon: Daemon, kind: str) -> None:
    """A snapshot would leave foreign rows in the log, at arbitrary positions."""
    done = run_command(daemon.config_path, "snapshot", "shop", f"public.{kind}")
    assert done.returncode != 0, done.stdout
    assert "another writer" in done.stderr
    assert "move that folder away" in done.stderr


def _follow_remedies(daemon: Daemon, lake: Path, found: set[str]) -> None:
    asked = []
    for name, remedy in _told(daemon).items():
        folder = lake / "shop/public" / name.rpartition(".")[2]
        assert str(folder) in remedy
        if folder.name in {"no_permission", "read_only"}:
            folder.chmod(0o755)
            close_folder(folder, yes=False)
        else:
            move_away(folder)
        command, source, table = snapshot_of(remedy)
        assert (command, source) == ("snapshot", "shop")
        asked.append(table)
    assert {table.rpartition(".")[2] for table in asked} == found
    done = run_command(daemon.config_path, "snapshot", "shop", *asked)
    assert done.returncode == 0, done.stderr
