"""SIGKILL while transactions are sent that are still open, and while they are replayed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.faults.test_kill import FAST_EPOCHS, SOURCE, Auditor, await_epoch_after, run_for
from tests.harness.compare import assert_change_log_is_sound, assert_lake_equals_source, epochs
from tests.harness.config import wal_config
from tests.harness.open_transactions import OpenWriters, send_while_open, sent_while_open
from tests.harness.waiting import await_until
from tests.harness.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kills", "seed"),
    [
        (2, 20261122),
        pytest.param(4, 20261122, marks=pytest.mark.long),
        pytest.param(60, 4, marks=pytest.mark.long),
    ],
)
def test_exactly_once_through_sigkills_amid_open_transactions(
    workload_database: Database, make_daemon: MakeDaemon, lake: Path, kills: int, seed: int
) -> None:
    """I1, I2, I3: sub-transactions are undone before and after they were sent."""
    rng = random.Random(seed)
    database = workload_database
    send_while_open(database)
    slot = f"ingestd_{SOURCE}_{database.name}"
    config = wal_config(
        lake=lake,
        dsn=database.dsn,
        max_delay=FAST_EPOCHS,
        source_extra=f'slot = "{slot}"\npublication = "{slot}"\ncatch_up_above = "1GB"\n'
        'open_transaction_spool = "1GB"',
        extra='[limits]\nmemory = "64MB"',
    )
    daemon = make_daemon(config)
    writers = OpenWriters(database, seed=seed)
    beside = Workload(database.dsn, seed=seed, sessions=1, transactions=10**6, pause_s=0.02)
    with writers, beside, Auditor(database, lake) as auditor:
        for _ in range(kills):
            daemon.start()
            await_epoch_after(len(epochs(lake)), lake, daemon)
            run_for(rng.uniform(0.0, 0.6))
            daemon.sigkill()
            auditor.look()
        daemon.start_ready()
        writers.stop()
        beside.stop()
        assert_lake_equals_source(database, lake, SOURCE, slot=slot, limit_s=240)
        auditor.look()
    assert auditor.early == []
    assert writers.undone > kills
    assert writers.committed > kills
    assert_change_log_is_sound(database, lake)
    assert daemon.sigterm() == 0
    await_until(lambda: sent_while_open(database, slot) > kills, 30, "streamed transactions")
