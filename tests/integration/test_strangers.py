"""Our own servers and what other accounts of the machine gain from them: nothing."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from ingestd.testing.embedded.accounts import Account, account_for_server
from ingestd.testing.embedded.daemon import module_environment
from ingestd.testing.embedded.installations import reachable_bindir
from ingestd.testing.embedded.processes import children_of
from tests.harness.poolers import pooler_of
from tests.harness.tls_servers import tls_server
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("account")
LIMIT_S = 90.0
REFUSED = re.compile(
    r"no password supplied|password authentication failed|no pg_hba.conf entry|not allowed"
)


@pytest.fixture(scope="module")
def nobody() -> Account:
    """An account that is neither this one nor the server's."""
    own = account_for_server()
    if own is None:
        pytest.skip("only root can act as another account")
    found = pwd.getpwnam("nobody")
    if found.pw_uid == own.uid:
        pytest.skip("the servers run as nobody")
    return Account("nobody", found.pw_uid, found.pw_gid)


@pytest.fixture(scope="module")
def psql(postgres: PostgresServer, nobody: Account) -> Iterator[Path]:
    """A psql that `nobody` may run."""
    with tempfile.TemporaryDirectory(prefix="ingestd-tests-") as folder:
        Path(folder).chmod(0o755)
        bindir = postgres.program("psql").parent
        yield reachable_bindir(bindir, nobody, Path(folder)) / "psql"


def as_nobody(nobody: Account, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        **nobody.popen_arguments(),
    )


def assert_closed(server: PostgresServer, nobody: Account, psql: Path, *users: str) -> None:
    """Neither socket nor TCP accepts the account, and it reads no file of the server."""
    for socket in (False, True):
        for user in users:
            dsn = server.dsn(user=user, socket=socket)
            done = as_nobody(nobody, psql, "-Xw", "-d", dsn, "-c", "SELECT 1")
            assert done.returncode == 2, (dsn, done.stdout)
            said = "Permission denied" if socket or "host=/" in dsn else REFUSED
            assert re.search(said, done.stderr), done.stderr
    for file in (server.passfile, server.data_dir / "postgresql.conf", server.log_path):
        assert "Permission denied" in as_nobody(nobody, "cat", file).stderr
    for pid in (server.pid, *children_of(server.pid)):
        command = Path(f"/proc/{pid}/cmdline")
        assert not command.exists() or server.password.encode() not in command.read_bytes()
    assert server.password not in server.log_path.read_text(errors="replace")


def test_no_role_is_accepted_without_its_password(database: Database, stranger: str) -> None:
    """Whatever the account: the superuser, a role, over TCP, over the socket, for replication."""
    for dsn in (database.dsn, database.socket_dsn):
        for user in ("postgres", stranger):
            for more in ({}, {"replication": "database"}, {"password": "guess"}):
                given = {"passfile": "/dev/null", "user": user, **more}
                with pytest.raises(psycopg.OperationalError) as caught:
                    psycopg.connect(make_conninfo(dsn, **given))
                assert REFUSED.search(str(caught.value))
    [[verifier]] = database.rows("SELECT rolpassword FROM pg_authid WHERE rolname = 'postgres'")
    assert database.server.password not in verifier


def test_another_account_gets_into_no_server_of_the_tests(
    database: Database, stranger: str, nobody: Account, psql: Path
) -> None:
    assert_closed(database.server, nobody, psql, "postgres", stranger)


def test_another_account_gets_through_no_pooler(
    database: Database, nobody: Account, psql: Path
) -> None:
    with pooler_of(database, "session") as pooler:
        for dsn in (pooler.dsn, make_conninfo(pooler.dsn, dbname="pgbouncer")):
            done = as_nobody(nobody, psql, "-Xw", "-d", dsn, "-c", "SELECT 1")
            assert done.returncode == 2, done.stdout
            assert REFUSED.search(done.stderr), done.stderr


def test_another_account_gets_into_no_server_with_tls(nobody: Account, psql: Path) -> None:
    with tls_server() as secure:
        assert_closed(secure.server, nobody, psql, "postgres", "trusted", "certified", "scram")


@pytest.mark.thorough
def test_the_demo_is_open_to_who_started_it_alone(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What `--keep` prints can be pasted; the config that it leaves works as well."""
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "ingestd", "demo", "--keep", "--no-spark"]
    log = tmp_path / "output"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, "--seconds", "5", "--path", str(folder)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**module_environment(), "COLUMNS": "1000"},
            cwd=tmp_path,
        ) as demo,
    ):
        try:

            def kept() -> str | None:
                found = re.search(r"(?m)^Postgres runs until Ctrl-C: (.*)$", log.read_text())
                assert demo.poll() is None, log.read_text()
                return None if found is None else found.group(1)

            await_until(lambda: kept() is not None, LIMIT_S, log.read_text)
            line = kept()
            assert line is not None
            query = [*shlex.split(line), "-XAtc", "SELECT count(*) > 0 FROM customers"]
            done = subprocess.run(query, capture_output=True, text=True, check=False)
            assert done.stdout == "t\n", done.stderr
            check = [sys.executable, "-m", "ingestd", "check", "-c", str(folder / "ingestd.toml")]
            done = subprocess.run(
                check, capture_output=True, text=True, check=False, env=module_environment()
            )
            assert done.returncode == 0, done.stdout + done.stderr
            if os.geteuid() == 0:
                nobody, psql = map(request.getfixturevalue, ("nobody", "psql"))
                done = as_nobody(nobody, psql, "-Xw", *query[1:])
                assert (done.returncode, done.stdout) == (2, "")
                assert "Permission denied" in done.stderr
                own = int(str(conninfo_to_dict(query[1])["port"]))
                for port in {own, *listening(demo.pid)}:
                    done = as_nobody(
                        nobody, psql, "-Xw", "-d", f"host=127.0.0.1 port={port} user=postgres"
                    )
                    assert (done.returncode, done.stdout) == (2, "")
                    # Not even a server that would ask for a password.
                    assert not REFUSED.search(done.stderr), done.stderr
                    assert port != own or "Connection refused" in done.stderr, done.stderr
            secret = Path(str(conninfo_to_dict(query[1])["passfile"])).read_text()
            secret = secret.rpartition(":")[2].strip()
            for path in (log, *folder.rglob("*")):
                assert not path.is_file() or secret.encode() not in path.read_bytes(), path
        finally:
            demo.send_signal(signal.SIGTERM)
    assert demo.returncode == 0


def listening(pid: int) -> list[int]:
    """Ports that a process or its descendants listen on (Linux)."""
    pids, found = [pid], []
    for each in pids:
        pids += children_of(each)
        for link in Path(f"/proc/{each}/fd").glob("*"):
            try:
                name = link.readlink().name
            except OSError:
                continue
            found += re.findall(r"^socket:\[(\d+)\]$", name)
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    own = [row[1] for row in rows if row[3] == "0A" and row[9] in found]
    return [int(address.rpartition(":")[2], 16) for address in own]
