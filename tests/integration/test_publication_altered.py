"""A publication that others alter: what it did not send meanwhile is read."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import psycopg
import pytest

from ingestd.model.schema import TableId
from tests.harness.compare import assert_lake_equals_source, raw_rows, registry
from tests.harness.config import wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60.0
PARTS = TableId("public", "parts")
SET = "ALTER PUBLICATION ingestd_shop SET "
WHOLE = SET + "(publish = 'insert, update, delete, truncate', publish_via_partition_root = true)"
LESS = {
    "inserts only": SET + "(publish = 'insert')",
    "partitions by themselves": SET + "(publish_via_partition_root = false)",
}
WRITES = ("UPDATE parts SET note = 'b' WHERE id = 1", "DELETE FROM parts WHERE id = 2")


@pytest.fixture
def daemon(database: Database, lake: Path, make_daemon: MakeDaemon) -> Daemon:
    """One that has captured `parts` and read the publication that it created."""
    database.execute(
        "CREATE TABLE parts (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)",
        "CREATE TABLE part PARTITION OF parts DEFAULT",
        "INSERT INTO parts SELECT i, 'a' FROM generate_series(1, 9) i",
    )
    found = make_daemon(
        wal_config(lake=lake, dsn=database.dsn, source_extra='discover_interval = "500ms"')
    )
    found.start_ready()
    database.execute("CREATE TABLE looked (id int PRIMARY KEY)")
    await_until(lambda: raw_rows(lake, TableId("public", "looked")), LIMIT_S, found.tail)
    return found


def readings(lake: Path) -> int:
    return [row["_cdc_op"] for row in raw_rows(lake, PARTS)].count("t")


@pytest.mark.thorough
@pytest.mark.parametrize("less", LESS.values(), ids=LESS)
@pytest.mark.parametrize("is_left", [False, True], ids=["for a moment", "and left so"])
def test_what_was_not_sent_is_read(
    database: Database, lake: Path, daemon: Daemon, less: str, *, is_left: bool
) -> None:
    assert daemon.sigterm() == 0
    before = readings(lake)
    database.execute(less, *WRITES, *([] if is_left else [WHOLE]))
    daemon.start_ready()
    await_until(lambda: readings(lake) > before, LIMIT_S, daemon.tail)
    assert_lake_equals_source(database, lake, limit_s=LIMIT_S)
    # Once, and not again after another start.
    assert daemon.sigterm() == 0
    again = readings(lake)
    daemon.start_ready()
    database.execute("INSERT INTO parts VALUES (100, 'c')")
    assert_lake_equals_source(database, lake, limit_s=LIMIT_S)
    assert daemon.sigterm() == 0
    assert readings(lake) == again == before + 1


def restore(database: Database) -> None:
    """Make the publication whole again; a daemon may be about to do the same."""
    with contextlib.suppress(psycopg.errors.InternalError_):  # tuple concurrently updated
        database.execute(WHOLE)


def test_it_is_detected_while_streaming(database: Database, lake: Path, daemon: Daemon) -> None:
    before = readings(lake)
    database.execute(LESS["inserts only"], *WRITES)
    restore(database)
    await_until(lambda: readings(lake) > before, LIMIT_S, daemon.tail)
    assert_lake_equals_source(database, lake, limit_s=LIMIT_S)
    told = [e for e in daemon.events("table.state") if "reason" in e]
    assert {(e["table"], e["state"], e["reason"]) for e in told} == {
        (table, "snapshotting", "the publication or its owner was changed")
        for table in (str(PARTS), "public.looked")
    }
    assert daemon.sigterm() == 0


def test_another_owner_hides_no_gap(database: Database, lake: Path, daemon: Daemon) -> None:
    """The publication's entry has one transaction, its owner's change here, for both."""
    before = readings(lake)
    assert daemon.sigterm() == 0
    owner = f"o_{database.name}"
    database.execute(f"CREATE ROLE {owner} SUPERUSER", LESS["inserts only"], *WRITES, WHOLE)
    database.execute(f"ALTER PUBLICATION ingestd_shop OWNER TO {owner}")
    try:
        daemon.start_ready()
        await_until(lambda: readings(lake) > before, LIMIT_S, daemon.tail)
        assert_lake_equals_source(database, lake, limit_s=LIMIT_S)
        assert daemon.sigterm() == 0
    finally:
        database.execute(
            "ALTER PUBLICATION ingestd_shop OWNER TO CURRENT_USER", f"DROP ROLE {owner}"
        )


def test_where_nothing_is_read_the_table_stops_and_says_why(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    extra = 'snapshot = "never"\ndiscover_interval = "500ms"'
    database.execute("CREATE TABLE parts (id int PRIMARY KEY, note text)")
    found = make_daemon(wal_config(lake=lake, dsn=database.dsn, source_extra=extra))
    found.start_ready()
    database.execute("CREATE TABLE looked (id int PRIMARY KEY)")
    await_until(lambda: len(registry(lake)) > 1, LIMIT_S, found.tail)
    assert found.sigterm() == 0
    database.execute(LESS["inserts only"], WHOLE)
    why = (
        "changes may have been missed (the publication or its owner was changed), and"
        ' snapshot = "never"'
    )

    def reasons() -> list[str]:
        told = found.events("table.stopped")
        return [event["reason"] for event in told if event["table"] == str(PARTS)]

    found.start()
    await_until(lambda: reasons() == [why], LIMIT_S, found.tail)
    assert found.sigterm() == 0
    found.start()  # which does not forget it
    await_until(lambda: reasons() == [why, why], LIMIT_S, found.tail)
    assert found.sigterm() == 0
