"""`ingestd pause SOURCE` and `ingestd resume SOURCE`, on a real server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.testing.oracle.comparison import compare_source
from tests.harness.command_line import run_command
from tests.harness.compare import (
    assert_change_log_is_sound,
    assert_lake_equals_source,
    epochs,
    registry,
)
from tests.harness.config import polling_config, wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 90


def done(daemon: Daemon, *arguments: str) -> str:
    """Run a command that has to succeed; return what it printed."""
    found = run_command(daemon.config_path, *arguments)
    assert (found.returncode, found.stderr) == (0, ""), daemon.tail()
    return found.stdout


def shown(daemon: Daemon) -> dict[str, Any]:
    status = daemon.status()
    assert status is not None, daemon.tail()
    found: dict[str, Any] = status["sources"]["shop"]
    return found


def await_shown(daemon: Daemon, is_right: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    def is_told() -> bool:
        status = daemon.status()
        return status is not None and is_right(status["sources"]["shop"])

    await_until(is_told, LIMIT_S, daemon.tail)
    return shown(daemon)


def await_paused(daemon: Daemon) -> dict[str, Any]:
    return await_shown(daemon, lambda shop: shop["state"] == "paused")


def config(database: Database, lake: Path, **more: str) -> str:
    names = f'slot = "{database.name}"\npublication = "{database.name}"\n'
    extra = names + more.pop("source_extra", "")
    return wal_config(lake=lake, dsn=database.dsn, source_extra=extra, **more)


@pytest.fixture
def daemon(database: Database, make_daemon: MakeDaemon, lake: Path) -> Daemon:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        "INSERT INTO t SELECT n, 'a' FROM generate_series(1, 100) n",
    )
    section = '[sources.shop.table."public.t"]\nreference = "snapshot_plus_cdc"'
    made = make_daemon(config(database, lake, extra=section))
    made.start_ready(LIMIT_S)
    assert_lake_equals_source(database, lake, slot=database.name)
    return made


def test_exactly_once_a_paused_source_resumes(
    database: Database, daemon: Daemon, lake: Path
) -> None:
    told = done(daemon, "pause", "shop")
    assert "source shop: paused since 20" in told
    assert "resume with: ingestd resume shop -c ingestd.toml" in told
    was = len(epochs(lake))
    database.execute(
        "INSERT INTO t SELECT n, repeat('b', 200) FROM generate_series(101, 5000) n",
        "UPDATE t SET note = 'c' WHERE id <= 50",
    )
    shop = await_shown(daemon, lambda shop: (shop["lag_bytes"] or 0) > 1_000_000)
    assert shop["state"] == "paused"
    assert shop["retained_bytes"] > 1_000_000
    assert (shop["lag_seconds"], shop["remedy"]) == (None, "ingestd resume shop")
    assert len(epochs(lake)) == was
    assert_told(daemon, shop["since"])
    assert done(daemon, "pause", "shop"), "twice is as once"
    assert shown(daemon)["since"] == shop["since"]
    done(daemon, "resume", "shop")
    assert_lake_equals_source(database, lake, slot=database.name)
    assert_change_log_is_sound(database, lake)
    await_shown(daemon, lambda shop: shop["references"][0]["rows"] == 5000)
    [resumed] = daemon.events("source.resumed")
    assert resumed["paused_s"] > 0
    assert "was not paused" in done(daemon, "resume", "shop")


def assert_told(daemon: Daemon, since: str) -> None:
    """Readiness, metrics and log report the pause; none of them calls it a fault."""
    code, text = daemon.get("/readyz") or (0, "")
    assert (code, text.splitlines()[0]) == (200, "ready")
    assert text.splitlines()[1].startswith("source shop is paused since 20")
    status = daemon.status() or {}
    assert (status["ready"], len(status["paused"])) == (True, 1)
    _, metrics = daemon.get("/metrics") or (0, "")
    assert 'ingestd_source_state{source="shop",state="paused"} 1.0' in metrics
    assert 'ingestd_slot_retained_bytes{source="shop"}' in metrics
    assert 'ingestd_lag_seconds{source="shop"}' not in metrics
    [paused] = daemon.events("source.paused")
    assert paused["since"][:19] == since[:19]
    [held] = daemon.events("source.held")
    assert held["retained_bytes"] >= 0
    assert "ingestd resume shop" in done(daemon, "status")


@pytest.mark.thorough
def test_a_pause_outlives_the_daemon_and_needs_none(
    database: Database, daemon: Daemon, lake: Path
) -> None:
    done(daemon, "pause", "shop")
    since = shown(daemon)["since"]
    database.execute("INSERT INTO t VALUES (1000, 'd')")
    was = len(epochs(lake))
    daemon.sigkill()
    daemon.start()
    shop = await_paused(daemon)
    assert shop["since"] == since
    shop = await_shown(daemon, lambda shop: shop["retained_bytes"] is not None)
    assert [(t["table"], t["state"]) for t in shop["tables"]] == [("public.t", "live")]
    assert (shop["epoch"], len(epochs(lake))) == (was, was)
    assert daemon.sigterm() == 0
    offline = json.loads(done(daemon, "status", "--json"))["sources"]["shop"]
    assert (offline["state"], offline["since"]) == ("paused", since)
    assert "resumed; no daemon answers" in done(daemon, "resume", "shop")
    assert "no daemon answers" in done(daemon, "pause", "shop")
    daemon.start()
    await_paused(daemon)
    done(daemon, "resume", "shop")
    assert_lake_equals_source(database, lake, slot=database.name)


@pytest.mark.thorough
def test_what_a_paused_source_can_not_do_is_said(daemon: Daemon) -> None:
    found = run_command(daemon.config_path, "pause", "shp")
    assert (found.returncode, found.stderr) == (
        2,
        "ingestd: sources.shp: no such source; there is shop\n",
    )
    done(daemon, "pause", "shop")
    for arguments in (("snapshot", "shop", "public.t"), ("verify", "shop")):
        found = run_command(daemon.config_path, *arguments)
        assert found.returncode == 1, (arguments, found)
        assert "paused since 20" in found.stderr
        assert "ingestd resume shop" in found.stderr


@pytest.mark.thorough
def test_one_writer_a_paused_source_keeps_its_claim(
    database: Database, daemon: Daemon, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    done(daemon, "pause", "shop")
    # The claim is released with the pipeline and taken again: reported once it is held.
    await_until(lambda: daemon.events("source.held"), LIMIT_S, daemon.tail)
    other = make_daemon(config(database, tmp_path / "other lake"), "other")
    other.start()
    shop = await_shown(other, lambda shop: shop["state"] == "backing_off")
    assert "another ingestd works on slot" in shop["reason"]


@pytest.mark.thorough
def test_snapshot_boundary_a_first_load_resumes_after_a_pause(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        "INSERT INTO t SELECT n, repeat('a', 100) FROM generate_series(1, 60000) n",
    )
    extra = 'snapshot_chunked_above = "100kB"\nsnapshot_chunk = "500kB"\nsnapshot_workers = 1'
    slow = {"INGESTD_FAILPOINTS": "capture.split.before=delay:0.7@2+"}
    daemon = make_daemon(config(database, lake, source_extra=extra), environment=slow)
    daemon.start()
    await_until(lambda: has_begun(lake), LIMIT_S, daemon.tail)
    done(daemon, "pause", "shop")
    assert registry(lake)[-1]["state"] == "snapshotting", "it is to be paused in the middle"
    database.execute(
        "UPDATE t SET note = 'b' WHERE id % 3 = 0",
        "DELETE FROM t WHERE id % 7 = 0",
        "INSERT INTO t SELECT n, 'c' FROM generate_series(60001, 60100) n",
    )
    assert daemon.sigterm() == 0
    daemon.environment.clear()
    daemon.start()
    await_paused(daemon)
    done(daemon, "resume", "shop")
    await_until(lambda: registry(lake)[-1]["state"] == "live", LIMIT_S, daemon.tail)
    assert_lake_equals_source(database, lake, slot=database.name)
    assert_change_log_is_sound(database, lake)


def has_begun(lake: Path) -> bool:
    """Whether a part of the table is durable."""
    return any(row["rows"] for row in epochs(lake))


@pytest.mark.thorough
def test_a_polled_source_is_paused_too(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz NOT NULL DEFAULT clock_timestamp())",
        "INSERT INTO t SELECT n FROM generate_series(1, 100) n",
    )
    section = '[sources.shop.table."public.t"]\ncursor = "at"'
    daemon = make_daemon(polling_config(lake=lake, dsn=database.dsn, extra=section))
    daemon.start_ready(LIMIT_S)
    done(daemon, "pause", "shop")
    was = len(epochs(lake))
    database.execute("INSERT INTO t SELECT n FROM generate_series(101, 200) n")
    await_shown(daemon, lambda shop: shop["lag_at"] is not None)
    daemon.sigkill()
    daemon.start()
    await_paused(daemon)
    assert len(epochs(lake)) == was
    done(daemon, "resume", "shop")
    await_until(lambda: is_equal(database, lake), LIMIT_S, daemon.tail)


def is_equal(database: Database, lake: Path) -> bool:
    with database.connect() as connection:
        return all(c.is_equal for c in compare_source(connection, str(lake), "shop"))
