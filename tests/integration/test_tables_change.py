"""Tables created, dropped and renamed while the daemon runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ingestd.lake.delta.read import read_raw
from ingestd.model.schema import TableId
from tests.harness.compare import assert_lake_equals_source, epochs, raw_rows, registry
from tests.harness.config import wal_config
from tests.harness.databases import Database
from tests.harness.standbys import server_of
from tests.harness.waiting import await_until
from tests.harness.writers import Writers

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon

LIMIT_S = 60
T, LATE = TableId("public", "t"), TableId("public", "late")


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
    return len(raw_rows(lake, TableId("public", name)))


def test_a_new_table_that_matches_is_found(database: Database, daemon: Daemon, lake: Path) -> None:
    database.execute("CREATE TABLE late (id int PRIMARY KEY)", "INSERT INTO late VALUES (1), (2)")
    await_until(lambda: rows_of(lake, "late") >= 3, LIMIT_S, daemon.tail)
    database.execute("INSERT INTO late VALUES (3)", "INSERT INTO t VALUES (3, 'c')")
    assert_lake_equals_source(database, lake, slot=database.name)


@pytest.mark.thorough
@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_table_that_is_being_dropped_keeps_no_other_waiting(
    make_daemon: MakeDaemon, lake: Path, *, is_restarted: bool
) -> None:
    """Servers from 16 on open each published table for their own view of them."""
    with server_of(18) as server:
        database = Database(server, "postgres")
        database.execute(
            "CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)"
        )
        names = 'slot = "s"\ndiscover_interval = "200ms"'
        daemon = make_daemon(wal_config(lake=lake, dsn=database.dsn, source_extra=names))
        daemon.start_ready()
        with database.connect(autocommit=False) as session:
            session.execute("DROP TABLE u")
            if is_restarted:
                daemon.sigterm()
                daemon.start()
            # Read by a snapshot, as the stream can't be complete while the other one is open.
            database.execute("INSERT INTO t VALUES (1)", "CREATE TABLE w (id int PRIMARY KEY)")
            await_until(lambda: rows_of(lake, "t") >= 2, LIMIT_S, daemon.tail)
            published = (
                "SELECT EXISTS (SELECT FROM pg_publication_rel WHERE prrelid = 'w'::regclass)"
            )
            await_until(lambda: database.value(published), LIMIT_S, daemon.tail)
        database.execute("INSERT INTO w VALUES (1)")
        await_until(lambda: rows_of(lake, "w") >= 1, LIMIT_S, daemon.tail)
        assert_lake_equals_source(database, lake, slot="s")
        assert daemon.events("source.failed") == []
        daemon.close()


def test_swapped_names_are_noticed_at_once(database: Database, daemon: Daemon, lake: Path) -> None:
    database.execute(
        "CREATE TABLE t_new (id int PRIMARY KEY, note text)", "INSERT INTO t_new VALUES (7, 'new')"
    )
    with database.connect(autocommit=False) as session:
        session.execute("ALTER TABLE t RENAME TO t_old")
        session.execute("ALTER TABLE t_new RENAME TO t")
    database.execute("INSERT INTO t_old VALUES (3, 'old')", "INSERT INTO t VALUES (8, 'new')")
    await_until(lambda: rows_of(lake, "t_old") >= 4, LIMIT_S, daemon.tail)
    await_until(lambda: not is_reading(lake), LIMIT_S, daemon.tail)
    assert_lake_equals_source(database, lake, slot=database.name)


def is_reading(lake: Path) -> bool:
    return "snapshotting" in {row["table"]: row["state"] for row in registry(lake)}.values()


def test_a_table_recreated_while_no_daemon_runs(
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


def test_a_table_taken_out_of_the_publication_is_resnapshotted(
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


@pytest.mark.thorough
def test_i6_a_new_table_joins_while_the_others_continue(
    database: Database, daemon: Daemon, lake: Path
) -> None:
    """A long transaction holds back its snapshot's point; epochs of others continue."""
    with Writers(database.dsn, [T, LATE]) as writers, database.connect(autocommit=False) as long:
        long.execute("INSERT INTO t VALUES (3, 'held back')")
        # The slot's consistent point waits for every transaction that runs when it is made.
        database.execute(
            "CREATE TABLE late (id int PRIMARY KEY, note text)",
            "INSERT INTO late SELECT -n, 'there' FROM generate_series(1, 5000) n",
        )
        await_until(lambda: "public.late" in states(lake), LIMIT_S, daemon.tail)
        seen = len(epochs(lake))
        writers.await_writes([T, LATE], 20)
        await_until(lambda: len(epochs(lake)) > seen + 3, LIMIT_S, daemon.tail)
        assert states(lake)["public.late"] == "snapshotting"
        long.commit()
        await_until(lambda: states(lake)["public.late"] == "live", LIMIT_S, daemon.tail)
        writers.await_writes([T, LATE], 20)
    assert_lake_equals_source(database, lake, slot=database.name)
    assert restarts(daemon) == []


def test_for_all_tables_a_new_one_is_found_by_its_first_change(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    """The catalog is polled once an hour here: only the RELATION message can show it."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        f'CREATE PUBLICATION "{database.name}" FOR ALL TABLES'
        " WITH (publish_via_partition_root = true)",
    )
    database.value("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')::text", database.name)
    extra = (
        f'slot = "{database.name}"\npublication = "{database.name}"\n'
        'manage = false\ndiscover_interval = "1h"'
    )
    made = make_daemon(wal_config(lake=lake, dsn=database.dsn, source_extra=extra))
    made.start_ready()
    database.execute("CREATE TABLE late (id int PRIMARY KEY)", "INSERT INTO late VALUES (1), (2)")
    await_until(lambda: states(lake).get("public.late") == "live", LIMIT_S, made.tail)
    database.execute("INSERT INTO late VALUES (3)", "INSERT INTO t VALUES (3, 'c')")
    assert_lake_equals_source(database, lake, slot=database.name)
    assert restarts(made) == []


@pytest.mark.thorough
def test_i8_a_table_without_identity_stops_alone_until_fixed(
    database: Database, daemon: Daemon, lake: Path
) -> None:
    database.execute("CREATE TABLE bad (id int PRIMARY KEY, note text)")
    await_until(lambda: states(lake).get("public.bad") == "live", LIMIT_S, daemon.tail)
    with Writers(database.dsn, [T]) as writers:
        database.execute(
            "ALTER TABLE bad REPLICA IDENTITY NOTHING", "INSERT INTO bad VALUES (1, 'x')"
        )
        await_until(lambda: states(lake)["public.bad"] == "stopped", LIMIT_S, daemon.tail)
        seen = len(epochs(lake))
        writers.await_writes([T], 10)
        await_until(lambda: len(epochs(lake)) > seen, LIMIT_S, daemon.tail)
        answer = daemon.get("/readyz")
        assert answer is not None
        assert answer[0] == 503
        assert "bad" in answer[1]
        database.execute("ALTER TABLE bad REPLICA IDENTITY DEFAULT")
        await_until(lambda: states(lake)["public.bad"] == "live", LIMIT_S, daemon.tail)
        daemon.await_ready(LIMIT_S)
        writers.await_writes([T], 10)
    database.execute("UPDATE bad SET note = 'y'")
    assert_lake_equals_source(database, lake, slot=database.name)
    assert restarts(daemon) == []


@pytest.mark.thorough
def test_i8_a_locked_new_table_waits_alone(database: Database, daemon: Daemon, lake: Path) -> None:
    """An index that is being built on it keeps it out of the publication."""
    with database.connect(autocommit=False) as session:
        session.execute("CREATE TABLE late (id int PRIMARY KEY)")
        session.commit()
        session.execute("CREATE INDEX ON late (id)")
        session.execute("SAVEPOINT building")
        for key in range(3, 30):  # longer than the daemon waits for a lock
            database.execute(f"INSERT INTO t VALUES ({key}, 'on')", "SELECT pg_sleep(0.5)")
        await_until(lambda: rows_of(lake, "t") >= 30, LIMIT_S, daemon.tail)
        assert restarts(daemon) == []
        session.rollback()
    await_until(lambda: states(lake).get("public.late") == "live", LIMIT_S, daemon.tail)
    assert_lake_equals_source(database, lake, slot=database.name)


@pytest.mark.thorough
def test_i8_a_locked_partition_holds_nothing_back(
    database: Database, daemon: Daemon, lake: Path
) -> None:
    """DDL must be looked up in the catalog, whose functions lock partitions."""
    database.execute(
        "CREATE TABLE late (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE late_1 PARTITION OF late FOR VALUES FROM (0) TO (100)",
    )
    await_until(lambda: states(lake).get("public.late") == "live", LIMIT_S, daemon.tail)
    with database.connect(autocommit=False) as session:
        session.execute("LOCK TABLE late_1, late IN ACCESS EXCLUSIVE MODE")
        database.execute("ALTER TABLE t ADD x int DEFAULT 1", "INSERT INTO t VALUES (3, 'c')")
        await_until(lambda: rows_of(lake, "t") >= 4, 8, daemon.tail)
        # Longer than the daemon waits for a lock.
        database.execute("SELECT pg_sleep(12)", "INSERT INTO t VALUES (4, 'd')")
        await_until(lambda: rows_of(lake, "t") >= 5, 8, daemon.tail)
        session.rollback()
    assert_lake_equals_source(database, lake, slot=database.name)
    assert [e for e in daemon.events() if e["event"] == "source.failed"] == []


def states(lake: Path) -> dict[str, str]:
    return {row["table"]: row["state"] for row in registry(lake)}


def restarts(daemon: Daemon) -> list[dict[str, Any]]:
    return daemon.events("source.failed") + daemon.events("source.unknown_error")
