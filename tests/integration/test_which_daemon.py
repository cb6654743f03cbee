"""Commands ask the daemon that their config means, and no other; on a real server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.harness.command_line import run_command
from tests.harness.config import wal_config

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 90


@pytest.fixture
def daemon(database: Database, make_daemon: MakeDaemon, lake: Path) -> Daemon:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    slot = f'slot = "{database.name}"\npublication = "{database.name}"'
    made = make_daemon(wal_config(lake=lake, dsn=database.dsn, source_extra=slot))
    made.start_ready(LIMIT_S)
    return made


def other_config(daemon: Daemon, old: str, new: str) -> Path:
    """Return the daemon's config with one thing else, where it finds the daemon's port."""
    text = daemon.config_path.read_text()
    assert old in text
    path = daemon.config_path.with_name("other.toml")
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.thorough
@pytest.mark.parametrize("command", ["pause", "resume", "snapshot"])
def test_no_command_goes_to_a_daemon_with_another_lake(
    daemon: Daemon, tmp_path: Path, lake: Path, command: str
) -> None:
    config = other_config(daemon, f'"{lake}"', f'"{tmp_path / "other"}"')
    tables = ["public.t"] if command == "snapshot" else []
    found = run_command(config, command, "shop", *tables)
    assert (found.returncode, found.stdout) == (1, "")
    assert f": its lake is {lake}, not {tmp_path / 'other'}" in found.stderr
    assert not (tmp_path / "other").exists()
    shop = (daemon.status() or {})["sources"]["shop"]
    assert (shop["state"], shop["tables"][0]["snapshot_requested"]) == ("streaming", False)


def test_nor_to_one_with_another_slot(daemon: Daemon, database: Database) -> None:
    config = other_config(daemon, f'slot = "{database.name}"', 'slot = "other"')
    found = run_command(config, "pause", "shop")
    assert found.returncode == 1
    assert "not slot 'other', database" in found.stderr
    assert f"uses slot '{database.name}', database {database.name}" in found.stderr


@pytest.mark.thorough
def test_status_says_whose_word_it_is(daemon: Daemon, tmp_path: Path, lake: Path) -> None:
    told = json.loads(run_command(daemon.config_path, "status", "--json").stdout)
    assert (told["offline"], told["ready"], told["lake"]) == (None, True, str(lake))
    config = other_config(daemon, f'"{lake}"', f'"{tmp_path / "other"}"')
    shown = run_command(config, "status").stdout.splitlines()[0]
    assert ": its lake is" in shown
    assert daemon.sigterm() == 0
    shown = run_command(daemon.config_path, "status").stdout.splitlines()[0]
    assert shown == f"no daemon answers on {daemon.listen}. From slot and lake:"
    told = json.loads(run_command(daemon.config_path, "status", "--json").stdout)
    why = f"no daemon answers on {daemon.listen}"
    assert (told["offline"], told["ready"], told["not_ready_because"]) == (why, False, [why])
    assert told["sources"]["shop"]["epoch"] >= 1
