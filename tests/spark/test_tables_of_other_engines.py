"""A daemon, and each reader, on raw tables that other engines altered or rewrote (I8).

One table for each thing done, all done together while the daemon runs. Each reader has right rows
of a table, or that table alone stops and its remedy lets it continue.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from ingestd.cli import app
from ingestd.lake.maintenance.process import maintain
from ingestd.model.schema import TableId
from ingestd.testing.oracle.comparison import source_columns, source_rows
from spark_jobs import mirror
from spark_jobs.epochs import latest
from tests.faults.test_lake_faults import config, slot_of
from tests.harness.command_line import run_command, snapshot_of
from tests.harness.compare import assert_lake_equals_source, registry
from tests.harness.damages import move_away
from tests.harness.lake_faults import IMPATIENT
from tests.harness.maintaining import order_of
from tests.harness.mirrors import differences, lake_columns, mirror_texts
from tests.harness.other_engines import GO_ON, REWRITTEN, STOP, rewrite
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 180.0
KINDS = [*GO_ON, *STOP, *REWRITTEN]
GOING_ON = [TableId("public", kind) for kind in [*GO_ON, *REWRITTEN]]
COLUMNS = (
    "id int PRIMARY KEY, note text, small smallint, at timestamptz, wall timestamp, day date,"
    " price numeric(12, 2), tags text[], yes bool, bin bytea"
)
ROWS = (
    r"(100, 'a', 1, '9999-12-31 23:59:59.999999+00', '9999-12-31', '9999-12-31', 1.25, '{a,NULL}',"
    r" true, '\x00ff'),"
    r" (200, 'b', 2, '0001-01-01 00:00:00+00', '0001-01-01', '0001-01-01', -1.25, '{}', false, ''),"
    r" (300, NULL, NULL, 'infinity', '1969-12-31 23:59:59.999999', '-infinity', 'NaN', NULL, NULL,"
    r" NULL), (400, 'd', 4, '1500-02-28 12:00:00+00', '1582-10-10', '1582-10-10', 0, '{x}', true,"
    r" 'x')"
)


def _write(database: Database, number: int) -> None:
    for kind in KINDS:
        database.execute(
            f"INSERT INTO {kind} (id, note, small, at) VALUES ({number}, 'n', 3, '2300-01-01'),"
            f" ({number + 10}, NULL, NULL, NULL)",
            f"UPDATE {kind} SET note = 'round {number}' WHERE id IN (100, 400)",
            f"UPDATE {kind} SET id = {number + 20} WHERE id = {number + 10}",
            f"DELETE FROM {kind} WHERE id = {number - 1}",
        )


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_isolated_another_engines_table_is_read_or_stops_alone(
    spark: SparkSession, database: Database, make_daemon: MakeDaemon, lake: Path, tmp_path: Path
) -> None:
    for kind in KINDS:
        database.execute(f"CREATE TABLE {kind} ({COLUMNS})", f"INSERT INTO {kind} VALUES {ROWS}")
    daemon = make_daemon(config(database, lake))
    daemon.program = IMPATIENT
    daemon.start_ready(LIMIT_S)
    target = tmp_path / "target"
    _write(database, 1)
    _assert_read(database, lake, daemon)
    _assert_mirrored(spark, database, lake, target)
    for kind, statements in (GO_ON | STOP).items():
        for statement in statements:
            spark.sql(statement.format(t=f"delta.`{lake / 'shop/public' / kind}`"))
    for kind in REWRITTEN:
        rewrite(lake / "shop/public" / kind, kind)
    _write(database, 2)
    await_until(lambda: _stopped(daemon).keys() == STOP.keys(), LIMIT_S, lambda: _said(daemon))
    _assert_read(database, lake, daemon)
    for kind in KINDS:
        database.execute(
            f"ALTER TABLE {kind} ADD COLUMN later text DEFAULT 'old', ADD COLUMN last date"
        )
    _write(database, 3)
    database.execute(*(f"UPDATE {kind} SET later = 'new' WHERE id = 400" for kind in KINDS))
    _assert_read(database, lake, daemon)
    _assert_mirrored(spark, database, lake, target)
    order = {**json.loads(order_of(lake)), "retention_s": 0.0}
    done = {line["table"]: line for line in maintain(order)}
    assert not [t for t in map(str, GOING_ON) if "error" in done[t]], done
    _assert_read(database, lake, daemon)
    assert _stopped(daemon).keys() == STOP.keys()
    for kind in STOP:
        move_away(lake / "shop/public" / kind)
    asked = [snapshot_of(remedy)[2] for remedy in _stopped(daemon).values()]
    found = run_command(daemon.config_path, "snapshot", "shop", *asked)
    assert found.returncode == 0, found.stderr
    daemon.await_ready(LIMIT_S)
    _write(database, 4)
    every = [TableId("public", kind) for kind in KINDS]
    assert_lake_equals_source(database, lake, tables=every, slot=slot_of(database), limit_s=LIMIT_S)
    assert daemon.events("source.failed") == []
    assert daemon.sigterm() == 0


def _stopped(daemon: Daemon) -> dict[str, str]:
    events = daemon.events("table.stopped")
    return {e["table"].removeprefix("public."): e["remedy"] for e in events}


def _said(daemon: Daemon) -> str:
    return f"{STOP.keys() ^ _stopped(daemon).keys()}\n{daemon.tail()}"


def _assert_read(database: Database, lake: Path, daemon: Daemon) -> None:
    """By the fold, `verify` and `peek`; of stopped tables each says at most what helps."""
    assert_lake_equals_source(
        database, lake, tables=GOING_ON, slot=slot_of(database), limit_s=LIMIT_S
    )
    runner, config_path = CliRunner(), str(daemon.config_path)
    verified = runner.invoke(app, ["verify", "shop", "--json", "-c", config_path])
    states = {t["table"]: t for t in json.loads(verified.stdout)["tables"]}
    stopped = {row["table"] for row in registry(lake) if row["state"] == "stopped"}
    wrong = [t for name, t in states.items() if name not in stopped and t["state"] != "equal"]
    assert not wrong, wrong
    assert "unexpected" not in verified.output
    for kind in KINDS:
        arguments = ["peek", "shop", f"public.{kind}", "--limit", "1000", "--json"]
        peeked = runner.invoke(app, [*arguments, "-c", config_path])
        if f"public.{kind}" in stopped and peeked.exit_code:
            assert "remedy" in peeked.output, peeked.output
        else:
            assert peeked.exit_code == 0, peeked.output
            for text in ("9999-12-31", "0001-01-01", "1500-02-28", "1582-10-10"):
                assert text in peeked.output, (kind, text)


def _assert_mirrored(spark: SparkSession, database: Database, lake: Path, target: Path) -> None:
    arguments = ["--lake", str(lake), "--source", "shop", "--target", str(target), "--once"]
    mirror.main(arguments)  # its code is 1 where a table stopped
    cut = latest(spark, str(target))
    wrong: list[Any] = []
    with database.connect() as connection:
        for table in GOING_ON:
            columns = source_columns(connection, table)
            there = source_rows(connection, table, columns)
            mirrored = mirror_texts(cut[str(table)], lake_columns(lake, table, columns))
            wrong += differences(str(table), there, mirrored)
    assert not wrong, wrong
