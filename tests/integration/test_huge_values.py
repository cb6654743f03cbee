"""Values far beyond what may be held: passed piece by piece, never held (I8, I9)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ingestd.lake.delta.read import read_raw
from ingestd.lake.fold.plain import fold
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from ingestd.testing.embedded.daemon import module_environment
from tests.harness.channels import encrypted
from tests.harness.compare import assert_lake_equals_source, registry
from tests.harness.config import polling_config, wal_config
from tests.harness.databases import fresh_database
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database
    from tests.harness.tls_servers import TlsServer

LIMIT_S = 120.0
PEAK_BYTES = 64_000_000 + 200_000_000
"""`limits.memory`, and what the rest of a process may take."""
HUGE = "repeat('x', 250000000)"
"""3 MB where it is stored."""
MEASURED = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
"""
"""Runs a command, then prints its peak in kB. (A process begins with the peak of its parent.)"""
SMALL = TableId("public", "small")
WAYS = ("snapshot", "stream", "drain", "polling", "polling_snapshot")


def peak_bytes(daemon: Daemon) -> int:
    text = Path(f"/proc/{daemon.pid}/status").read_text(encoding="ascii")
    [line] = [line for line in text.splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def config(dsn: str, lake: Path, way: str) -> str:
    extra = '[limits]\nmemory = "64MB"\n'
    if way.startswith("polling"):
        return polling_config(lake=lake, dsn=dsn, extra=extra)
    source = "catch_up_above = 0" if way == "drain" else ""
    return wal_config(lake=lake, dsn=dsn, source_extra=source, extra=extra)


def small_rows(lake: Path) -> int:
    is_there = (lake / "shop/public/small/_delta_log").exists()
    return len(fold(read_raw(str(lake), "shop", SMALL), ["id"])) if is_there else 0


def state(lake: Path, name: str) -> dict[str, object]:
    found = [row for row in registry(lake) if row["table"] == f"public.{name}"]
    return dict(found[-1]) if found else {}


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_bounded_a_value_of_250_mb_stops_its_table(
    database: Database, lake: Path, make_daemon: MakeDaemon, way: str
) -> None:
    assert_passed(database, database.dsn, lake, make_daemon, way)


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_bounded_a_value_of_250_mb_is_never_held_over_tls_either(
    secure: TlsServer, lake: Path, make_daemon: MakeDaemon, way: str
) -> None:
    with fresh_database(secure.server) as shop:
        assert_passed(shop, encrypted(shop.dsn, secure), lake, make_daemon, way)


@pytest.mark.thorough
def test_bounded_a_value_of_250_mb_stops_its_reference_table(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    make_tables(database)
    database.execute(f"INSERT INTO big VALUES (10, {HUGE})")
    reference = '[sources.shop.table."public.{}"]\nreference = "snapshot_only"\nrefresh = "1s"\n'
    text = config(database.dsn, lake, "snapshot") + reference.format("big")
    daemon = make_daemon(text + reference.format("small"))
    daemon.start()
    [stopped] = await_until(lambda: daemon.events("reference.stopped"), LIMIT_S, daemon.tail)
    assert stopped["table"] == "public.big"
    assert "a row of 250 MB" in stopped["reason"]
    assert "exclude_columns" in stopped["remedy"]
    await_until(lambda: daemon.events("reference.committed"), LIMIT_S, daemon.tail)
    assert peak_bytes(daemon) <= PEAK_BYTES


@pytest.mark.thorough
def test_bounded_a_value_of_250_mb_is_reported_by_verify(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    make_tables(database)
    database.execute(f"INSERT INTO big VALUES (10, {HUGE})")
    text = config(database.dsn, lake, "snapshot")
    daemon = make_daemon(text.replace("64MB", "2GB"))  # with that it is captured
    daemon.start_ready()
    await_until(lambda: state(lake, "big").get("state") == "live", LIMIT_S, daemon.tail)
    await_until(lambda: state(lake, "small").get("state") == "live", LIMIT_S, daemon.tail)
    daemon.write_config(text)
    command = [sys.executable, "-m", "ingestd", "verify", "shop", "--json"]
    verify = subprocess.run(
        [sys.executable, "-c", MEASURED, *command, "-c", daemon.config_path.name],
        cwd=daemon.config_path.parent,
        env=module_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "a row of 250 MB" in verify.stdout
    assert "public.small" in verify.stdout
    assert 1024 * int(verify.stderr.split()[-1]) <= PEAK_BYTES


@pytest.mark.thorough
def test_a_table_with_defaults_too_large_to_read_is_refused(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    make_tables(database)
    # what a row of pg_attribute, which has no TOAST, has room for, compressed
    added = ", ".join(f"ADD late_{n} text DEFAULT repeat('x', 500000)" for n in range(4))
    database.execute(f"ALTER TABLE big {added}")
    daemon = make_daemon(config(database.dsn, lake, "snapshot"))
    daemon.start()
    [refused] = await_until(lambda: daemon.events("table.stopped"), LIMIT_S, daemon.tail)
    assert refused["table"] == "public.big"
    assert "column 'late_2' was added with a default of 0.5 MB" in refused["reason"]
    database.execute("INSERT INTO small VALUES (1, 'meanwhile')")
    await_until(lambda: small_rows(lake) == 1, LIMIT_S, daemon.tail)
    # what its remedy says helps
    assert 'VACUUM FULL "public"."big";' in refused["remedy"]
    daemon.sigterm()
    database.execute('VACUUM FULL "public"."big"')
    daemon.start_ready()
    await_until(lambda: state(lake, "big").get("state") == "live", LIMIT_S, daemon.tail)


def make_tables(database: Database) -> None:
    database.execute(
        "CREATE TABLE big (id int PRIMARY KEY, body text)",
        "CREATE TABLE small (id int PRIMARY KEY, note text)",
        "INSERT INTO big SELECT n, 'short' FROM generate_series(1, 9) n",
    )


def assert_passed(
    database: Database, dsn: str, lake: Path, make_daemon: MakeDaemon, way: str
) -> None:
    make_tables(database)
    changes = [f"INSERT INTO big VALUES (10, {HUGE})", "INSERT INTO small VALUES (1, 'after it')"]
    daemon = make_daemon(config(dsn, lake, way))
    if way not in {"snapshot", "polling_snapshot"}:
        daemon.start_ready()
    if way == "drain":
        daemon.sigterm()
    with database.connect(autocommit=False) as connection:
        for change in changes:
            connection.execute(change.encode())
        connection.commit()
    daemon.start()
    await_until(lambda: state(lake, "big").get("state") == "stopped", LIMIT_S, daemon.tail)
    assert "a row of 250 MB" in str(state(lake, "big")["reason"])
    database.execute("INSERT INTO small VALUES (2, 'later')")
    await_until(lambda: small_rows(lake) == 2, LIMIT_S, daemon.tail)
    if "polling" not in way:
        await_passed(database, daemon)
    peak = peak_bytes(daemon)
    print(f"{way}: peak {peak / 1e6:.0f} MB")  # noqa: T201
    assert peak <= PEAK_BYTES
    # what its remedy says helps
    daemon.sigterm()
    text = config(dsn, lake, way)
    text += '[sources.shop.table."public.big"]\nexclude_columns = ["body"]\n'
    daemon.write_config(text)
    daemon.start_ready()
    await_until(lambda: state(lake, "big")["state"] == "live", LIMIT_S, daemon.tail)
    if "polling" not in way:
        assert_lake_equals_source(database, lake, tables=[SMALL])


def await_passed(database: Database, daemon: Daemon) -> None:
    """Wait until the slot has passed the current WAL."""
    target = Lsn.parse(database.value("SELECT pg_current_wal_insert_lsn()::text"))
    query = (
        "SELECT min(confirmed_flush_lsn)::text FROM pg_replication_slots WHERE database = %s"
        " AND NOT temporary"
    )
    await_until(
        lambda: Lsn.parse(database.value(query, database.name)) >= target, LIMIT_S, daemon.tail
    )
