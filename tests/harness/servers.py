"""A server of a test's own, and nothing left of it."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ingestd.testing.embedded.postgres import PostgresServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FAST = {"fsync": "off"}
"""What is lost with the machine is lost with the test."""


@contextmanager
def running_server(
    bindir: Path, settings: Mapping[str, str] = FAST, *, password: str | None = None
) -> Iterator[PostgresServer]:
    """Run one.

    `password`: see `PostgresServer`; roles that log in without one of their own are given the
    server's by `Database.execute`, or by `PostgresServer.share_password`.

    Not below tmp_path: each pytest that starts closes that folder to the server's own account.
    """
    with tempfile.TemporaryDirectory(prefix="ingestd-tests-") as folder:
        server = PostgresServer(
            Path(folder) / "data", bindir=bindir, settings=settings, password=password
        )
        try:
            with server:
                yield server
        finally:
            server.remove()
