"""A real source under change, a real daemon, and what triggers noted: the table at any time."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.lake.delta.read import read_raw
from ingestd.model.schema import TableId
from ingestd.testing.oracle.comparison import await_caught_up
from spark_jobs.history import as_of, main
from tests.harness.audited import Audited, Rows, as_row
from tests.harness.command_line import run_command
from tests.harness.config import wal_config
from tests.harness.databases import Database, fresh_database
from tests.harness.servers import FAST, running_server
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from pyspark.sql import SparkSession

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon

LIMIT_S = 60.0
TABLES = ("documents", "events")


class KilledError(Exception):
    """In the place of a kill."""


@pytest.fixture
def database(postgres_bindir: Path) -> Iterator[Database]:
    """On a server that records commit timestamps."""
    settings = {**FAST, "track_commit_timestamp": "on"}
    with running_server(postgres_bindir, settings) as server, fresh_database(server) as made:
        yield made


def history(spark: SparkSession, target: Path, table: str, at: datetime) -> Rows:
    rows = as_of(spark, str(target), f"public.{table}", at).drop("_cdc_raw").collect()
    return Counter(as_row(row.asDict()) for row in rows)


def asks_anew(daemon: Daemon, lake: Path) -> None:
    """Have the tables read once more while they are written to."""
    done = run_command(daemon.config_path, "snapshot", "shop", *(f"public.{t}" for t in TABLES))
    assert done.returncode == 0, done.stderr

    def is_read() -> bool:
        seqs = [read_raw(str(lake), "shop", TableId("public", t))["_cdc_seq"] for t in TABLES]
        return all(found.to_pylist().count(-1) == 2 for found in seqs)

    await_until(is_read, LIMIT_S, daemon.tail)


@pytest.mark.thorough
def test_a_history_at_a_time_is_the_source_as_it_was(
    spark: SparkSession, database: Database, make_daemon: MakeDaemon, lake: Path, tmp_path: Path
) -> None:
    """Toasted values, key changes, equal rows, truncates; re-reads; both daemon and job killed."""
    source, target = Audited(database, random.Random(1)), tmp_path / "history"
    source.create()
    source.write(5)
    loaded = len(source.points)
    config = wal_config(
        lake=lake,
        dsn=database.dsn,
        tables=[f"public.{t}" for t in TABLES],
        source_extra=f'slot = "{database.name}"',
    )
    arguments = ["--lake", str(lake), "--source", "shop", "--target", str(target), "--once"]
    daemon = make_daemon(config)
    daemon.start_ready(LIMIT_S)
    source.write(15)
    with database.connect() as connection:
        await_caught_up(connection, database.name, LIMIT_S)
        assert main(arguments) == 0
        daemon.sigkill()
        source.write(10)
        daemon.start_ready(LIMIT_S)
        asks_anew(daemon, lake)
        source.write(15)
        await_caught_up(connection, database.name, LIMIT_S)
    killed: list[str] = []

    def kill(name: str) -> None:
        killed.append(name)
        raise KilledError

    with pytest.raises(KilledError):
        main(arguments, after_commit=kill)
    assert killed
    assert main(arguments) == 0
    last = len(source.points) - 1
    for number in (loaded, loaded + 20, last):
        notes, at = source.points[number]
        for table in TABLES:
            assert history(spark, target, table, at) == source.rows(table, notes), (table, number)
    found: Any = spark.read.format("delta").load(f"{target}/public/documents")
    assert (
        found.where("is_current AND valid_to IS NOT NULL OR _cdc_unchanged IS NOT NULL").count()
        == 0
    )
