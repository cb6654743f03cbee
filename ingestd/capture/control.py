"""The connection that holds the claim on a source, reads its catalog and changes what it has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.capture.advisory import claim_key
from ingestd.capture.faults import classify
from ingestd.capture.session import connect
from ingestd.errors import TransientError


class Control:
    """One source's control connection; made when first needed. `close` it always.

    `where` begins an error's text. Once it holds the claim it is not made anew: the claim went with
    it (I5).
    """

    def __init__(self, where: str, dsn: str) -> None:
        self._where = where
        self._dsn = dsn
        self._connection: AsyncConnection[Any] | None = None
        self._claimed = False

    async def connection(self) -> AsyncConnection[Any]:
        """Give the connection. Raises TransientError where the claim is gone with the last one."""
        self.ensure_claimed()
        if self._connection is None or self._connection.closed:
            with self.errors("connect"):
                self._connection = await connect(self._dsn)
        return self._connection

    async def claim(self, name: str, *, taken: str, remedy: str) -> None:
        """Take the session-level advisory lock of that name. Idempotent.

        Raises TransientError (``claimed``, with `taken` and `remedy`) while another has it.
        """
        connection = await self.connection()
        if self._claimed:
            return
        with self.errors("claim"):
            cursor = await connection.execute(
                "SELECT pg_catalog.pg_try_advisory_lock(%s)", (claim_key(name),)
            )
            row = await cursor.fetchone()
        if not (row and row[0]):
            raise TransientError(f"{self._where}: {taken}", reason="claimed", remedy=remedy)
        self._claimed = True

    async def release(self, name: str) -> None:
        """Let the claim of that name go now: a session that is closed has it for a moment more."""
        claimed, self._claimed = self._claimed, False
        if claimed and self._connection is not None:
            with contextlib.suppress(psycopg.Error):  # then it goes with the session
                await self._connection.execute(
                    "SELECT pg_catalog.pg_advisory_unlock(%s)", (claim_key(name),)
                )

    def ensure_claimed(self) -> None:
        """Raise TransientError if the claim was lost, as far as can be told without asking."""
        if self._claimed and (self._connection is None or self._connection.closed):
            raise self._lost()

    async def health(self) -> None:
        """Ask the server. Raises TransientError, OperatorError."""
        if self._connection is None or self._connection.closed:
            raise self._lost()
        with self.errors("health"):
            await self._connection.execute("SELECT")

    async def close(self) -> None:
        """Let the claim go. At any time, twice."""
        self._claimed = False
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    @contextlib.contextmanager
    def errors(self, doing: str) -> Iterator[None]:
        """Say what a fault of the source means: psycopg's errors become ours."""
        try:
            yield
        except psycopg.Error as error:
            raise classify(error, f"{self._where}, {doing}", self._dsn) from error

    def _lost(self) -> TransientError:
        return TransientError(
            f"{self._where}: the connection that holds the claim is gone",
            reason="connection_lost",
        )
