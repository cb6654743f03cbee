"""A daemon paused for longer than the server's timeout, without a takeover."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ingestd.failpoints import VARIABLE
from tests.faults.test_kill import Auditor, await_epoch_after
from tests.harness.compare import assert_change_log_is_sound, assert_lake_equals_source, epochs
from tests.harness.config import wal_config
from tests.harness.epoch_versions import assert_epoch_versions
from tests.harness.pausing import (
    LIMIT_S,
    assert_nobody_commits_after_a_fence,
    await_acted,
    let_pass,
    paused,
)
from tests.harness.waiting import await_until
from tests.harness.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

POINTS = ("sink.raw_commit.before", "capture.receive.after")


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sender_timeout_s", [2, pytest.param(60, marks=pytest.mark.long)])
def test_exactly_once_a_pause_beyond_wal_sender_timeout_recovers(
    workload_database: Database,
    make_daemon: MakeDaemon,
    lake: Path,
    seed: int,
    sender_timeout_s: int,
) -> None:
    """I1 to I4; the server ends the stream meanwhile, and lets the slot go."""
    database = workload_database
    database.execute(
        f"ALTER DATABASE {database.name} SET wal_sender_timeout = '{sender_timeout_s}s'"
    )
    slot = f"ingestd_shop_{database.name}"  # the auditor's
    config = wal_config(
        lake=lake,
        dsn=database.dsn,
        max_delay="100ms",
        source_extra=f'slot = "{slot}"\npublication = "{slot}"',
    )
    held = ">".join(f"{point}=delay:3@5" for point in POINTS)
    daemon = make_daemon(config, environment={VARIABLE: held})
    workload = Workload(database.dsn, seed=seed, transactions=1_000_000, limit_s=550, pause_s=0.01)
    ended = "SELECT count(*) = 0 FROM pg_replication_slots WHERE slot_name = %s AND active"
    with workload, Auditor(database, lake) as auditor:
        daemon.start()
        for point in POINTS:
            await_acted(daemon, point)
            with paused(daemon):
                let_pass(sender_timeout_s)
                # A walsender that waits for its socket checks the time once it can write again.
                await_until(lambda: database.value(ended, slot), LIMIT_S, "the stream's end")
            await_epoch_after(len(epochs(lake)), lake, daemon)
        daemon.await_ready(LIMIT_S)
        workload.stop()
        assert_lake_equals_source(database, lake, slot=slot, limit_s=LIMIT_S)
        reasons = [event["reason"] for event in daemon.events("source.failed")]
        assert len(reasons) >= len(POINTS)
        assert not daemon.events("source.slot_lost")
        assert daemon.sigterm() == 0
    assert auditor.early == []
    assert_change_log_is_sound(database, lake)
    assert_epoch_versions(lake)
    assert assert_nobody_commits_after_a_fence(lake) == 1  # one process, however often it began
