"""Tables that were UNLOGGED for a time: changes meanwhile are not in the WAL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ingestd.model.schema import TableId
from tests.harness.compare import assert_lake_equals_source, raw_rows, registry
from tests.harness.config import wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60.0
T = TableId("public", "t")
COLUMNS = "(id int PRIMARY KEY, note text)"
PLAIN = (f"CREATE TABLE t {COLUMNS}",)
PARTED = (
    f"CREATE TABLE t {COLUMNS} PARTITION BY RANGE (id)",
    "CREATE TABLE part PARTITION OF t DEFAULT",
)
CHANGED, EMPTIED = "UPDATE {} SET note = 'b' WHERE id = 1", "DELETE FROM {}"


def readings(lake: Path) -> int:
    return [row["_cdc_op"] for row in raw_rows(lake, T)].count("t")


@pytest.mark.parametrize(
    ("made", "stored", "write"),
    [
        pytest.param(PLAIN, "t", CHANGED, id="changed"),
        pytest.param(PARTED, "part", EMPTIED, id="emptied partition"),
        pytest.param(PLAIN, "t", EMPTIED, id="emptied", marks=pytest.mark.thorough),
        pytest.param(PARTED, "part", CHANGED, id="changed partition", marks=pytest.mark.thorough),
    ],
)
def test_it_is_resnapshotted_once(  # noqa: PLR0917
    database: Database,
    lake: Path,
    make_daemon: MakeDaemon,
    made: tuple[str, ...],
    stored: str,
    write: str,
) -> None:
    database.execute(
        *made,
        "INSERT INTO t SELECT i, 'a' FROM generate_series(1, 9) i",
        "ANALYZE",
        "CREATE PUBLICATION ingestd_shop FOR ALL TABLES WITH (publish_via_partition_root = true)",
    )
    daemon = make_daemon(wal_config(lake=lake, dsn=database.dsn))
    daemon.start_ready()
    await_until(lambda: readings(lake) == 1, LIMIT_S, daemon.tail)
    assert daemon.sigterm() == 0
    database.execute(
        f"ALTER TABLE {stored} SET UNLOGGED",
        write.format(stored),
        f"ALTER TABLE {stored} SET LOGGED",
        "ANALYZE",
    )
    daemon.start_ready()
    await_until(lambda: readings(lake) == 2, LIMIT_S, daemon.tail)
    assert_lake_equals_source(database, lake, limit_s=LIMIT_S)
    reasons = {row["reason"] for row in registry(lake) if row["reason"]}
    assert {reason.removeprefix("a partition was ") for reason in reasons} == {
        "rewritten by ALTER TABLE, or temporarily unlogged"
    }
    for number in (100, 101):
        assert daemon.sigterm() == 0
        daemon.start_ready()
        database.execute(f"INSERT INTO t VALUES ({number}, 'c')")
        assert_lake_equals_source(database, lake, limit_s=LIMIT_S)
    assert daemon.sigterm() == 0
    assert readings(lake) == 2
