"""Times, names and tables that are legal and odd stop nothing but what they are of (I13)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from ingestd.lake.delta.read import read_raw
from ingestd.model.schema import TableId
from ingestd.testing.oracle.comparison import await_caught_up
from tests.harness.config import wal_config

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60.0
FIRST = datetime(1, 1, 1, tzinfo=UTC)
LAST = datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
TIMES = {
    "10000-01-01 00:00+00": LAST,
    "294276-12-31 00:00+00": LAST,
    "infinity": LAST,
    "-infinity": FIRST,
    "4713-01-01 00:00+00 BC": FIRST,
    "0001-01-01 00:00+00": FIRST,
    "2150-01-01 00:00+00": datetime(2150, 1, 1, tzinfo=UTC),
}


@pytest.mark.thorough
def test_times_that_an_origin_sets_and_a_table_without_columns(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """The nearest time that a timestamp holds; they are not counted as freshness."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, told text)",
        "CREATE TABLE empty (x int)",
        "ALTER TABLE empty REPLICA IDENTITY FULL",
        "INSERT INTO empty VALUES (1)",
        "ALTER TABLE empty DROP COLUMN x",
    )
    extra = f'slot = "{database.name}"'
    daemon = make_daemon(wal_config(lake=lake, dsn=database.dsn, source_extra=extra))
    daemon.start_ready(LIMIT_S)
    with database.server.connect() as connection:
        connection.execute("SELECT pg_replication_origin_create(%s)", (database.name,))
    try:
        with database.connect(autocommit=False) as connection:
            connection.execute("SELECT pg_replication_origin_session_setup(%s)", (database.name,))
            for number, time in enumerate(TIMES):
                connection.execute("SELECT pg_replication_origin_xact_setup('0/1', %s)", (time,))
                connection.execute("INSERT INTO t VALUES (%s, %s)", (number, time))
                connection.commit()
            connection.execute("SELECT pg_replication_origin_session_reset()")
            connection.commit()
        database.execute("INSERT INTO t VALUES (100, 'here')")
        with database.server.connect() as connection:
            await_caught_up(connection, database.name, LIMIT_S)
    finally:
        with database.server.connect() as connection:
            connection.execute("SELECT pg_replication_origin_drop(%s)", (database.name,))
    raw = read_raw(str(lake), "shop", TableId("public", "t")).to_pylist()
    found = {row["told"]: row["_cdc_ts"] for row in raw if row["_cdc_op"] == "c"}
    here = found.pop("here")
    assert abs((datetime.now(UTC) - here).total_seconds()) < LIMIT_S
    assert found == TIMES
    answer = daemon.get("/metrics")
    assert answer is not None
    assert 'replicated_transactions_total{source="shop"} 7.0' in answer[1]
    assert 'freshness_seconds_count{source="shop"} 1.0' in answer[1]
    assert not [e for e in daemon.events() if e["event"] == "source.failed"]
