"""A folder that another user exchanged for a link stops its table alone until it is put back."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

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
from tests.harness.compare import assert_lake_equals_source
from tests.harness.lake_faults import IMPATIENT
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

__all__ = ["shop"]
ATTACKER = 65534
LIMIT_S = 60.0


@pytest.mark.thorough
@pytest.mark.attack("lake writer")
@pytest.mark.skipif(os.getuid() != 0, reason="a link is given to another user")
@pytest.mark.parametrize("when", ["start", "running"])
def test_isolated_a_link_of_another_user_stops_its_table_alone(
    shop: Database, make_daemon: MakeDaemon, lake: Path, tmp_path: Path, when: str
) -> None:
    daemon = make_daemon(config(shop, lake))
    daemon.program = IMPATIENT
    daemon.start_ready()
    assert_equal(shop, lake)
    if when == "start":
        assert daemon.sigterm() == 0
    folder, victim = orders(lake), tmp_path / "victim"
    shutil.copytree(folder, victim)
    folder.rename(tmp_path / "aside")
    folder.symlink_to(victim)
    os.lchown(folder, ATTACKER, -1)
    before = sorted(path for path in victim.rglob("*"))
    if when == "start":
        daemon.start()
    write(shop)
    event = await_until(lambda: daemon.events("table.stopped"), LIMIT_S, daemon.tail)[0]
    assert event["table"] == str(ORDERS)
    assert "is a symbolic link that another user made" in event["reason"]
    readiness = daemon.get("/readyz")
    assert readiness is not None
    assert readiness[0] == 503
    shop.execute("INSERT INTO visits (note) VALUES ('goes on')")
    write(shop)
    assert_lake_equals_source(shop, lake, tables=[VISITS], slot=slot_of(shop), limit_s=LIMIT_S)
    assert sorted(path for path in victim.rglob("*")) == before
    moved = re.search(r'mv \S+ "\$\(mktemp -d[^)]*\)"', event["remedy"])
    assert moved is not None
    subprocess.run(["bash", "-ec", moved[0]], check=True)
    done = run_command(daemon.config_path, *snapshot_of(event["remedy"]))
    assert done.returncode == 0, done.stderr
    daemon.await_ready(LIMIT_S)
    write(shop)
    assert_equal(shop, lake)
    assert sorted(path for path in victim.rglob("*")) == before
    assert daemon.events("source.failed") == []
    assert daemon.sigterm() == 0
