"""Finds or starts the keeper of this Spark driver's snapshots.

There is one keeper per JVM: Spark's planning processes are short-lived and have different parents.
Its address is in a file named after the JVM, which only this user can read.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ingestd.model.errors import OperatorError
from ingestd.postgres.connection.dsn import read_dsn
from ingestd.process.file_creation import create, make_private_folder
from ingestd.process.python_command import python_command
from spark_jobs.source.keeper_protocol import KeeperAddress
from spark_jobs.source.lease import is_there

_START_LIMIT_S = 60.0
_ANY_PORT = 5432
"""No data is sent: the port is only needed to look up a route."""


def keeper_of(jvm_pid: int, host: str) -> KeeperAddress:
    """Return the keeper of the process `jvm_pid` that listens on `host`; start it if necessary.

    Raises OperatorError if it does not start.
    """
    folder = _own_folder()
    name = f"{jvm_pid}-{_started(jvm_pid)}-{host.replace(':', '_')}"
    path, lock = folder / f"keeper-{name}.json", folder / f"keeper-{name}.lock"
    with _locked(lock):
        if path.exists():
            found = KeeperAddress(host, **json.loads(path.read_text()))
            if is_there(found):
                return found
        found = _start(jvm_pid, host, path, lock)
        path.unlink(missing_ok=True)
        create(path, json.dumps({"port": found.port, "token": found.token}))
    return found


def jvm_pid() -> int:
    """Return the pid of this Python worker's JVM: its parent, or the parent of pyspark's daemon."""
    parent = os.getppid()
    return _parent(parent) if "pyspark.daemon" in _command(parent) else parent


def listening_host(dsn: str) -> str:
    """Return the address of this machine at which executors can reach it.

    That is the address set for Spark (SPARK_LOCAL_IP, or by its operator for Kubernetes), else the
    local address of the route to the source, which executors must reach, too.
    """
    for name in ("SPARK_LOCAL_IP", "SPARK_DRIVER_BIND_ADDRESS"):
        if os.environ.get(name):
            return os.environ[name]
    host = str(read_dsn(dsn).get("host") or "")
    if not host or host.startswith(("/", "@")):
        return "127.0.0.1"
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host.split(",", maxsplit=1)[0], _ANY_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _import_path() -> list[str]:
    """Return this driver's import path, without the directory that it was started in."""
    own = str(Path(__file__).parents[2])
    here = str(Path.cwd())
    found = (path for path in sys.path if Path(path).is_absolute())
    return [path for path in found if path == own or path != here]


def _start(jvm_pid: int, host: str, *files: Path) -> KeeperAddress:
    command = python_command("-m", "spark_jobs.source.keeper", host, str(jvm_pid))
    command += map(str, files)
    # In a separate session: a Ctrl-C at the driver must not end it.
    process = subprocess.Popen(  # noqa: S603 - this Python, our module
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(_import_path())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        line = process.stdout.readline()
    if not line:
        process.wait(_START_LIMIT_S)
        raise OperatorError(
            f"the keeper of snapshots did not start on {host} (exit code {process.returncode})",
            remedy="run `python -m spark_jobs.source.keeper HOST PID` to see why, on the driver's "
            "machine; set another address of it with the option keeper_host",
        )
    return KeeperAddress(host, **json.loads(line))


def _own_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"ingestd-{os.getuid()}"
    try:
        make_private_folder(folder)
    except OSError as error:
        raise OperatorError(
            f"{folder}: {error.strerror}", remedy="remove it, or set TMPDIR"
        ) from error
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _command(pid: int) -> str:
    return _process_field(pid, "cmdline", "command").replace("\0", " ")


def _parent(pid: int) -> int:
    status = _process_field(pid, "stat", "ppid")
    # The name in parentheses may contain blanks; state and parent follow it.
    return int(status.rpartition(")")[2].split()[1] if ")" in status else status)


def _started(pid: int) -> str:
    """Return the start time of a process, to distinguish processes that reuse a pid."""
    status = _process_field(pid, "stat", "lstart")
    if ")" in status:
        return status.rpartition(")")[2].split()[19]
    return "".join(c for c in status if c.isalnum())


def _process_field(pid: int, file: str, column: str) -> str:
    """Return a field of a process from /proc, or from ps if /proc does not exist."""
    path = Path(f"/proc/{pid}/{file}")
    if path.exists():
        return path.read_text(errors="replace")
    done = subprocess.run(  # noqa: S603 - ps of the system
        ["ps", "-o", f"{column}=", "-p", str(pid)],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()
