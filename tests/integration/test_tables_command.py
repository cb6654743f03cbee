"""`ingestd tables` on a real server, with and without a daemon."""

from __future__ import annotations

import json
import socket
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.command_line import run_command
from tests.harness.config import wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60


def tables(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(config, "tables", *arguments)


def found(done: subprocess.CompletedProcess[str], source: str = "shop") -> dict[str, Any]:
    """Return the tables of the JSON document by name."""
    listed = json.loads(done.stdout)["sources"][source]["tables"]
    return {table["table"]: table for table in listed}


def sources(database: Database, tmp_path: Path, dsn: str | None = None) -> str:
    """Return the TOML of a daemon."""
    return wal_config(
        lake=tmp_path / "lake",
        dsn=dsn or database.dsn,
        tables=["public.*", "!public.audit_*", "public.absent"],
        source_extra=f'slot = "{database.name}"\npublication = "{database.name}"',
    )


def config(database: Database, tmp_path: Path, *, dsn: str | None = None, extra: str = "") -> Path:
    """Write it for a daemon that does not run."""
    path = tmp_path / "ingestd.toml"
    off = '[http]\nlisten = "off"\n'
    path.write_text(f"{sources(database, tmp_path, dsn)}\n{off}\n{extra}", "utf-8")
    return path


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, email text, note text)",
        "COMMENT ON TABLE orders IS 'what was bought'",
        "COMMENT ON COLUMN orders.email IS 'of the buyer'",
        "INSERT INTO orders SELECT i, 'e' || i % 10, NULL FROM generate_series(1, 1000) i",
        "ANALYZE orders",
        "CREATE TABLE audit_log (id int PRIMARY KEY)",
        "CREATE TABLE keyless (id int)",
        "CREATE SCHEMA app",
        "CREATE TABLE app.jobs (id int PRIMARY KEY)",
    )
    return database


def test_without_a_daemon_the_catalog_is_listed(shop: Database, tmp_path: Path) -> None:
    path = config(shop, tmp_path)
    done = tables(path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    listed = found(done)
    orders = listed["public.orders"]
    assert (orders["rows"], orders["comment"], orders["key"]) == (1000, "what was bought", ["id"])
    assert (orders["captured"], orders["state"], orders["reason"]) == (True, None, None)
    email = orders["columns"][1]
    assert (email["comment"], email["null_fraction"], email["distinct"]) == ("of the buyer", 0, 10)
    reasons = {name: t["reason"] for name, t in listed.items() if not t["captured"]}
    assert reasons.keys() == {"app.jobs", "public.audit_log", "public.keyless", "public.absent"}
    assert "replica identity" in reasons["public.keyless"]
    assert "REPLICA IDENTITY FULL" in listed["public.keyless"]["remedy"]
    assert not (tmp_path / "lake").exists()
    assert shop.slots() == []

    done = tables(path, "shop", "--schema", "public", "--columns")
    assert (done.returncode, done.stderr) == (0, "")
    assert "app.jobs" not in done.stdout
    for line in ("public.orders", "of the buyer", "not captured: public.absent: does not exist"):
        assert line in done.stdout


@pytest.mark.thorough
def test_a_role_without_rights_sees_what_it_lacks(
    shop: Database, tmp_path: Path, stranger: str
) -> None:
    path = config(shop, tmp_path, dsn=shop.server.dsn(shop.name, user=stranger))
    done = tables(path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    orders = found(done)["public.orders"]
    assert (orders["rows"], orders["captured"], orders["reason"]) == (
        1000,
        False,
        "no privilege to read it",
    )
    assert orders["remedy"] == f'GRANT SELECT ON "public"."orders" TO "{stranger}";'
    shop.execute(f"GRANT SELECT ON orders TO {stranger}", f"ALTER TABLE orders OWNER TO {stranger}")
    orders = found(tables(path, "--json"))["public.orders"]
    assert "REPLICATION" in orders["reason"]
    shop.execute(f"ALTER TABLE orders OWNER TO {shop.value('SELECT current_user')}")


@pytest.mark.thorough
def test_a_running_daemon_tells_the_states(
    shop: Database, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    daemon = make_daemon(sources(shop, tmp_path))
    daemon.start()
    path = daemon.config_path

    def state() -> str | None:
        told: str | None = found(tables(path, "--json"))["public.orders"]["state"]
        return told

    await_until(lambda: state() == "live", LIMIT_S, daemon.tail)
    assert "  live" in tables(path).stdout
    assert daemon.sigterm() == 0
    assert state() == "live"  # the lake knows


def test_a_locked_table_holds_nothing_up(shop: Database, tmp_path: Path) -> None:
    path = config(shop, tmp_path)
    with shop.connect(autocommit=False) as connection:
        connection.execute("LOCK orders IN ACCESS EXCLUSIVE MODE")
        done = tables(path, "--json", "--timeout", "5s")
        connection.rollback()
    assert (done.returncode, done.stderr) == (0, "")
    assert found(done)["public.orders"]["rows"] == 1000


def test_no_answer_within_the_limit_is_75(shop: Database, tmp_path: Path) -> None:
    path = config(shop, tmp_path)
    with shop.connect(autocommit=False) as connection:
        connection.execute("LOCK pg_class IN ACCESS EXCLUSIVE MODE")
        done = tables(path, "--timeout", "500ms")
        connection.rollback()
    assert (done.returncode, done.stdout) == (75, "not known\n")
    assert "no answer within 0.5 s" in done.stderr


def test_a_server_that_is_silent_is_75_within_the_limit(shop: Database, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dsn = f"host=127.0.0.1 port={silent.getsockname()[1]} dbname=x user=y"
        done = tables(config(shop, tmp_path, dsn=dsn), "--timeout", "500ms")
    assert done.returncode == 75
    assert "no answer within 0.5 s" in done.stderr  # not libpq's own limit of 10 s


@pytest.mark.thorough
def test_a_missing_database_exits_1_and_others_are_shown(shop: Database, tmp_path: Path) -> None:
    dsn = shop.server.dsn("nowhere")
    extra = f'[sources.crm]\nkind = "wal"\ndsn = "{dsn}"\ntables = ["public.*"]\n'
    path = config(shop, tmp_path, extra=extra)
    done = tables(path, "--json")
    assert done.returncode == 1
    assert "nowhere" in done.stderr
    assert "public.orders" in found(done)
    assert found(done, "crm") == {}
    done = tables(path)
    assert [line for line in done.stdout.splitlines() if line.startswith("source ")] == [
        "source shop",
        "source crm",
    ]
    done = tables(path, "shop")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["shpo"], "no such source; there is shop"),
        (["--schema", "nope"], "there is app, public"),
        (["--timeout", "soon"], "--timeout"),
    ],
)
def test_wrong_names_are_2(shop: Database, tmp_path: Path, arguments: list[str], said: str) -> None:
    done = tables(config(shop, tmp_path), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
