"""Connections that notice when nobody is at the other end any more.

TCP tells of a host that is away (`session.DEFAULTS`). It does not where something between takes and
acknowledges what is sent, but passes nothing on: a proxy, a load balancer, a tunnel. So whoever
waits for an answer for long has another connection ask the server what the session does::

    it works (or waits for a lock, a disk)     go on waiting; ask again later
    it waits for us, or is not there           its answer will never come, unless data still comes
                                               (a large row, slowly): the connection is cut
    the server can't be reached                the same

An answer may take hours (a slot waits for old transactions, a backlog is decoded), so no limit of
time would do. Source: PostgreSQL documentation, "The Cumulative Statistics System", wait events.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from math import inf
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg.abc import PQGen

SILENT_S = 10.0
"""How long an answer may take before it is asked elsewhere what the session does."""
AGAIN_S = 10.0
"""How long until that is asked again."""
LOOK_LIMIT_S = 6
"""How long the server may take to say it; libpq counts whole seconds."""
ON_ITS_WAY_S = 1.0
"""How long an answer may be on its way when the session waits for us already."""

# A walsender that has sent all waits in its main loop ('Activity'), others for us ('Client').
_SESSION = """
SELECT wait_event_type IN ('Activity', 'Client')
  FROM pg_catalog.pg_stat_activity WHERE pid = %s
"""
_TCP_INFO = struct.Struct("@52xI")
"""Of Linux' struct tcp_info only tcpi_last_data_recv, in milliseconds."""
_T = TypeVar("_T")


class _Doing(Enum):
    WORKING = auto()
    WAITING = auto()
    AWAY = auto()


class WatchedConnection(AsyncConnection[Any]):
    """A connection that is cut when an answer can't be expected any more.

    `watch` it as soon as it is made. `why_lost`: why it was cut, empty if it was not.
    """

    _elsewhere: Mapping[str, Any] | None = None
    _pid = 0
    why_lost = ""

    def watch(self, parameters: Mapping[str, Any]) -> None:
        """Take what another connection to the same server is made with, beside its address."""
        left_out = ("options", "replication", "autocommit", "prepare_threshold")
        kept = {k: v for k, v in parameters.items() if k not in left_out}
        info = self.info
        kept |= {"host": info.host, "port": info.port, "connect_timeout": LOOK_LIMIT_S}
        kept.pop("hostaddr", None)
        if info.hostaddr:
            kept["hostaddr"] = info.hostaddr
        self._elsewhere = kept
        self._pid = info.backend_pid

    def is_session(self, pid: int) -> None:
        """Take which process of the server it is: a pooler tells another."""
        self._pid = pid

    async def wait(self, gen: PQGen[_T], *args: Any, **kwargs: Any) -> _T:  # noqa: ANN401
        """Wait as psycopg does, for every query and every row."""
        with self.expecting():
            return await super().wait(gen, *args, **kwargs)

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """Have the server's answer awaited inside. Raises psycopg.OperationalError if cut."""
        loop = asyncio.get_running_loop()
        doubting: list[asyncio.Task[None]] = []
        timer = loop.call_later(SILENT_S, lambda: doubting.append(loop.create_task(self._doubt())))
        try:
            yield
        except psycopg.OperationalError as error:
            if self.why_lost:
                raise psycopg.OperationalError(self.why_lost) from error
            raise
        finally:
            timer.cancel()
            for task in doubting:
                task.cancel()
        if self.why_lost:
            raise psycopg.OperationalError(self.why_lost)

    async def _doubt(self) -> None:
        doing = await self._looked_at()
        while doing is _Doing.WORKING:
            await asyncio.sleep(AGAIN_S)
            doing = await self._looked_at()
        found = (
            "the server can't be reached by another connection either"
            if doing is _Doing.AWAY
            else "the server does not work on it"
        )
        self.why_lost = f"no answer comes, and {found}: the connection is lost"
        with contextlib.suppress(OSError, psycopg.Error):  # closed meanwhile
            end = socket.socket(fileno=os.dup(self.pgconn.socket))
            with contextlib.closing(end):
                end.shutdown(socket.SHUT_RDWR)

    async def _looked_at(self) -> _Doing:
        """Look twice: an answer may be on its way, or come slowly."""
        for _ in range(2):
            doing = await self._look()
            if doing is not _Doing.WAITING:
                return doing
            await asyncio.sleep(ON_ITS_WAY_S)
        return _Doing.WORKING if self._heard_s() < SILENT_S else _Doing.WAITING

    def _heard_s(self) -> float:
        """How long ago the system last got data for it, where it can tell: of TCP."""
        try:
            with contextlib.closing(socket.socket(fileno=os.dup(self.pgconn.socket))) as end:
                told = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except (OSError, psycopg.Error):  # another kind of socket, or closed meanwhile
            return inf
        return float(_TCP_INFO.unpack(told)[0]) / 1000

    async def _look(self) -> _Doing:
        if self._elsewhere is None:
            return _Doing.WORKING
        try:
            other = await AsyncConnection.connect(
                **self._elsewhere, autocommit=True, prepare_threshold=None
            )
        except psycopg.OperationalError as error:
            # Whoever says why it refuses us is there, and says nothing of the session.
            return _Doing.WORKING if "FATAL" in str(error) else _Doing.AWAY
        asking = asyncio.create_task(_is_waiting(other, self._pid))
        try:
            done, _ = await asyncio.wait({asking}, timeout=LOOK_LIMIT_S)
            # A pooler whose sessions are all taken lets us connect, and wait.
            return _Doing.WAITING if done and asking.result() else _Doing.WORKING
        except psycopg.OperationalError:
            return _Doing.WORKING
        finally:
            await other.close()  # first: psycopg waits for the end of a query that it cancels
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


async def _is_waiting(connection: AsyncConnection[Any], pid: int) -> bool:
    """Whether the session waits for its client, or is not there."""
    row = await (await connection.execute(_SESSION, (pid,))).fetchone()
    return row is None or bool(row[0])
