"""The point at which Spark reads a source, and how long it is held."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import pytest
from py4j.protocol import Py4JError
from pyspark.errors import ArithmeticException, PySparkException

from ingestd.testing.embedded.waiting import await_until
from tests.harness.databases import Database, fresh_database
from tests.spark.reading import Reading, reading

__all__ = ["reading"]

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from ingestd.testing.embedded.postgres import PostgresServer

LIMIT_S = 30.0
PAUSE_S = 0.005
"""Between two transfers: the machine is there for Spark."""


class Transfers:
    """A writer that moves money between accounts, and counts what it brings in besides."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self.done = 0

    def __enter__(self) -> Self:
        self._running = self._pool.submit(self._run)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._pool.shutdown()
        self._running.result()

    def await_more(self, done: int) -> None:
        """Wait until there were more transfers than that."""
        await_until(lambda: self.done > done, LIMIT_S, "a transfer")

    def _run(self) -> None:
        with self._database.connect() as connection:
            while not self._stop.wait(PAUSE_S):
                n = self.done
                with connection.transaction():
                    for account, amount in ((n * 7919 % 20000 + 1, -n), (n % 20000 + 1, n + 1)):
                        connection.execute(
                            "UPDATE accounts SET balance = balance + %s WHERE id = %s",
                            [amount, account],
                        )
                    connection.execute("UPDATE totals SET transfers = transfers + 1")
                self.done = n + 1


def test_all_partitions_see_one_point_under_writers(reading: Reading) -> None:
    reading.database.execute(
        "CREATE TABLE accounts (id int PRIMARY KEY, balance bigint, filler text)",
        "CREATE TABLE totals (id int PRIMARY KEY, transfers bigint)",
        "INSERT INTO accounts SELECT i, 1000, repeat('x', 200) FROM generate_series(1, 20000) i",
        "INSERT INTO totals VALUES (1, 0)",
    )
    with Transfers(reading.database) as transfers:
        for _ in range(3):
            accounts = reading.load("public.accounts", partitions=4, columns="id,balance")
            totals = reading.load("public.totals", columns="transfers")
            done = transfers.done
            [row] = (
                accounts.groupBy()
                .agg({"balance": "sum", "id": "count"})
                .crossJoin(totals.select("transfers"))
                .collect()
            )
            # A transfer gives 1 to an account that another lacks, and one more to the first.
            assert row["count(id)"] == 20000
            assert row["sum(balance)"] == 20_000_000 + row["transfers"]
            transfers.await_more(done)


@pytest.fixture
def alone(reading: Reading, postgres: PostgresServer) -> Iterator[Reading]:
    """A database in which there are no sessions but the test's."""
    with fresh_database(postgres) as database:
        config = reading.config.replace(reading.database.name, database.name)
        yield replace(reading, database=database, config=config)


def test_a_query_leaves_no_session(alone: Reading) -> None:
    alone.database.execute("CREATE TABLE few (id int)", "INSERT INTO few VALUES (1), (2)")
    loaded = alone.load("public.few", snapshot_idle="200ms")
    assert sorted(row["id"] for row in loaded.collect()) == [1, 2]
    await_until(lambda: alone.sessions() == 0, LIMIT_S, "the sessions to end")
    alone.database.execute("INSERT INTO few VALUES (3)")
    # planned once, executed again: at a later point
    assert sorted(row["id"] for row in loaded.collect()) == [1, 2, 3]
    assert loaded.count() == 3


def test_explaining_opens_no_transaction(alone: Reading) -> None:
    alone.database.execute("CREATE TABLE plain (id int)")
    loaded = alone.load("public.plain")
    assert loaded.rdd.getNumPartitions() == 1
    assert alone.sessions() == 0
    assert loaded.collect() == []


def test_a_failed_query_leaves_no_session(alone: Reading) -> None:
    alone.database.execute("CREATE TABLE zeros (n int)", "INSERT INTO zeros VALUES (0)")
    loaded = alone.load("public.zeros", snapshot_idle="200ms")
    with pytest.raises(ArithmeticException):
        loaded.selectExpr("1 / n").collect()
    await_until(lambda: alone.sessions() == 0, LIMIT_S, "the sessions to end")


def test_what_spark_leaves_unread_ends_too(alone: Reading) -> None:
    alone.database.execute(
        "CREATE TABLE long (id int, filler text)",
        "INSERT INTO long SELECT i, repeat('x', 300) FROM generate_series(1, 100000) i",
    )
    loaded = alone.load("public.long", partitions=4, snapshot_idle="200ms")
    assert len(loaded.take(3)) == 3
    await_until(lambda: alone.sessions() == 0, LIMIT_S, "the sessions to end")


@pytest.mark.thorough
def test_a_table_that_is_altered_is_to_be_loaded_again(reading: Reading) -> None:
    reading.database.execute(
        "CREATE TABLE altered (id int, t text)", "INSERT INTO altered VALUES (1, 'x')"
    )
    loaded = reading.load("public.altered")
    assert loaded.count() == 1
    reading.database.execute("ALTER TABLE altered ADD n int")
    assert loaded.collect()[0].asDict() == {"id": 1, "t": "x", "_cdc_raw": None}
    reading.database.execute("ALTER TABLE altered ALTER t TYPE int USING 7")
    with pytest.raises(PySparkException, match="column 't' was dropped or changed"):
        loaded.count()
    assert reading.load("public.altered").columns == ["id", "t", "n", "_cdc_raw"]


@pytest.mark.thorough
@pytest.mark.parametrize("statement", ["TRUNCATE {}", "VACUUM FULL {}", "DROP TABLE {}"])
def test_a_table_that_is_replaced_fails_the_query(reading: Reading, statement: str) -> None:
    table = f"replaced_{statement.split(maxsplit=1)[0].lower()}"
    reading.database.execute(
        f"CREATE TABLE {table} (id int)", f"INSERT INTO {table} SELECT generate_series(1, 1000)"
    )
    loaded = reading.load(f"public.{table}", partitions=4)
    rows = loaded.toLocalIterator()  # a job for each partition
    next(rows)
    reading.database.execute(statement.format(table))
    said = "truncated or rewritten|was rewritten|changed while it was read"
    with pytest.raises(Py4JError, match=said):
        list(rows)
