"""The connection that holds the claim on a source, reads its catalog and alters its objects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg
import structlog
from psycopg import AsyncConnection, generators

from ingestd.model.errors import IngestdError, TransientError
from ingestd.postgres.connection.claim import (
    BEAT_S,
    GIVES_UP_S,
    LEASE_S,
    end_session,
    release_claim,
    take_claim,
)
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.liveness import LivenessCheckedConnection
from ingestd.postgres.connection.server_messages import loggable_message
from ingestd.postgres.connection.session import connect
from ingestd.process.tasks import cancel_all

LOST = "claim_lost"
"""The reason when the claim may have passed to another daemon, or has."""
_SILENT = {"57P05", "25P03"}
"""Codes that end a silent session: idle_session_timeout, also in a transaction."""


class ControlConnection:
    """One source's control connection, opened when first needed. Always `close` it.

    `where` begins an error's text. A connection that has held the claim is not reopened: the claim
    was lost with it (I5).
    """

    def __init__(self, where: str, dsn: str) -> None:
        self._where = where
        self._dsn = dsn
        self._connection: LivenessCheckedConnection | None = None
        self._ended: asyncio.Future[IngestdError] | None = None  # of the claim, once there is one
        self._beating: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()
        self._answered = asyncio.Event()

    async def connection(self) -> AsyncConnection[Any]:
        """Return the connection. Raise the error that ended the claim, if it has ended."""
        self.ensure_claimed()
        if self._connection is None or self._connection.closed:
            with self.errors("connect"):
                self._connection = await connect(self._dsn, reads_names=True)
        return self._connection

    async def claim(self, name: str, *, taken: str, remedy: str) -> None:
        """Acquire the claim of that name, and end sessions that its last holder left. Idempotent.

        Raises TransientError (``claimed``, with `taken` and `remedy`) while another one holds it.
        """
        connection = await self.connection()
        if self._ended is not None:
            return
        with self.errors("claim"):
            found = await take_claim(connection, name)
        if found.holders:
            who = "; ".join(map(str, found.holders))
            raise TransientError(f"{self._where}: {taken} ({who})", reason="claimed", remedy=remedy)
        assert self._connection is not None
        self._ended = asyncio.get_running_loop().create_future()
        self._beating = asyncio.create_task(self._beat(self._connection, self._ended))
        for pid in found.left:
            await self._end(connection, pid)

    async def hold(self) -> None:
        """Wait until the claim is lost, and raise the reason. Safe to cancel."""
        assert self._ended is not None
        raise await asyncio.shield(self._ended)

    async def release(self) -> None:
        """Release the claim now: after a close the server keeps it for a moment."""
        ended, self._ended = self._ended, None
        await self._stop_beating()
        if ended is not None and self._connection is not None:
            with contextlib.suppress(psycopg.Error):  # then it ends with the session
                await release_claim(self._connection)

    def ensure_claimed(self) -> None:
        """Raise the error that ended the claim, if known. Sends nothing."""
        if self._ended is None:
            return
        if self._ended.done():
            raise self._ended.result()
        if self._connection is None or self._connection.closed:
            raise self._no_session()

    async def health(self) -> None:
        """Check that the server answers. Raises TransientError, OperatorError. Safe to cancel."""
        self.ensure_claimed()
        if self._ended is None:
            raise self._no_session()
        self._answered.clear()
        self._asked.set()
        answered = asyncio.create_task(self._answered.wait())
        try:
            both: list[asyncio.Future[Any]] = [answered, self._ended]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answered.cancel()
        self.ensure_claimed()

    async def close(self) -> None:
        """Release the claim. May be called at any time, and twice."""
        self._ended = None
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()  # first: a heartbeat may be waiting for its answer
        await self._stop_beating()

    @contextlib.contextmanager
    def errors(self, doing: str) -> Iterator[None]:
        """Convert psycopg's errors into the source's errors."""
        try:
            yield
        except psycopg.Error as error:
            fault = self._fault(error, doing)
            if isinstance(fault, TransientError) and fault.reason == LOST:
                self._set_ended(fault)
            raise fault from error

    async def _beat(
        self, connection: LivenessCheckedConnection, ended: asyncio.Future[Any]
    ) -> None:
        """Send heartbeats until the session has ended."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await self._asked.wait()
                is_requested = self._asked.is_set()
                self._asked.clear()
                if is_requested or not connection.lock.locked():  # a statement is a heartbeat
                    await _say_something(connection)
                    self._answered.set()
        except psycopg.Error as error:
            if not ended.done():
                ended.set_result(self._fault(error, "claim"))

    async def _end(self, connection: AsyncConnection[Any], pid: int) -> None:
        """End a session of the last holder, which keeps the slot, and log it."""
        log = structlog.get_logger("ingestd")
        source = self._where.removeprefix("source ")
        try:
            await end_session(connection, pid)
        except psycopg.errors.InsufficientPrivilege as error:
            remedy = f"SELECT pg_catalog.pg_terminate_backend({pid});  as a role that may"
            log.warning(
                "claim.not_ended",
                source=source,
                pid=pid,
                reason=loggable_message(error),
                remedy=remedy,
            )
        except psycopg.Error as error:
            raise self._fault(error, "claim") from error
        else:
            log.warning("claim.session_ended", source=source, pid=pid)

    async def _stop_beating(self) -> None:
        beating, self._beating = self._beating, None
        if beating is not None:
            await cancel_all(beating)

    def _set_ended(self, fault: IngestdError) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(fault)

    def _fault(self, error: psycopg.Error, doing: str) -> IngestdError:
        if self._ended is None:
            return classify(error, f"{self._where}, {doing}", self._dsn)
        if error.sqlstate in _SILENT:
            why = f"this daemon was silent for {LEASE_S:g} s, so the server ended its session"
        elif (why := "" if self._connection is None else self._connection.why_lost) == "":
            return classify(error, f"{self._where}, {doing}", self._dsn)
        return TransientError(
            f"{self._where}: the claim is lost: {why}",
            reason=LOST,
            remedy="none needed: the daemon claims the source again, or stands by for the new "
            "holder. If this recurs, find out why the process stalls, or what is wrong with the "
            "network",
        )

    def _no_session(self) -> TransientError:
        return TransientError(
            f"{self._where}: the connection that holds the claim is closed",
            reason="connection_lost",
        )


async def _say_something(connection: LivenessCheckedConnection) -> None:
    """Send an empty statement, which needs no snapshot and works in an aborted transaction.

    Raises psycopg.Error: from the server, or if no answer arrives within `GIVES_UP_S`.
    """
    loop = asyncio.get_running_loop()
    async with connection.lock:
        if connection.closed:  # psycopg closes it if a statement is cancelled without an answer
            connection.why_lost = connection.why_lost or "its connection ended in a statement"
            raise psycopg.OperationalError(connection.why_lost)
        why = f"its heartbeat got no answer for {GIVES_UP_S:g} s"
        timer = loop.call_later(GIVES_UP_S, connection.cut, why)
        try:
            connection.pgconn.send_query(b"")
            results = await connection.wait(generators.execute(connection.pgconn))
        finally:
            timer.cancel()
    for result in results:
        if result.status == psycopg.pq.ExecStatus.FATAL_ERROR:
            raise psycopg.errors.error_from_result(result)
