"""Keys that are shifted, swapped, moved or not unique for a while: every fold is the source."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from ingestd.lake.delta.read import read_raw
from ingestd.lake.layout import Layout
from ingestd.model.schema import TableId
from ingestd.testing.oracle.comparison import await_caught_up, compare_source
from spark_jobs import history, mirror
from spark_jobs.history import as_of
from tests.harness.command_line import run_command
from tests.harness.config import wal_config
from tests.harness.mirrors import assert_mirrors_equal_source
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 90.0
DUPLICATES = (
    "INSERT INTO {t} SELECT id, n, 'new' FROM {t}",
    "DELETE FROM {t} WHERE note = 'old' AND id % 2 = 0",
    "DELETE FROM {t} WHERE note = 'new' AND id % 2 = 1",
)
CASES = {
    # A deferrable key is none: rows pass each other on their way.
    "shifted": (
        "PRIMARY KEY (id) DEFERRABLE",
        ["UPDATE {t} SET id = id + 1"],
        ["UPDATE {t} SET id = 22 - id", "UPDATE {t} SET n = n + 1 WHERE id = 7"],
    ),
    "deferred": (
        "PRIMARY KEY (id) DEFERRABLE INITIALLY DEFERRED",
        ["UPDATE {t} SET id = 3 WHERE id = 4", "UPDATE {t} SET id = 4 WHERE id = 3 AND n = 3"],
        ["DELETE FROM {t} WHERE id = 9", "INSERT INTO {t} VALUES (9, 9, 'again')"],
    ),
    "deduped": (
        "CONSTRAINT {t}_pkey PRIMARY KEY (id)",
        [
            "ALTER TABLE {t} DROP CONSTRAINT {t}_pkey",
            *DUPLICATES,
            "ALTER TABLE {t} ADD PRIMARY KEY (id)",
        ],
        ["UPDATE {t} SET note = 'later' WHERE id < 5"],
    ),
    "moved": (
        "CONSTRAINT {t}_pkey PRIMARY KEY (id)",
        [
            "UPDATE {t} SET n = -n",
            "ALTER TABLE {t} DROP CONSTRAINT {t}_pkey",
            "ALTER TABLE {t} ADD PRIMARY KEY (n)",
            "UPDATE {t} SET id = 5",
        ],
        ["UPDATE {t} SET id = 6 WHERE n < -10", "DELETE FROM {t} WHERE n = -3"],
    ),
}  # fmt: skip
"""By the table: its key, a transaction, and another one after a check of the catalog."""


READ_AGAIN = {"deduped", "moved"}
"""Their key is another one at the next check of the catalog."""


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_lossless_reference_mirror_and_history_are_the_source(
    spark: SparkSession, database: Database, make_daemon: MakeDaemon, lake: Path, tmp_path: Path
) -> None:
    tables = [TableId("public", name) for name in CASES]
    for name, (key, *_) in CASES.items():
        database.execute(
            f"CREATE TABLE {name} (id int, n int, note text, {key.replace('{t}', name)})",
            f"ALTER TABLE {name} REPLICA IDENTITY FULL",
            f"INSERT INTO {name} SELECT g, g, 'old' FROM generate_series(1, 20) g",
        )
    extra = f'slot = "{database.name}"\npublication = "{database.name}"\ndiscover_interval = "1s"\n'
    extra += "".join(
        f'[sources.shop.table."{t}"]\nreference = "snapshot_plus_cdc"\n' for t in tables
    )
    daemon = make_daemon(wal_config(lake=lake, dsn=database.dsn, source_extra=extra))
    daemon.start_ready(LIMIT_S)
    jobs = {mirror: tmp_path / "mirror", history: tmp_path / "history"}
    for number in (1, 2):
        for name, case in CASES.items():
            with database.connect(autocommit=False) as connection:
                for statement in case[number]:
                    connection.execute(statement.replace("{t}", name).encode())
                connection.commit()
        await_until(lambda: settled(daemon, lake), LIMIT_S, lambda: f"it settled\n{daemon.tail()}")
        with database.connect() as connection:
            await_caught_up(connection, database.name, LIMIT_S)
            compared = compare_source(connection, str(lake), "shop", tables)
            assert [c.faults for c in compared if not c.is_equal] == []
        for job, target in jobs.items():
            argv = ["--lake", str(lake), "--source", "shop", "--once", "--target", str(target)]
            assert job.main(argv) == 0
        assert_mirrors_equal_source(spark, database, lake, jobs[mirror], tables)
        for table in tables:
            there = Counter(database.rows(f"SELECT id, n, note FROM {table}"))
            await_until(lambda: referenced(lake, table) == there, LIMIT_S, f"_ref of {table}")  # noqa: B023
            assert historic(spark, jobs[history], table) == there
    verified = run_command(daemon.config_path, "verify", "shop")
    assert verified.returncode == 0, verified.stdout


def settled(daemon: Daemon, lake: Path) -> bool:
    """Whether those are read again, and nothing is being read."""
    status = daemon.status()
    assert status is not None
    states = {t["state"] for t in status["sources"]["shop"]["tables"]}
    marks = {n: read_raw(str(lake), "shop", TableId("public", n))["_cdc_seq"] for n in READ_AGAIN}
    return states == {"live"} and all(s.to_pylist().count(-1) > 1 for s in marks.values())


def referenced(lake: Path, table: TableId) -> Counter[tuple[object, ...]]:
    rows = DeltaTable(str(lake / Layout("shop").reference(table))).to_pyarrow_table().to_pylist()
    return Counter((r["id"], r["n"], r["note"]) for r in rows)


def historic(spark: SparkSession, target: Path, table: TableId) -> Counter[tuple[object, ...]]:
    rows = as_of(spark, str(target), str(table), datetime.now(UTC)).collect()
    return Counter((r["id"], r["n"], r["note"]) for r in rows)
