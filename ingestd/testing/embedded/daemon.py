"""The real daemon as a child process."""

from __future__ import annotations

import atexit
import http.client
import json
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ingestd.config.units import Address
from ingestd.http.client import fetch_status
from ingestd.process.file_creation import append, replace
from ingestd.process.python_command import module_environment, python_command
from ingestd.testing.embedded.orphans import Guard
from ingestd.testing.embedded.ports import free_port
from ingestd.testing.embedded.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

READY_LIMIT_S = 90.0
TERM_LIMIT_S = 15.0
_TAIL_CHARS = 4000

__all__ = ["Daemon", "DaemonEndedError", "module_environment"]


class DaemonEndedError(Exception):
    """The daemon ended while a caller waited for it; the text has the end of its log."""


class Daemon:
    """`ingestd run --config FILE` in `folder`, which holds its config and its log.

    `config`: TOML without `[http]` and `[log]`, which are added (a free loopback port, JSON).
    `environment`: added to this process's; may be changed between two starts. The daemon can be
    started again after any end, and continues the same log file. It always ends with this process.
    `program`: the command of which `run` is a part.
    """

    def __init__(
        self, folder: Path, config: str, *, environment: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.config_path = self.folder / "ingestd.toml"
        self.log_path = self.folder / "ingestd.log"
        self.listen = Address("127.0.0.1", free_port())
        self.write_config(config)
        self.environment = dict(environment or {})
        self.program: tuple[str, ...] = tuple(python_command("-m", "ingestd"))
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None
        self._started_at_byte = 0
        atexit.register(self.close)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- running -----------------------------------------------------------------------------

    def write_config(self, config: str) -> None:
        """Write the config for the next `start`."""
        rim = f'[http]\nlisten = "{self.listen}"\n\n[log]\nformat = "json"\n'
        replace(self.config_path, f"{config.strip()}\n\n{rim}")

    def start(self, *arguments: str) -> None:
        """Start the daemon without waiting."""
        if self.is_running:
            return
        self._forget()
        with append(self.log_path) as log:
            self._started_at_byte = log.tell()
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [*self.program, "run", "--config", self.config_path.name, *arguments],
                cwd=self.folder,
                env={
                    **module_environment(),
                    "STATE_DIRECTORY": str(self.folder),  # holds the command token
                    **self.environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._guard = Guard(self._process.pid, signal.SIGKILL)

    def start_ready(self, limit_s: float = READY_LIMIT_S) -> None:
        """Start the daemon and wait until it delivers changes."""
        self.start()
        self.await_ready(limit_s)

    def await_ready(self, limit_s: float = READY_LIMIT_S) -> None:
        """Wait until /readyz returns 200. Raise DaemonEndedError, or TimeoutError with the log."""
        await_until(self._is_ready_or_dead, limit_s, lambda: f"the daemon's /readyz\n{self.tail()}")

    def sigterm(self, limit_s: float = TERM_LIMIT_S) -> int:
        """Send SIGTERM and return the exit code. Kill it and raise TimeoutError at `limit_s`."""
        process = self._running()
        process.terminate()
        return self.await_end(limit_s)

    def sighup(self) -> None:
        """Send SIGHUP, so that the daemon re-reads its config; don't wait for that."""
        self._running().send_signal(signal.SIGHUP)

    def sigkill(self) -> None:
        """Kill the daemon at once."""
        process = self._running()
        process.kill()
        process.wait()
        self._forget()

    def await_end(self, limit_s: float = TERM_LIMIT_S) -> int:
        """Wait until the daemon ends; return its exit code."""
        process = self._running()
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            tail = self.tail()
            self.close()
            msg = f"the daemon did not end within {limit_s:g} s\n{tail}"
            raise TimeoutError(msg) from None
        self._forget()
        return code

    def close(self) -> None:
        """Kill the daemon if it runs. May be called twice; the daemon may be started again."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._forget()

    # --- asking ------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Return whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        return self._running().pid

    def get(self, path: str) -> tuple[int, str] | None:
        """Send GET to its HTTP server; return status code and body, None without an answer."""
        connection = http.client.HTTPConnection(self.listen.host, self.listen.port, timeout=2)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        except (OSError, http.client.HTTPException):
            return None  # not up yet, or ended
        finally:
            connection.close()

    def status(self) -> dict[str, Any] | None:
        """Return its /status; None while it does not answer."""
        return fetch_status(self.listen)

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the events logged since the first start, oldest first, or those of one name."""
        found = []
        for line in self._log().splitlines():
            if line.startswith("{") and line.endswith("}"):
                event = json.loads(line)
                if name is None or event.get("event") == name:
                    found.append(event)
        return found

    def tail(self) -> str:
        """Return the end of the log since the last start."""
        return self._log(self._started_at_byte)[-_TAIL_CHARS:]

    # --- inside ------------------------------------------------------------------------------

    def _is_ready_or_dead(self) -> bool:
        if not self.is_running:
            code = None if self._process is None else self._process.returncode
            msg = f"the daemon ended with {code} before it was ready\n{self.tail()}"
            raise DaemonEndedError(msg)
        answer = self.get("/readyz")
        return answer is not None and answer[0] == http.client.OK

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            msg = "the daemon was not started"
            raise DaemonEndedError(msg)
        return self._process

    def _log(self, offset: int = 0) -> str:
        if not self.log_path.exists():
            return ""
        return self.log_path.read_bytes()[offset:].decode(errors="replace")

    def _forget(self) -> None:
        if self._guard is not None:
            self._guard.release()
            self._guard = None
        self._process = None
