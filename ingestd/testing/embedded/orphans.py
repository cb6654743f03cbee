"""No process outlives the one that started it, however that one ends (SIGKILL included)."""

from __future__ import annotations

import signal
import subprocess


class Guard:
    """A small shell that waits for this process to end and then signals `pid`.

    It holds the reading end of a pipe whose only writing end is here: the kernel closes that at any
    kind of end. `release` it when `pid` has ended by itself, before the pid can be given out again.
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
        """End the guard without a signal to anyone. Twice is fine."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
