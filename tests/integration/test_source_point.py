"""A source at one point, as reconciling holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ingestd.model.errors import TableChangedError, TransientError
from ingestd.model.schema import TableId
from ingestd.postgres.settings import WalSettings
from spark_jobs.reconciling.source_point import SourcePoint
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from tests.harness.databases import Database

LIMIT_S = 30
ORDERS = TableId("public", "orders")


def settings(database: Database) -> WalSettings:
    return WalSettings(
        kind="wal",
        dsn=database.dsn,  # type: ignore[arg-type] # pydantic makes it secret
        tables=["public.*"],
        slot=database.name,
        publication=database.name,
    )


def test_a_table_replaced_while_being_read_is_reported(database: Database) -> None:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY)",
        "CREATE TABLE part (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE part_1 PARTITION OF part FOR VALUES FROM (0) TO (10)",
        "INSERT INTO orders VALUES (1)",
    )
    with SourcePoint("shop", settings(database), {}) as point:
        assert point.lsn > 0
        assert database.slots()  # none but the temporary one
        orders, part = point.tables[ORDERS], point.tables[TableId("public", "part")]
        assert len(point.rows(orders, 1 << 20).splits) == 1
        assert "dsn" not in repr(point.rows(orders, 1 << 20))
        database.execute("INSERT INTO orders VALUES (2)", "VACUUM orders", "ANALYZE orders")
        point.ensure_unreplaced(orders)
        point.ensure_unreplaced(part)
        database.execute(
            "TRUNCATE orders",
            "CREATE TABLE part_2 PARTITION OF part FOR VALUES FROM (10) TO (20)",
        )
        for table in (orders, part):
            with pytest.raises(TableChangedError, match="compare it again"):
                point.ensure_unreplaced(table)
    # The server drops a temporary slot some time after its session has ended.
    await_until(lambda: database.slots() == [], LIMIT_S, "the temporary slot's end")


def test_a_transaction_open_beyond_the_limit_is_reported(database: Database) -> None:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    with database.connect(autocommit=False) as writer:
        writer.execute("INSERT INTO orders VALUES (1)")
        waiting = SourcePoint("shop", settings(database), {}, slot_limit_s=0.5)
        with pytest.raises(TransientError, match="transactions that began before"):
            waiting.__enter__()
        writer.rollback()
    with SourcePoint("shop", settings(database), {}) as point:
        assert list(point.tables) == [ORDERS]
