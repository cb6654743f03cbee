"""A commit in one folder that looks like another daemon's stops that table alone (I5, I8)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.testing.embedded.waiting import await_until
from tests.harness.hostile_folder import commit_of, ids_in, plant_commit
from tests.integration.test_one_folder import await_good, log_of, started

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("lake writer")


@pytest.mark.parametrize(
    "claim",
    ["its own", pytest.param("slot 'other' at nowhere", marks=pytest.mark.thorough)],
)
def test_isolated_a_forged_takeover_does_not_end_the_source(
    database: Database, lake: Path, make_daemon: MakeDaemon, claim: str
) -> None:
    daemon = started(database, lake, make_daemon, "wal")
    log = log_of(lake)
    actions = map(json.loads, (log / f"{0:020}.json").read_text().splitlines())
    signed = next(action["commitInfo"] for action in actions if "commitInfo" in action)
    own = str(signed["ingestdWriter"]).partition(" ")[2]
    info: dict[str, Any] = {
        "operation": "WRITE",
        "timestamp": 1,
        "ingestdCommit": "0" * 32,
        "ingestdWriter": f"{'1' * 32} {own if claim == 'its own' else claim}",
    }
    if claim != "its own":
        info["ingestdFence"] = "true"
    plant_commit(log, commit_of([{"commitInfo": info}]))
    database.execute("INSERT INTO bad VALUES (2)", "INSERT INTO good VALUES (2)")
    await_good(daemon, lake, 2)
    await_until(lambda: bool(daemon.events("table.stopped")), 30, daemon.tail)
    assert [event["table"] for event in daemon.events("table.stopped")] == ["public.bad"]
    assert not daemon.events("source.failed")
    assert 2 not in ids_in(lake, "bad")
