"""A server with TLS and a certificate of the test's own CA."""

from __future__ import annotations

import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from psycopg.conninfo import make_conninfo

from ingestd.testing.embedded.accounts import account_for_server
from ingestd.testing.embedded.installations import find_bindirs
from ingestd.testing.embedded.postgres import PostgresServer
from tests.harness.certificates import Authority

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "db.example"
"""The host name in the server's certificate."""
PASSWORD = "geheim-17"
_AUTHENTICATION = """\
local all all scram-sha-256
host all postgres 127.0.0.1/32 scram-sha-256
host all trusted 127.0.0.1/32 scram-sha-256
hostssl all certified 127.0.0.1/32 cert
host all scram 127.0.0.1/32 scram-sha-256
"""


@dataclass(frozen=True)
class TlsServer:
    """A running server. `folder`: the files of `authority`."""

    server: PostgresServer
    authority: Authority
    folder: Path

    def dsn(self, dbname: str = "postgres", host: str = NAME, **parameters: str) -> str:
        """Return a DSN as for a remote server, which connects over loopback.

        By default it has the CA and the server's password, which is that of the role `trusted`.
        """
        given = {
            "user": "trusted",
            "sslrootcert": str(self.authority.cert),
            "passfile": str(self.server.passfile),
            **parameters,
        }
        return make_conninfo(
            host=host,
            hostaddr="127.0.0.1",
            port=self.server.port,
            dbname=dbname,
            **{name: value for name, value in given.items() if value},
        )


def _has_tls(bindir: Path) -> bool:
    done = subprocess.run(
        [str(bindir / "pg_config"), "--configure"], capture_output=True, text=True, check=True
    )
    return "openssl" in done.stdout


@contextmanager
def tls_server() -> Iterator[TlsServer]:
    """Run a server with a role for each authentication method, all with REPLICATION."""
    found = [path for path in find_bindirs() if (path / "pg_config").exists() and _has_tls(path)]
    assert found, "no PostgreSQL with TLS: apt install postgresql (those of wheels have none)"
    with tempfile.TemporaryDirectory(prefix="ingestd-tests-") as made:
        folder = Path(made)
        authority = Authority(folder)
        own = authority.sign("server", NAME)
        server = PostgresServer(folder / "data", bindir=found[0], settings={"fsync": "off"})
        try:
            server.start()
            for file, path in (("server.crt", own.cert), ("server.key", own.key)):
                _give(server, file, path)
            _give(server, "ca.crt", authority.cert)
            (server.data_dir / "pg_hba.conf").write_text(_AUTHENTICATION)
            server.settings |= {"ssl": "on", "ssl_ca_file": "ca.crt"}
            server.restart()
            with server.connect() as connection:
                for role in ("trusted", "certified", "scram"):
                    connection.execute(f"CREATE ROLE {role} LOGIN REPLICATION".encode())
                connection.execute(f"ALTER ROLE scram PASSWORD '{PASSWORD}'".encode())
            server.share_password()
            yield TlsServer(server, authority, folder)
        finally:
            server.remove()


def _give(server: PostgresServer, name: str, path: Path) -> None:
    """Copy a file into the server's folder, owned by the server's account."""
    copy = server.data_dir / name
    copy.touch(mode=0o600)
    copy.write_bytes(path.read_bytes())
    account = account_for_server()
    if account is not None:
        account.own(copy)
