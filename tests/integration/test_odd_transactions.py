"""Input that is legal and strange: slow is fine, failing and growing memory are not (I9)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ingestd.lake.delta.read import read_raw
from ingestd.model.schema import TableId
from ingestd.testing.oracle.comparison import await_caught_up
from tests.harness.compare import (
    assert_change_log_is_sound,
    assert_lake_equals_source,
    epochs,
    registry,
)
from tests.harness.config import wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 250.0
A = TableId("public", "a")
COLUMNS = 1600
"""The most that a table can have."""


def config(database: Database, lake: Path, source: str = "", extra: str = "") -> str:
    extra = f'[limits]\nmemory = "64MB"\n{extra}'
    return wal_config(lake=lake, dsn=database.dsn, source_extra=source, extra=extra)


def peak_mb(daemon: Daemon) -> int:
    """The most memory that the daemon ever had."""
    text = Path(f"/proc/{daemon.pid}/status").read_text(encoding="utf-8")
    [line] = [line for line in text.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) // 1024


def assert_nothing_failed(daemon: Daemon) -> None:
    bad = [e for e in daemon.events() if e.get("level") in {"error", "critical"}]
    assert not bad, bad


@pytest.mark.parametrize("count", [50, pytest.param(10_000, marks=pytest.mark.long)])
def test_transactions_of_only_truncates(
    database: Database, lake: Path, make_daemon: MakeDaemon, count: int
) -> None:
    database.execute(
        "CREATE TABLE a (id int PRIMARY KEY)",
        "CREATE TABLE b (id int PRIMARY KEY)",
        "INSERT INTO a VALUES (1)",
    )
    daemon = make_daemon(config(database, lake))
    daemon.start_ready()
    with database.connect() as connection:
        for number in range(count):
            connection.execute("TRUNCATE a, b" if number % 10 == 0 else "TRUNCATE a")
    daemon.sigterm()
    with database.connect(autocommit=False) as connection:  # and as a backlog, in one transaction
        for _ in range(count):
            connection.execute("TRUNCATE a, b")
        connection.commit()
    daemon.write_config(config(database, lake, "catch_up_above = 0"))
    daemon.start_ready()
    assert_lake_equals_source(database, lake, limit_s=LIMIT_S)
    assert_change_log_is_sound(database, lake)
    ops = read_raw(str(lake), "shop", A).column("_cdc_op").to_pylist()
    assert ops.count("t") == 2 * count + 1
    assert_nothing_failed(daemon)


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.long)])
def test_a_table_whose_definition_changes_with_every_row(
    database: Database, lake: Path, make_daemon: MakeDaemon, count: int
) -> None:
    database.execute("CREATE TABLE a (id int PRIMARY KEY, note text)")
    daemon = make_daemon(config(database, lake))
    daemon.start_ready()
    with database.connect(autocommit=False) as connection:
        for number in range(count):
            connection.execute("INSERT INTO a (id) VALUES (%s)", [number])
            connection.execute("ALTER TABLE a ADD extra int")
            connection.execute("INSERT INTO a (id, extra) VALUES (%s, 7)", [count + number])
            connection.execute("ALTER TABLE a DROP extra")
            if number % 2 == 0:  # in one transaction, and in many
                connection.commit()
        connection.execute(f"ALTER TABLE a ADD last int DEFAULT {count}".encode())
        connection.commit()
    assert_lake_equals_source(database, lake, limit_s=LIMIT_S)
    assert_nothing_failed(daemon)
    # The last read may still be under way, of rows that exist already.
    await_until(lambda: registry(lake)[-1]["state"] == "live", LIMIT_S, daemon.tail)


@pytest.mark.thorough
def test_a_table_of_1600_columns(database: Database, lake: Path, make_daemon: MakeDaemon) -> None:
    kinds = ("int", "text", "bool", "date", "numeric(6,2)", "real", "smallint", "timestamptz")
    columns = [f"c{n} {kinds[n % len(kinds)]}" for n in range(1, COLUMNS)]
    values = ("i", "'x'", "i % 2 = 0", "date '2024-01-01' + i", "i / 4.0", "i / 3.0", "7", "now()")
    chosen = ", ".join(values[n % len(values)] for n in range(1, COLUMNS))
    insert = f"INSERT INTO wide SELECT i, {chosen} FROM generate_series({{}}, {{}}) i"
    database.execute(
        f"CREATE TABLE wide (id int PRIMARY KEY, {', '.join(columns)})",
        insert.format(1, 20),
        "INSERT INTO wide (id) VALUES (0)",
        "CREATE TABLE a (id int PRIMARY KEY)",
    )
    daemon = make_daemon(config(database, lake))
    daemon.start_ready(LIMIT_S)
    database.execute(
        insert.format(21, 40),
        "UPDATE wide SET c1 = 5 WHERE id < 4",
        "DELETE FROM wide WHERE id = 9",
    )
    assert_lake_equals_source(database, lake, limit_s=LIMIT_S)
    assert_nothing_failed(daemon)


@pytest.mark.thorough
def test_a_transaction_over_many_tables_drained_as_a_backlog(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """A few rows of each table in turn: each read has little of any one table."""
    tables, rows, run = 100, 3000, 20
    columns = ", ".join(f"c{n} text" for n in range(8))
    values = ", ".join(f"'value {n} of ' || i" for n in range(8))
    for number in range(tables):
        database.execute(f"CREATE TABLE t{number} (id int PRIMARY KEY, {columns})")
    daemon = make_daemon(config(database, lake, "catch_up_above = 0"))
    daemon.start_ready()
    empty_mb = peak_mb(daemon)
    daemon.sigterm()
    few = f"SELECT i, {values} FROM generate_series(low, low + {run - 1}) i"
    inserts = " ".join(f"INSERT INTO t{number} {few};" for number in range(tables))
    database.execute(f"DO $$ BEGIN FOR low IN 1 .. {rows} BY {run} LOOP {inserts} END LOOP; END $$")
    daemon.start_ready()
    with database.connect() as connection:
        await_caught_up(connection, "ingestd_shop", LIMIT_S)
    assert peak_mb(daemon) < empty_mb + 100
    assert sum(epoch["rows"] for epoch in epochs(lake)[1:]) == tables * rows
    assert_nothing_failed(daemon)


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_200_mb_rows(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    database.execute(
        "CREATE TABLE a (id int PRIMARY KEY, body bytea)",
        "ALTER TABLE a ALTER body SET STORAGE external",
    )
    insert = "INSERT INTO a SELECT {}, decode(repeat('0123456789abcdef', 25000000), 'hex')"
    config = wal_config(lake=lake, dsn=database.dsn)
    daemon = make_daemon(config)
    daemon.start_ready()
    peaks = []
    for low in (1, 3, 5):
        database.execute(insert.format(low), insert.format(low + 1))
        with database.connect() as connection:
            await_caught_up(connection, "ingestd_shop", LIMIT_S)
        peaks.append(peak_mb(daemon))
    assert peaks[-1] < 1.2 * peaks[0]
    assert_nothing_failed(daemon)
    daemon.sigterm()
    assert [row["rows"] for row in epochs(lake)] == [1] * 7
