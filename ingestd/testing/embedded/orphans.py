"""A guard that ends a child process with its parent, however the parent ends (even by SIGKILL)."""

from __future__ import annotations

import signal
import subprocess


class Guard:
    """A small shell that waits for this process to end and then signals `pid`.

    It reads from a pipe whose only writing end is in this process; the kernel closes that however
    the process ends. Call `release` when `pid` has ended, before the pid can be reused.
    """

    def __init__(self, pid: int, signum: signal.Signals) -> None:
        script = 'read -r _ || kill -"$2" "$1"'
        self._process = subprocess.Popen(  # noqa: S603 - fixed words
            ["/bin/sh", "-c", script, "guard", str(pid), str(int(signum))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        """End the guard without sending a signal. May be called twice."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
