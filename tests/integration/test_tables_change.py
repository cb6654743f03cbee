"""Tables that come, go and change their names while the daemon runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ingestd.schema import TableId
from ingestd.sink.read import read_raw
from tests.harness.compare import assert_lake_equals_source, registry
from tests.harness.config import wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.demo.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60


@pytest.fixture
def daemon(database: Database, make_daemon: MakeDaemon, lake: Path) -> Daemon:
    names = f'slot = "{database.name}"\npublication = "{database.name}"\ndiscover_interval = "1s"'
    made = make_daemon(wal_config(lake=lake, dsn=database.dsn, source_extra=names))
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text)", "INSERT INTO t VALUES (1, 'a'), (2, 'b')"
    )
    made.start_ready()
    return made


def rows_of(lake: Path, name: str) -> int:
    if not (lake / "shop/public" / name / "_delta_log").exists():
        return 0
    return int(read_raw(str(lake), "shop", TableId("public", name)).num_rows)


def test_a_new_table_that_matches_is_found(database: Database, daemon: Daemon, lake: Path) -> None:
    database.execute("CREATE TABLE late (id int PRIMARY KEY)", "INSERT INTO late VALUES (1), (2)")
    await_until(lambda: rows_of(lake, "late") >= 3, LIMIT_S, daemon.tail)
    database.execute("INSERT INTO late VALUES (3)", "INSERT INTO t VALUES (3, 'c')")
    assert_lake_equals_source(database, lake, slot=database.name)


def test_swapped_names_are_noticed_at_once(database: Database, daemon: Daemon, lake: Path) -> None:
    database.execute(
        "CREATE TABLE t_new (id int PRIMARY KEY, note text)", "INSERT INTO t_new VALUES (7, 'new')"
    )
    with database.connect(autocommit=False) as session:
        session.execute("ALTER TABLE t RENAME TO t_old")
        session.execute("ALTER TABLE t_new RENAME TO t")
    database.execute("INSERT INTO t_old VALUES (3, 'old')", "INSERT INTO t VALUES (8, 'new')")
    await_until(lambda: rows_of(lake, "t_old") >= 4, LIMIT_S, daemon.tail)
    assert_lake_equals_source(database, lake, slot=database.name)


def test_a_table_made_anew_while_no_daemon_runs(
    database: Database, daemon: Daemon, lake: Path
) -> None:
    assert daemon.sigterm() == 0
    database.execute(
        "DROP TABLE t",
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        "INSERT INTO t VALUES (100, 'x')",
    )
    daemon.start_ready()
    database.execute("INSERT INTO t VALUES (101, 'y')")
    assert_lake_equals_source(database, lake, slot=database.name)


def test_a_new_column_is_described_from_the_catalog(
    database: Database, daemon: Daemon, lake: Path
) -> None:
    database.execute("ALTER TABLE t ADD COLUMN n int DEFAULT 5", "INSERT INTO t VALUES (3, 'c', 6)")
    await_until(lambda: rows_of(lake, "t") >= 4, LIMIT_S, daemon.tail)
    assert daemon.sigterm() == 0
    last = registry(lake)[-1]
    assert last["state"] == "live"
    [added] = [c for c in last["columns"] if c["name"] == "n"]
    assert (added["pg_type"], added["delta_type"], added["missing"]) == ("integer", "integer", "5")


def test_a_table_taken_out_of_the_publication_is_read_anew(
    database: Database, daemon: Daemon, lake: Path
) -> None:
    database.execute(
        f'ALTER PUBLICATION "{database.name}" DROP TABLE t', "INSERT INTO t VALUES (3, 'unseen')"
    )
    await_until(lambda: read_again(lake), LIMIT_S, daemon.tail)
    database.execute("INSERT INTO t VALUES (4, 'seen')")
    assert_lake_equals_source(database, lake, slot=database.name)


def read_again(lake: Path) -> bool:
    ops = read_raw(str(lake), "shop", TableId("public", "t"))["_cdc_op"].to_pylist()
    return bool(ops.count("t") > 1)
