"""A daemon that polls is killed, cut off, and loses its server, under load.

Nothing is lost or delivered twice, and no live row is taken for deleted.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.lake.delta.read import read_raw
from ingestd.lake.fold.plain import fold
from ingestd.testing.oracle.comparison import (
    compare_source,
    folded_lake,
    source_columns,
    source_rows,
)
from tests.harness.compare import assert_change_log_is_sound, epochs, registry
from tests.harness.config import polling_config
from tests.harness.databases import fresh_database
from tests.harness.polled_workload import (
    CURSORS,
    KEYS,
    NOTES,
    ORDERS,
    SEEN_NOTES,
    STAYING,
    PolledWorkload,
    create_tables,
)
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.model.schema import TableId
    from ingestd.testing.embedded.daemon import Daemon
    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 30.0
CUT = """SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
          WHERE datname = current_database() AND application_name = 'ingestd'"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("seed", "kills"), [(20261122, 5), pytest.param(20261122, 15, marks=pytest.mark.long)]
)
def test_exactly_once_through_sigkills_at_random_instants(
    own_postgres: PostgresServer, make_daemon: MakeDaemon, lake: Path, seed: int, kills: int
) -> None:
    print("seed", seed)  # noqa: T201
    rng = random.Random(seed)
    with fresh_database(own_postgres) as database:
        create_tables(database)
        daemon = make_daemon(config(database, lake))
        with PolledWorkload(database.dsn, seed=seed) as workload:
            for number in range(kills):
                daemon.start()
                if number % 5 == 0:
                    _run_for(rng.uniform(0.3, 1.0))  # the start and the first load included
                else:
                    _await_epoch_after(len(epochs(lake)), lake, daemon)
                    if number % 4 == 1:
                        database.rows(CUT)
                    if number == kills // 2:
                        own_postgres.restart()
                    _run_for(rng.uniform(0.0, 0.3))
                daemon.sigkill()
            daemon.start_ready()
            _run_for(1.0)
        assert workload.outcomes["committed"] > 34 * kills, workload.outcomes
        await_equal(database, lake)
        assert daemon.sigterm() == 0
        assert_change_log_is_sound(database, lake)
        for table, key in KEYS.items():
            assert_log_makes_sense(lake, table, key)
        # Neither a kill nor a restart is a reason to re-read anything.
        events = [r for r in registry(lake) if r["state"] == "snapshotting"]
        assert {r["table"] for r in events} == {str(t) for t in KEYS}


def config(database: Database, lake: Path) -> str:
    return polling_config(
        lake=lake, dsn=database.dsn, interval="30ms", max_delay="60ms", extra=CURSORS
    )


def await_equal(database: Database, lake: Path) -> None:
    """Until the fold of the lake is the source, without the hidden notes; the writers rest."""
    plain = [table for table in KEYS if table != NOTES]
    wrong: list[Any] = []

    def is_equal() -> bool:
        with database.connect() as connection:
            found = compare_source(connection, str(lake), "shop", plain)
            columns = source_columns(connection, NOTES)
            visible = source_rows(connection, SEEN_NOTES, columns)
        notes = folded_lake(str(lake), "shop", NOTES, columns, KEYS[NOTES])
        wrong[:] = [c for c in found if not c.is_equal]
        wrong.extend((visible - notes.rows, notes.rows - visible))
        return not any(wrong) and not notes.faults

    await_until(is_equal, LIMIT_S, lambda: "\n".join(map(str, wrong)))


def assert_log_makes_sense(lake: Path, table: TableId, key: tuple[str, ...]) -> None:
    """Each written version once: `c` for new rows, `u` and `d` for existing ones."""
    raw = read_raw(str(lake), "shop", table)
    rows = sorted(raw.to_pylist(), key=lambda r: (r["_cdc_lsn"], r["_cdc_seq"]))
    present: set[tuple[Any, ...]] = set()
    versions: set[int] = set()
    for row in rows:
        op = row["_cdc_op"]
        if op == "t":
            present.clear()
            versions.clear()
            continue
        texts = dict(row["_cdc_raw"] or {})
        name = tuple(str(texts.get(column, row[column])) for column in key)
        place = f"{table} {name}: {op} at {row['_cdc_lsn']}/{row['_cdc_seq']}"
        assert (name in present) == (op in "ud"), place
        if op == "d":
            assert table != ORDERS or row["id"] not in STAYING, place
            present.discard(name)
        else:
            assert row["version"] not in versions, place
            versions.add(row["version"])
            present.add(name)
    current = fold(raw, key)
    assert len(current) == len(present)


def _await_epoch_after(seen: int, lake: Path, daemon: Daemon) -> None:
    await_until(lambda: len(epochs(lake)) > seen, 60, daemon.tail)


def _run_for(seconds: float) -> None:
    """Let the daemon run until a random instant."""
    end = time.monotonic() + seconds
    await_until(lambda: time.monotonic() >= end, seconds + 5, poll_s=0.01)
