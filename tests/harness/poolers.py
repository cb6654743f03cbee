"""A PgBouncer between a test and its server."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from psycopg import OperationalError, connect
from psycopg.conninfo import make_conninfo

from ingestd.testing.embedded.accounts import account_for_server
from ingestd.testing.embedded.ports import free_port
from ingestd.testing.embedded.postgres import SUPERUSER
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness.certificates import Certified
    from tests.harness.databases import Database

LIMIT_S = 15.0
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Pooler:
    """A running PgBouncer. `dsn` connects through it to the test's database."""

    dsn: str


@contextmanager
def pooler_of(
    database: Database,
    mode: Literal["session", "transaction", "statement"],
    *,
    ignored: str = "extra_float_digits",
    pool_size: int = 20,
    user: str | None = None,
    certified: Certified | None = None,
) -> Iterator[Pooler]:
    """Run a PgBouncer for this database. `ignored`: startup parameters that it ignores.

    With `certified` it accepts only TLS.
    """
    program = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")
    if program is None:
        pytest.fail("no pgbouncer: apt install pgbouncer (.ci/run does), or brew install pgbouncer")
    account = account_for_server()
    port = free_port()
    role = user or SUPERUSER
    with tempfile.TemporaryDirectory(prefix="ingestd-tests-") as made:
        folder = Path(made)
        config = folder / "pgbouncer.ini"
        config.write_text(
            f"""\
[databases]
{database.name} = host={HOST} port={database.server.port}
[pgbouncer]
listen_addr = {HOST}
listen_port = {port}
unix_socket_dir =
auth_type = scram-sha-256
auth_file = {folder}/users
pool_mode = {mode}
default_pool_size = {pool_size}
ignore_startup_parameters = {ignored}
logfile = {folder}/log
"""
        )
        if certified is not None:
            with config.open("a") as file:
                file.write("client_tls_sslmode = require\n")
                for name, path in (("key", certified.key), ("cert", certified.cert)):
                    (folder / name).write_bytes(path.read_bytes())
                    file.write(f"client_tls_{name}_file = {folder}/{name}\n")
        (folder / "users").write_text(f'"{role}" "{database.server.password}"\n')
        if account is not None:
            account.own(folder)  # a folder that only this account may enter
        process = subprocess.Popen(
            [program, str(config)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **({} if account is None else account.popen_arguments()),
        )
        dsn = make_conninfo(database.dsn, host=HOST, port=port, user=role)

        def answers() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            try:
                connect(dsn).close()  # not by the tests' own connect: PgBouncer accepts no options
            except OperationalError:
                return False
            return True

        try:
            await_until(answers, LIMIT_S, "pgbouncer to answer")
            yield Pooler(dsn)
        finally:
            process.kill()
            process.wait()
