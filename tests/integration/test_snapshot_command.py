"""`ingestd snapshot SOURCE TABLE...` asks the running daemon, on a real server."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.lake.delta.read import read_raw
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from tests.harness.command_line import run_command
from tests.harness.compare import assert_lake_equals_source
from tests.harness.config import wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60


def snapshot(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(daemon.config_path, "snapshot", *arguments)


def shown(daemon: Daemon, table: str) -> dict[str, Any]:
    status = daemon.status()
    assert status is not None, daemon.tail()
    found: dict[str, Any] = next(
        t for t in status["sources"]["shop"]["tables"] if t["table"] == table
    )
    return found


def markers(lake: Path, table: str) -> int:
    rows = read_raw(str(lake), "shop", TableId("public", table))
    return int(rows["_cdc_op"].to_pylist().count("t"))


def config(database: Database, lake: Path, *, dsn: str | None = None, manage: bool = True) -> str:
    names = f'slot = "{database.name}"\npublication = "{database.name}"\n'
    names += 'discover_interval = "1s"'
    extra = names if manage else f"{names}\nmanage = false"
    return wal_config(lake=lake, dsn=dsn or database.dsn, source_extra=extra)


@pytest.fixture
def daemon(database: Database, make_daemon: MakeDaemon, lake: Path) -> Daemon:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        "CREATE TABLE other (id int PRIMARY KEY)",
        "INSERT INTO t SELECT n, 'a' FROM generate_series(1, 100) n",
        "INSERT INTO other VALUES (1)",
    )
    made = make_daemon(config(database, lake))
    made.start_ready()

    def are_live() -> bool:
        status = made.status() or {"sources": {"shop": {"tables": []}}}
        found = status["sources"]["shop"]["tables"]
        return [t["state"] for t in found if t["snapshot_lsn"]] == ["live", "live"]

    await_until(are_live, LIMIT_S, made.tail)
    return made


def test_snapshot_boundary_a_live_table_is_resnapshotted(
    database: Database, daemon: Daemon, lake: Path
) -> None:
    before = shown(daemon, "public.t")["snapshot_lsn"]
    database.execute("UPDATE t SET note = 'b' WHERE id < 50", "DELETE FROM t WHERE id = 60")
    done = snapshot(daemon, "shop", "public.t")
    assert (done.returncode, done.stderr) == (0, ""), daemon.tail()
    lines = done.stdout.splitlines()
    assert lines[0] == "source shop: requested a new snapshot of public.t"
    assert lines[-1] == "  public.t: live"
    assert shown(daemon, "public.t")["snapshot_lsn"] != before
    assert (markers(lake, "t"), markers(lake, "other")) == (2, 1)
    database.execute("INSERT INTO t VALUES (1000, 'c')", "INSERT INTO other VALUES (2)")
    assert_lake_equals_source(database, lake, slot=database.name)
    [asked] = daemon.events("snapshot.requested")
    assert asked["tables"] == ["public.t"]


def test_snapshot_boundary_a_partial_snapshot_keeps_other_rows(
    database: Database, daemon: Daemon, lake: Path
) -> None:
    await_until(lambda: shown(daemon, "public.t")["state"] == "live", LIMIT_S, daemon.tail)
    before = shown(daemon, "public.t")["snapshot_lsn"]
    database.execute("UPDATE t SET note = 'b' WHERE id > 90", "DELETE FROM t WHERE id = 95")
    done = snapshot(daemon, "shop", "public.t", "--where", "id > 90 -- these only")
    assert (done.returncode, done.stderr) == (0, ""), daemon.tail()
    assert done.stdout.splitlines()[-1] == "  public.t: live"
    now = shown(daemon, "public.t")
    assert (now["snapshot_lsn"], now["last_snapshot"]["outcome"]) == (before, "done")
    assert markers(lake, "t") == 1
    rows = read_raw(str(lake), "shop", TableId("public", "t")).to_pylist()
    again = [r["id"] for r in rows if r["_cdc_op"] == "r" and r["_cdc_lsn"] > lsn(before)]
    assert sorted(again) == [n for n in range(91, 101) if n != 95]
    assert_lake_equals_source(database, lake, slot=database.name)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "where",
    [
        "no_such > 1",
        "id >",
        "id",
        "true) OR (true",
        "id > 1; DROP TABLE other",
        "id > 1)) TO STDOUT; COMMIT; DROP TABLE other; --",
        "1/(id-5) > 0",
    ],
)
def test_isolated_a_condition_that_fails_is_reported(
    database: Database, daemon: Daemon, lake: Path, where: str
) -> None:
    done = snapshot(daemon, "shop", "public.t", "--where", where)
    assert done.returncode == 1, done.stdout
    assert "public.t" in done.stderr
    daemon.await_ready()
    assert shown(daemon, "public.t")["state"] == "live"
    database.execute("INSERT INTO t VALUES (1000, 'c')", "INSERT INTO other VALUES (2)")
    assert_lake_equals_source(database, lake, slot=database.name)


@pytest.mark.thorough
def test_snapshot_boundary_a_cancelled_snapshot_keeps_old_rows(
    database: Database, daemon: Daemon, lake: Path
) -> None:
    before = await_until(lambda: shown(daemon, "public.t")["snapshot_lsn"], LIMIT_S, daemon.tail)
    with database.connect(autocommit=False) as holding:
        holding.execute("LOCK t IN ACCESS EXCLUSIVE MODE")  # it can't be read
        assert snapshot(daemon, "shop", "public.t", "--no-wait").returncode == 0
        done = snapshot(daemon, "shop", "public.t", "--cancel")
        assert (done.returncode, done.stderr) == (0, ""), daemon.tail()
        assert done.stdout == "source shop: cancelled the snapshot of public.t\n"
        holding.rollback()
    await_until(lambda: shown(daemon, "public.t")["state"] == "live", LIMIT_S, daemon.tail)
    now = shown(daemon, "public.t")
    assert (now["snapshot_lsn"], now["last_snapshot"]["outcome"]) == (before, "cancelled")
    assert markers(lake, "t") == 1
    database.execute("INSERT INTO t VALUES (1000, 'c')", "DELETE FROM t WHERE id = 7")
    assert_lake_equals_source(database, lake, slot=database.name)
    done = snapshot(daemon, "shop", "public.t", "--cancel")
    assert (done.returncode, done.stdout) == (1, "")
    assert "table public.t has no snapshot to cancel" in done.stderr
    done = snapshot(daemon, "shop", "public.t")
    assert (done.returncode, done.stderr) == (0, ""), daemon.tail()
    assert markers(lake, "t") == 2
    assert_lake_equals_source(database, lake, slot=database.name)


@pytest.mark.thorough
def test_rows_being_read_when_cancelled_are_left_out(
    database: Database, daemon: Daemon, lake: Path
) -> None:
    slow = "pg_sleep(0.05) IS NOT NULL"  # 5 s for all rows
    assert snapshot(daemon, "shop", "public.t", "--where", slow, "--no-wait").returncode == 0

    def reading() -> bool:
        running = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND wait_event = %s"
        return bool(database.value(running, database.name, "PgSleep"))

    await_until(reading, LIMIT_S, daemon.tail)
    done = snapshot(daemon, "shop", "public.t", "--cancel")
    assert (done.returncode, done.stderr) == (0, ""), daemon.tail()
    now = shown(daemon, "public.t")
    assert (now["state"], now["snapshot"]) == ("live", None)
    assert now["last_snapshot"]["outcome"] == "cancelled"
    await_until(lambda: not reading(), LIMIT_S, daemon.tail)
    done = snapshot(daemon, "shop", "public.t", "--where", "id < 3")
    assert (done.returncode, done.stderr) == (0, ""), daemon.tail()
    assert_lake_equals_source(database, lake, slot=database.name)
    rows = read_raw(str(lake), "shop", TableId("public", "t"))["_cdc_op"].to_pylist()
    assert rows.count("r") == 100 + 2


def lsn(text: str) -> int:
    return int(Lsn.parse(text))


def test_without_wait_it_says_how_to_follow(daemon: Daemon, lake: Path) -> None:
    done = snapshot(daemon, "shop", "public.t", "public.other", "--no-wait")
    assert (done.returncode, done.stderr) == (0, ""), daemon.tail()
    assert "ingestd status -c ingestd.toml" in done.stdout
    await_until(
        lambda: (markers(lake, "t"), markers(lake, "other")) == (2, 2), LIMIT_S, daemon.tail
    )


def test_an_unknown_table_is_1_with_the_nearest(daemon: Daemon) -> None:
    done = snapshot(daemon, "shop", "public.othr")
    assert (done.returncode, done.stdout) == (1, "")
    assert "public.othr" in done.stderr
    assert "did you mean 'public.other'?" in done.stderr


def test_an_unknown_source_is_2(daemon: Daemon) -> None:
    done = snapshot(daemon, "shpo", "public.t")
    assert (done.returncode, done.stdout) == (2, "")
    assert "shpo" in done.stderr


def test_no_daemon_is_1(daemon: Daemon) -> None:
    assert daemon.sigterm() == 0
    done = snapshot(daemon, "shop", "public.t")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"no ingestd daemon answers on {daemon.listen}" in done.stderr


def test_a_source_that_is_not_running_is_75_and_says_why(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    daemon = make_daemon(config(database, lake, manage=False))  # no publication was created
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    daemon.start()

    def stopped() -> bool:
        status = daemon.status()
        return status is not None and status["sources"]["shop"]["state"] == "stopped"

    await_until(stopped, LIMIT_S, daemon.tail)
    done = snapshot(daemon, "shop", "public.t")
    assert (done.returncode, done.stdout) == (75, "")
    assert "source shop is stopped: " in done.stderr
    assert database.name in done.stderr
    assert "remedy: " in done.stderr


@pytest.fixture
def reader(database: Database) -> Iterator[str]:
    """A role that may replicate, and read what it is granted."""
    name = f"u_{database.name}"
    database.execute(f"CREATE ROLE {name} LOGIN REPLICATION")
    yield name
    database.execute(f"DROP OWNED BY {name}", f"DROP ROLE {name}")


@pytest.mark.thorough
def test_isolated_a_stopped_table_comes_back(
    database: Database, make_daemon: MakeDaemon, lake: Path, reader: str
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE TABLE secret (id int PRIMARY KEY)",
        "INSERT INTO t VALUES (1)",
        "INSERT INTO secret VALUES (1)",
        "ALTER TABLE secret ENABLE ROW LEVEL SECURITY",
        f"GRANT SELECT ON t, secret TO {reader}",
        f'CREATE PUBLICATION "{database.name}" FOR TABLE t, secret'
        " WITH (publish_via_partition_root = true)",
    )
    with database.connect() as connection:
        connection.execute(
            "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [database.name]
        )
    dsn = database.server.dsn(database.name, user=reader)
    daemon = make_daemon(config(database, lake, dsn=dsn, manage=False))
    daemon.start()
    await_until(lambda: daemon.events("table.stopped"), LIMIT_S, daemon.tail)
    [reason] = await_until(lambda: only_tables(not_ready(daemon)), LIMIT_S, daemon.tail)
    assert reason.startswith("source shop, table public.secret is stopped: query would be affected")
    remedy = shown(daemon, "public.secret")["remedy"]
    assert "BYPASSRLS" in remedy
    assert remedy.endswith("then: ingestd snapshot shop public.secret")
    assert table_state(daemon, "public.secret") == ["stopped"]

    done = snapshot(daemon, "shop", "public.secret")
    assert done.returncode == 1
    assert "table public.secret is stopped: " in done.stderr
    assert "row-level security" in done.stderr

    database.execute(
        "ALTER TABLE secret DISABLE ROW LEVEL SECURITY", "INSERT INTO secret VALUES (2)"
    )
    done = snapshot(daemon, "shop", "public.secret")
    assert (done.returncode, done.stderr) == (0, ""), daemon.tail()
    daemon.await_ready()
    assert table_state(daemon, "public.secret") == ["live"]
    database.execute("INSERT INTO secret VALUES (3)", "INSERT INTO t VALUES (2)")
    assert_lake_equals_source(database, lake, slot=database.name)


def not_ready(daemon: Daemon) -> list[str]:
    code, text = daemon.get("/readyz") or (0, "")
    return text.splitlines() if code == 503 else []


def only_tables(reasons: list[str]) -> list[str]:
    """Nothing until the source itself has got on."""
    return reasons if all("table" in reason for reason in reasons) else []


def table_state(daemon: Daemon, table: str) -> list[str]:
    """The states of a table whose metric is 1."""
    _, text = daemon.get("/metrics") or (0, "")
    wanted = f'table="{table}"'
    return [
        line.partition('state="')[2].partition('"')[0]
        for line in text.splitlines()
        if line.startswith("ingestd_table_state{") and wanted in line and line.endswith(" 1.0")
    ]


def test_lossless_values_kept_as_text_are_reported_once_a_column(
    database: Database, daemon: Daemon, lake: Path
) -> None:
    database.execute(
        "CREATE TABLE days (id int PRIMARY KEY, d date, at timestamptz)",
        "INSERT INTO days VALUES (1, '4713-01-01 BC', 'infinity'), (2, 'infinity', now())",
    )
    folder = lake / "shop/public/days/_delta_log"
    await_until(folder.exists, LIMIT_S, daemon.tail)
    for n in (3, 4):
        database.execute(f"INSERT INTO days VALUES ({n}, '-infinity', now())")
        assert_lake_equals_source(database, lake, slot=database.name)
    told = {e["column"]: e for e in daemon.events("table.raw_values")}
    assert sorted(told) == ["at", "d"]
    assert len(daemon.events("table.raw_values")) == 2
    assert all(e["table"] == "public.days" and e["count"] >= 1 for e in told.values())
    assert "BC" in told["d"]["hint"]
    assert "4713" not in daemon.log_path.read_text("utf-8")
    _, text = daemon.get("/metrics") or (0, "")
    assert 'ingestd_raw_values_total{source="shop",table="public.days"} 5.0' in text
