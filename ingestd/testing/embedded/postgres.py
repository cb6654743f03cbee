"""A private Postgres server, for the demo, the tests and the benchmarks.

It listens only on 127.0.0.1 and on a unix socket, requires the password, and is set up for logical
replication.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import psycopg
from psycopg.conninfo import make_conninfo

from ingestd.model.errors import OperatorError
from ingestd.process.file_creation import append, create
from ingestd.testing.embedded.accounts import Account, account_for_server, open_way
from ingestd.testing.embedded.installations import find_bindirs, reachable_bindir
from ingestd.testing.embedded.orphans import Guard
from ingestd.testing.embedded.passwords import (
    passfile_password,
    passfile_text,
    random_password,
    scram_verifier,
)
from ingestd.testing.embedded.ports import free_port
from ingestd.testing.embedded.processes import children_of, is_running
from ingestd.testing.embedded.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

SUPERUSER = "postgres"
START_LIMIT_S = 60.0
STOP_LIMIT_S = 30.0
_PORT_TRIES = 5

DEFAULTS: Mapping[str, str] = {
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    "max_connections": "100",
    "listen_addresses": "127.0.0.1",
    "log_min_messages": "warning",
    "log_line_prefix": "%m [%p] ",
    "logging_collector": "off",
    "lc_messages": "C",
    "timezone": "UTC",
}
_SHARE_VERIFIER = """
UPDATE pg_catalog.pg_authid
   SET rolpassword = (SELECT rolpassword FROM pg_catalog.pg_authid WHERE rolname = current_user)
 WHERE rolcanlogin AND rolpassword IS NULL
"""  # a verifier does not depend on the role's name
_STOP_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class PostgresServer:
    """A server in `data_dir`, which the first `start` creates.

    `bindir`: folder of initdb and postgres, by default the first of `find_bindirs`. `settings`:
    override `DEFAULTS` in postgresql.conf at every start, and may be changed between two starts.
    `password`: of the superuser. If None it is random, and every DSN names the file in `data_dir`
    that contains it (``passfile``). Only root and the account that runs the server may read that
    file, and no DSN, argument or log contains the password. A base backup has that file as well.

    Postgres refuses to run as root; then the server runs as another account, and the folders are
    created so that it can reach them. Use the server as a context manager, or call `start` and
    `close`; it always ends with this process. Methods raise OperatorError with the end of the log.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        bindir: Path | None = None,
        settings: Mapping[str, str] | None = None,
        password: str | None = None,
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.settings: dict[str, str] = dict(settings or {})
        self.port = 0
        self._chosen_password = password
        self._account: Account | None = account_for_server()
        self._scratch = Path(tempfile.mkdtemp(prefix="pg-", dir=_short_temp_dir()))
        if self._account is not None:
            self._account.own(self._scratch)
        self._bindir = reachable_bindir(
            _first_bindir() if bindir is None else bindir.absolute(), self._account, self._scratch
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None
        atexit.register(self.close)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- asking ------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Return whether the postmaster is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The postmaster's process id. Raises OperatorError if it does not run."""
        if self._process is None:
            raise _failure(self, "does not run")
        return self._process.pid

    @property
    def major(self) -> int:
        """The major version of the server."""
        return int((self.data_dir / "PG_VERSION").read_text(encoding="ascii"))

    @property
    def log_path(self) -> Path:
        """The path of the server's log."""
        return self.data_dir / "server.log"

    def program(self, name: str) -> Path:
        """Return the path of a client program of the same version, such as ``pg_recvlogical``."""
        path = self._bindir / name
        if not path.exists():
            raise _failure(self, f"has no program {name}")
        return path

    @property
    def passfile(self) -> Path:
        """The path of the file with the password, in libpq's format."""
        return self.data_dir / "passfile"

    @property
    def password(self) -> str:
        """The superuser's password."""
        return passfile_password(self.passfile.read_text(encoding="utf-8"))

    def dsn(
        self, dbname: str = "postgres", *, user: str | None = None, socket: bool = False
    ) -> str:
        """Return the connection string: TCP on 127.0.0.1, or the unix `socket`.

        Without TCP it is always the socket. The string names the `passfile`; see `share_password`
        for users other than the superuser. A chosen password is in the superuser's DSN and in no
        other.
        """
        name = user or SUPERUSER
        secret = self._chosen_password
        has_tcp = bool({**DEFAULTS, **self.settings}["listen_addresses"])
        return make_conninfo(
            host=str(self._scratch) if socket or not has_tcp else "127.0.0.1",
            port=self.port,
            user=name,
            dbname=dbname,
            password=secret if name == SUPERUSER else None,
            passfile=str(self.passfile) if secret is None else None,
        )

    def connect(
        self, dbname: str = "postgres", *, autocommit: bool = True
    ) -> psycopg.Connection[tuple[Any, ...]]:
        """Connect as superuser."""
        return psycopg.connect(self.dsn(dbname), autocommit=autocommit, connect_timeout=10)

    def share_password(self) -> None:
        """Set the superuser's password for every role that may log in and has none."""
        with self.connect() as connection:
            connection.execute(_SHARE_VERIFIER)

    def psql(self, sql: str, dbname: str = "postgres") -> str:
        """Run `sql` with psql; return its unaligned output. Raise OperatorError."""
        dsn = make_conninfo(self.dsn(dbname), password=None, passfile=str(self.passfile))
        command = [self.program("psql"), "-XAtq", "-v", "ON_ERROR_STOP=1", "-d", dsn]
        done = subprocess.run(  # noqa: S603 - our own program
            [*map(str, command), "-c", sql], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise _failure(self, f"psql failed: {done.stderr.strip()}")
        return done.stdout

    # --- running -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the server, created first if necessary; return when it accepts connections."""
        if self.is_running:
            return
        if not (self.data_dir / "PG_VERSION").exists():
            self._initialise()
        if self.port:
            self._launch()
            return
        for attempt in range(_PORT_TRIES):
            self.port = free_port()
            try:
                self._launch()
            except OperatorError as error:
                taken = "could not bind" in str(error) and attempt + 1 < _PORT_TRIES
                self.port = 0
                if not taken:
                    raise
            else:
                return

    def stop(
        self, mode: Literal["fast", "immediate"] = "fast", *, limit_s: float = STOP_LIMIT_S
    ) -> None:
        """Stop the server; ``immediate`` skips the checkpoint. Kill it after `limit_s`."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(_STOP_SIGNALS[mode])
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                self.kill()
        self._forget()

    def kill(self) -> None:
        """Kill the postmaster and its children with SIGKILL, as in a crash of the machine."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGSTOP)  # so that it starts no more children
            children = children_of(process.pid)
            process.kill()
            process.wait()
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await_until(
                lambda: not any(map(is_running, children)), STOP_LIMIT_S, "the backends to end"
            )
        self._forget()

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop and start on the same port, with the current `settings`."""
        self.stop(mode)
        self.start()

    def close(self) -> None:
        """Stop the server and remove its socket folder; keep the data. May be called twice."""
        atexit.unregister(self.close)
        self.stop("immediate", limit_s=5.0)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def remove(self) -> None:
        """Close the server and remove its data."""
        self.close()
        shutil.rmtree(self.data_dir, ignore_errors=True)

    # --- inside ------------------------------------------------------------------------------

    def _initialise(self) -> None:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        if self._account is not None:
            open_way(self.data_dir.parent, self._account)
            self._account.own(self.data_dir)
        command: list[str | Path] = [self._bindir / "initdb", "-D", self.data_dir, "-U", SUPERUSER]
        command += ["-E", "UTF8", "--locale=C", "--no-sync", "--auth=scram-sha-256"]
        password = self._chosen_password or random_password()
        # A random password can't be guessed, so it needs no slow verifier, which would delay each
        # connection.
        known = self._chosen_password or scram_verifier(password, iterations=1)
        command += ["--pwfile", self._write_secret(self._scratch / "password", known + "\n")]
        done = self._run(command)
        if done.returncode:
            raise _failure(self, f"initdb failed: {done.stdout.decode(errors='replace').strip()}")
        self._write_secret(self.passfile, passfile_text(password))

    def _write_secret(self, path: Path, text: str) -> Path:
        """Create a file that only root and the server's account may read."""
        create(path, text)
        if self._account is not None:
            self._account.own(path)
        return path

    def _configure(self) -> None:
        """Write postgresql.conf again; unlike options (-c), ALTER SYSTEM can override it."""
        settings = {
            **DEFAULTS,
            "port": str(self.port),
            "unix_socket_directories": str(self._scratch),
            **self.settings,
        }
        lines = [
            f"{name} = '{value.replace(chr(39), chr(39) * 2)}'" for name, value in settings.items()
        ]
        path = self.data_dir / "postgresql.conf"
        path.unlink(missing_ok=True)
        self._write_secret(path, "\n".join(lines) + "\n")

    def _launch(self) -> None:
        self._configure()
        with append(self.log_path) as log:
            if self._account is not None:  # a base backup reads it too
                os.fchown(log.fileno(), self._account.uid, self._account.gid)
            offset = log.tell()
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [str(self._bindir / "postgres"), "-D", str(self.data_dir)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd="/",
                **self._identity(),
            )
        self._guard = Guard(self._process.pid, signal.SIGQUIT)
        try:
            await_until(self._answers, START_LIMIT_S, "the server to take connections")
        except (TimeoutError, ChildProcessError) as error:
            self.kill()
            raise _failure(self, f"did not start: {error}", log_from=offset) from error
        except BaseException:
            self.kill()
            raise

    def _answers(self) -> bool:
        if not self.is_running:
            code = None if self._process is None else self._process.returncode
            msg = f"postgres ended with {code}"
            raise ChildProcessError(msg)
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def _forget(self) -> None:
        self._process = None
        if self._guard is not None:
            self._guard.release()
            self._guard = None

    def _identity(self) -> dict[str, Any]:
        return {} if self._account is None else self._account.popen_arguments()

    def _run(self, command: Sequence[str | Path]) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(  # noqa: S603 - our own program
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            cwd="/",
            **self._identity(),
        )


def _failure(server: PostgresServer, what: str, *, log_from: int | None = None) -> OperatorError:
    text = f"Postgres in {server.data_dir} {what}"
    if log_from is not None and server.log_path.exists():
        tail = server.log_path.read_bytes()[log_from:][-2000:].decode(errors="replace").strip()
        text = f"{text}\n{tail}"
    return OperatorError(text)


def _first_bindir() -> Path:
    found = find_bindirs()
    if not found:
        what = "no PostgreSQL server programs found"
        raise OperatorError(what, remedy="pip install 'ingestd[demo]', or apt install postgresql")
    return found[0]


def _short_temp_dir() -> str:
    """Return a temporary folder short enough for a socket's path (limit 107 bytes on Linux)."""
    usual = tempfile.gettempdir()
    return usual if len(usual) < 60 else "/tmp"  # noqa: S108,PLR2004 - mkdtemp below it is safe
