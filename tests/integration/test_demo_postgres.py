from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import psycopg
import pyarrow as pa
import pytest

from ingestd.model.errors import OperatorError
from ingestd.model.schema import TableId
from ingestd.testing.embedded.accounts import Account, open_way
from ingestd.testing.embedded.installations import find_bindirs, reachable_bindir
from ingestd.testing.embedded.postgres import PostgresServer
from ingestd.testing.embedded.processes import children_of, is_running
from ingestd.testing.oracle.comparison import source_columns, source_key, source_rows, source_tables
from ingestd.testing.oracle.server_text import text_function
from tests.harness.waiting import await_until
from tests.harness.workload import TABLES, Workload

if TYPE_CHECKING:
    from pathlib import Path

    from tests.harness.databases import Database


@pytest.mark.parametrize("bindir", find_bindirs(), ids=str)
def test_every_installation_starts_for_logical_replication(bindir: Path, tmp_path: Path) -> None:
    with PostgresServer(tmp_path / "data", bindir=bindir) as server:
        assert server.psql("SHOW wal_level") == "logical\n"
        assert server.psql("SHOW listen_addresses") == "127.0.0.1\n"
        with psycopg.connect(server.dsn(socket=True)) as connection:
            assert connection.info.server_version // 10000 == server.major
        listed = subprocess.run(
            [str(server.program("pg_recvlogical")), "--version"], capture_output=True, check=True
        )
        assert str(server.major) in listed.stdout.decode()


def test_password_is_needed_when_given(tmp_path: Path) -> None:
    with PostgresServer(tmp_path / "data", password="it's a \\ secret") as server:
        assert server.psql("SELECT 1") == "1\n"
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(server.dsn(), password="wrong")


def test_killed_server_keeps_what_was_committed(own_postgres: PostgresServer) -> None:
    own_postgres.psql("CREATE TABLE t AS SELECT 7 AS n")
    with own_postgres.connect() as connection:
        backend = connection.info.backend_pid
        children = children_of(own_postgres.pid)
        assert backend in children
        dsn = own_postgres.dsn()
        own_postgres.kill()
        assert not any(map(is_running, children))
    own_postgres.start()
    assert own_postgres.dsn() == dsn
    assert own_postgres.psql("SELECT n FROM t") == "7\n"


def test_settings_hold_after_restart(own_postgres: PostgresServer) -> None:
    own_postgres.settings["wal_level"] = "replica"
    own_postgres.restart()
    assert own_postgres.psql("SHOW wal_level") == "replica\n"


def test_failed_start_names_the_cause(tmp_path: Path) -> None:
    server = PostgresServer(tmp_path / "data", settings={"wal_levl": "logical"})
    with pytest.raises(OperatorError, match='unrecognized configuration parameter "wal_levl"'):
        server.start()
    assert not server.is_running
    server.close()


def test_no_server_outlives_its_owner(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from ingestd.testing.embedded.postgres import PostgresServer\n"
        "server = PostgresServer(pathlib.Path(sys.argv[1]))\n"
        "server.start()\n"
        "print(server.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "data")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert is_running(pid)
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    await_until(lambda: not is_running(pid), 20, "the orphaned server to end")


def test_installation_that_the_account_cannot_reach_is_copied(tmp_path: Path) -> None:
    closed = tmp_path / "home"
    (closed / "bin").mkdir(parents=True)
    (closed / "bin" / "postgres").touch()
    closed.chmod(0o700)
    stranger = Account("stranger", os.getuid() + 1, os.getgid() + 1)
    copy = reachable_bindir(closed / "bin", stranger, tmp_path / "copy")
    assert copy != closed / "bin"
    assert (copy / "postgres").exists()
    assert reachable_bindir(closed / "bin", None, tmp_path) == closed / "bin"


def test_only_temporary_folders_are_opened_for_the_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = Account("stranger", os.getuid() + 1, os.getgid() + 1)
    private, below = tmp_path / "private", tmp_path / "private" / "below"
    below.mkdir(parents=True)
    private.chmod(0o700)
    monkeypatch.setattr("tempfile.tempdir", str(below))
    with pytest.raises(OperatorError, match="can't pass"):
        open_way(below, stranger)
    monkeypatch.setattr("tempfile.tempdir", None)
    open_way(below, stranger)
    assert stranger.reaches(below)
    assert private.stat().st_mode & 0o077 == 0o001


def test_texts_of_floats_tell_one_value_from_another(database: Database) -> None:
    rng = random.Random(7)
    values = [rng.uniform(-10, 10) * 10.0 ** rng.randint(-37, 37) for _ in range(2000)]
    values += [0.0, -0.0, 1e15, 1e14, 123456789012345.0, 1e-4, 1e-5, 999999.0, 1e6, 0.1, 100.0]
    values += [float("nan"), float("inf"), float("-inf"), 16777216.0, 1 / 3]
    for arrow, pg_type in ((pa.float64(), "float8"), (pa.float32(), "float4")):
        rows = database.rows(f"SELECT v::text, v FROM unnest(%s::{pg_type}[]) v", values)
        text = text_function(arrow)
        assert [text(v) for _, v in rows] == [text(t) for t, _ in rows]
        assert len({text(v) for _, v in rows}) == len({t for t, _ in rows})


def test_workload_touches_every_table_and_ends(workload_database: Database) -> None:
    with Workload(workload_database.dsn, seed=1, transactions=400) as workload:
        outcomes = workload.join()
    assert outcomes["committed"] > 200
    assert outcomes["rolled back"] > 0
    with workload_database.connect() as connection:
        tables = source_tables(connection)
        assert tables == sorted(TableId("public", name) for name in TABLES)
        for table in tables:
            columns = source_columns(connection, table)
            assert set(source_key(connection, table)) <= set(columns)
            source_rows(connection, table, columns)
        documents = source_rows(connection, TableId("public", "documents"), ["id", "body"])
    assert documents
