"""An S3 store on loopback, that counts requests and can be slow or at fault.

The server is a process of its own: deltalake waits for its store without letting the other threads
of its process go on everywhere.
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
    """A running server, from `with` to its end. `uri`: of a lake in it, empty at first."""

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
        """Answer nothing, and take no connection, until `thaw`."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Go on."""
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
        """Let `uri` be another lake's, and forget the requests.

        `by_deltalake`: with an option that obstore is not given, so all goes through deltalake.
        """
        self._lakes += 1
        self._is_deltalakes = by_deltalake
        self.requests()

    @property
    def options(self) -> dict[str, str]:
        """What is needed to reach it."""
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
        """The same, with more options or others."""
        options = {**self.options, **more}
        lines = (f"{key} = {json.dumps(value)}" for key, value in options.items())
        return "\n".join(["[lake.storage_options]", *lines])

    def delay(self, latency_s: float) -> None:
        """Let each request take so much longer from now on."""
        self._steer("latency", s=latency_s)

    def refuse(self, method: str, path: str, times: int = 1) -> None:
        """Answer the next requests with `path` in their path by 503 SlowDown."""
        self._steer("fault", kind="refuse", method=method, path=path, times=times)

    def lose_answer(self, method: str, path: str, times: int = 1) -> None:
        """Do what the next such requests want, but answer 500."""
        self._steer("fault", kind="lose", method=method, path=path, times=times)

    def hold(self, path: str, *, is_conflict: bool = False) -> None:
        """Answer the next put of such a commit by 500, or 409; do it when `do_late` says so."""
        kind = "hold_409" if is_conflict else "hold"
        self._steer("fault", kind=kind, method="PUT", path=path, times=1)

    def do_late(self) -> list[int]:
        """Do what `hold` kept; give what is answered to nobody."""
        return [int(code) for [code] in self._steer("late")]

    def forget_upload(self, path: str) -> None:
        """Answer what would end such a file's upload by 404 NoSuchUpload."""
        self._steer("fault", kind="forget", method="POST", path=path, times=1)

    def expire(self, method: str, path: str, times: int = 1) -> None:
        """Answer the next such requests by 403 ExpiredToken."""
        self._steer("fault", kind="expire", method=method, path=path, times=times)

    def break_down(self, method: str, path: str, times: int = 1) -> None:
        """Answer the next such requests by 500, and do nothing."""
        self._steer("fault", kind="break", method=method, path=path, times=times)

    def overwrite(self, times: int = 1) -> None:
        """Do the next puts of commits that are refused where there is one, whatever is there."""
        self._steer("fault", kind="overwrite", method="PUT", path="/", times=times)

    def know_no_conditions(self, times: int = 1) -> None:
        """Answer the next puts of commits by 501 NotImplemented."""
        self._steer("fault", kind="unknown", method="PUT", path="/", times=times)

    def recover(self) -> int:
        """Forget the faults that are still to come; give how many have been since the last time."""
        [[came]] = self._steer("recover")
        return int(came)

    def faults_left(self) -> list[object]:
        """What of `refuse` and `lose_answer` has not come to pass."""
        return list(self._steer("faults"))

    def requests(self) -> Counter[str]:
        """How many there were since this was asked last, by method (LIST: GET of a bucket)."""
        return Counter(method for method, _ in self._steer("requests"))

    def download(self, folder: Path) -> Path:
        """Copy the lake to a local folder, where whatever reads files can read it."""
        folder.mkdir()
        pafs.copy_files("", str(folder), source_filesystem=self._files())
        # While a daemon runs, a hint may be copied that names a checkpoint of after the listing.
        for hint in folder.rglob("_last_checkpoint"):
            hint.unlink()
        return folder

    def upload(self, folder: Path) -> None:
        """Put a local lake's files there."""
        pafs.copy_files(str(folder), "", destination_filesystem=self._files())

    def _files(self) -> pafs.PyFileSystem:
        return pafs.PyFileSystem(DeltaStorageHandler(self.uri, self.options))

    def _steer(self, what: str, **query: object) -> list[list[str]]:
        with urllib.request.urlopen(f"{self._endpoint}/-/{what}?{urlencode(query)}") as answer:
            found: list[list[str]] = json.load(answer)
            return found
