"""An S3 store on loopback that counts requests, and can be slow or faulty.

The server is a separate process: while deltalake waits for its store, it blocks other threads of
its process in places.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from typing import TYPE_CHECKING, Self
from urllib.parse import urlencode

import pyarrow.fs as pafs
from deltalake.fs import DeltaStorageHandler

if TYPE_CHECKING:
    from pathlib import Path

BUCKET = "lake"


class ObjectStoreServer:
    """A running server, as a context manager. `uri`: of a lake in it, empty at first."""

    def __init__(self) -> None:
        self._lakes = 0
        self._is_deltalakes = False
        self.port = 0

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.object_store_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self._endpoint = f"http://127.0.0.1:{self.port}"
        request = urllib.request.Request(f"{self._endpoint}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request).close()
        return self

    def freeze(self) -> None:
        """Answer nothing and accept no connection until `thaw`."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue."""
        self._process.send_signal(signal.SIGCONT)

    def __exit__(self, *_: object) -> None:
        self.thaw()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    @property
    def uri(self) -> str:
        return f"s3://{BUCKET}/some/prefix{self._lakes}"

    def begin_anew(self, *, by_deltalake: bool = False) -> None:
        """Make `uri` that of another lake, and forget the requests.

        `by_deltalake`: set an option that obstore does not support, so that deltalake does all I/O.
        """
        self._lakes += 1
        self._is_deltalakes = by_deltalake
        self.requests()

    @property
    def options(self) -> dict[str, str]:
        """The options to connect to it."""
        return {
            **({"user_agent": "ingestd"} if self._is_deltalakes else {}),
            "AWS_ENDPOINT_URL": self._endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "a secret",
        }

    @property
    def config(self) -> str:
        """The options as a section of the daemon's config."""
        return self.config_with()

    def config_with(self, **more: str) -> str:
        """Return that section with additional or other options."""
        options = {**self.options, **more}
        lines = (f"{key} = {json.dumps(value)}" for key, value in options.items())
        return "\n".join(["[lake.storage_options]", *lines])

    def delay(self, latency_s: float) -> None:
        """Delay each request by this time from now on."""
        self._steer("latency", s=latency_s)

    def refuse(self, method: str, path: str, times: int = 1) -> None:
        """Answer the next requests with `path` in their path by 503 SlowDown."""
        self._steer("fault", kind="refuse", method=method, path=path, times=times)

    def lose_answer(self, method: str, path: str, times: int = 1) -> None:
        """Execute the next such requests, but answer 500."""
        self._steer("fault", kind="lose", method=method, path=path, times=times)

    def hold(self, path: str, *, is_conflict: bool = False) -> None:
        """Answer the next put of such a commit by 500 or 409; `do_late` executes it."""
        kind = "hold_409" if is_conflict else "hold"
        self._steer("fault", kind=kind, method="PUT", path=path, times=1)

    def do_late(self) -> list[int]:
        """Execute what `hold` kept; return the status codes that no client receives."""
        return [int(code) for [code] in self._steer("late")]

    def forget_upload(self, path: str) -> None:
        """Answer the request that completes such a file's upload by 404 NoSuchUpload."""
        self._steer("fault", kind="forget", method="POST", path=path, times=1)

    def expire(self, method: str, path: str, times: int = 1) -> None:
        """Answer the next such requests by 403 ExpiredToken."""
        self._steer("fault", kind="expire", method=method, path=path, times=times)

    def break_down(self, method: str, path: str, times: int = 1) -> None:
        """Answer the next such requests by 500, and do nothing."""
        self._steer("fault", kind="break", method=method, path=path, times=times)

    def overwrite(self, times: int = 1) -> None:
        """Execute the next conditional puts of commits even if the file exists."""
        self._steer("fault", kind="overwrite", method="PUT", path="/", times=times)

    def know_no_conditions(self, times: int = 1) -> None:
        """Answer the next puts of commits by 501 NotImplemented."""
        self._steer("fault", kind="unknown", method="PUT", path="/", times=times)

    def recover(self) -> int:
        """Forget pending faults; return the number of faults since the last call."""
        [[came]] = self._steer("recover")
        return int(came)

    def faults_left(self) -> list[object]:
        """Return the pending faults."""
        return list(self._steer("faults"))

    def requests(self) -> Counter[str]:
        """Return the requests since the last call, by method (LIST: GET of a bucket)."""
        return Counter(method for method, _ in self._steer("requests"))

    def download(self, folder: Path) -> Path:
        """Copy the lake to a local folder, for readers of files."""
        folder.mkdir()
        pafs.copy_files("", str(folder), source_filesystem=self._files())
        # With a running daemon, a hint may name a checkpoint that is newer than the listing.
        for hint in folder.rglob("_last_checkpoint"):
            hint.unlink()
        return folder

    def upload(self, folder: Path) -> None:
        """Upload a local lake's files."""
        pafs.copy_files(str(folder), "", destination_filesystem=self._files())

    def _files(self) -> pafs.PyFileSystem:
        return pafs.PyFileSystem(DeltaStorageHandler(self.uri, self.options))

    def _steer(self, what: str, **query: object) -> list[list[str]]:
        with urllib.request.urlopen(f"{self._endpoint}/-/{what}?{urlencode(query)}") as answer:
            found: list[list[str]] = json.load(answer)
            return found
