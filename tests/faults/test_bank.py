"""Transfers between two tables: at every epoch's cut the total over both is what it always was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ingestd.lake.delta.read import read_raw
from ingestd.lake.fold.plain import fold_rows
from ingestd.testing.oracle.comparison import await_caught_up
from tests.faults.test_kill import await_epoch_after
from tests.harness.bank import TABLES, TOTAL, Bank
from tests.harness.compare import assert_lake_equals_source, epochs
from tests.harness.config import wal_config
from tests.harness.epoch_versions import assert_epoch_versions
from tests.harness.snapshots import ask_for_snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

    Changes = Sequence[dict[str, Any]]

TRANSFERS = 25


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [2, pytest.param(4, marks=pytest.mark.long)])
def test_i2_the_total_over_two_tables_is_constant_at_every_epoch(
    database: Database, make_daemon: MakeDaemon, lake: Path, seed: int, kills: int
) -> None:
    """I2, I4, I6: under SIGKILLs, during re-reads, and in transactions across two tables."""
    slot = database.name
    config = wal_config(
        lake=lake,
        dsn=database.dsn,
        max_delay="100ms",
        source_extra=f'slot = "{slot}"\npublication = "{slot}"',
    )
    daemon = make_daemon(config)
    bank = Bank(database.dsn, seed=seed)
    bank.open()
    with bank:
        for number in range(kills):
            daemon.start_ready()
            bank.await_transfers(TRANSFERS)
            ask_for_snapshot(daemon, str(TABLES[number % len(TABLES)]))
            await_epoch_after(len(epochs(lake)), lake, daemon)
            daemon.sigkill()
            bank.await_transfers(TRANSFERS)
        daemon.start_ready()
        bank.await_transfers(TRANSFERS)
    with database.connect() as connection:
        await_caught_up(connection, slot)
    assert_lake_equals_source(database, lake, "shop", slot=slot)
    assert daemon.sigterm() == 0
    raw = [read_raw(str(lake), "shop", table).to_pylist() for table in TABLES]
    cuts = {row["epoch"]: total(raw, row["epoch"]) for row in epochs(lake)}
    assert len(cuts) > 2 * kills
    assert cuts == dict.fromkeys(cuts, TOTAL)
    assert_epoch_versions(lake)  # so these cuts are what the tables' versions hold


def total(raw: Sequence[Changes], epoch: int) -> int:
    """Add up the tables as they are with the rows up to an epoch."""
    current = [
        fold_rows([c for c in changes if c["_cdc_epoch"] <= epoch], ["id", "balance"], ["id"])
        for changes in raw
    ]
    return sum(row["balance"] for rows in current for row in rows)
