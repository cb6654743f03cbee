"""A server for one test, which is removed with its data."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ingestd.testing.embedded.postgres import PostgresServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FAST = {"fsync": "off"}
"""Settings without durability, which a test's data does not need."""


@contextmanager
def running_server(
    bindir: Path, settings: Mapping[str, str] = FAST, *, password: str | None = None
) -> Iterator[PostgresServer]:
    """Run a server.

    `password`: see `PostgresServer`. Roles with LOGIN and no own password get the server's by
    `Database.execute` or `PostgresServer.share_password`.

    Its folder is not below tmp_path, which every pytest start closes to the server's account.
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
