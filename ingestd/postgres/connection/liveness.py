"""Connections that detect a dead peer.

TCP detects an unreachable host (`session.DEFAULTS`). It does not if an intermediary acknowledges
what is sent but forwards nothing: a proxy, a load balancer, a tunnel. So if an answer takes long, a
second connection asks the server for the state of the session::

    it works (or waits for a lock, a disk)     keep waiting; ask again later
    it waits for us, or does not exist         no answer will come, unless data still arrives
                                               (a large row, slowly): cut the connection
    the server can't be reached                the same, after several attempts
    another server answers (a balancer's)      it knows nothing of the session: as if it worked

An answer may take hours (a slot waits for old transactions, a backlog is decoded), so a time limit
would not do. Source: PostgreSQL documentation, "The Cumulative Statistics System", wait events.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import Any, LiteralString, Protocol, TypeVar

import psycopg
import structlog
from psycopg import AsyncConnection, sql
from psycopg.abc import PQGen

from ingestd.postgres.connection.answer_size import LimitedConnection
from ingestd.postgres.connection.pinned_settings import SETTINGS, pinning
from ingestd.postgres.connection.refusals import OF_A_SERVER
from ingestd.postgres.connection.server_messages import loggable_message, server_text
from ingestd.process.tasks import cancel_all

# Everything is qualified: names are resolved before the statement itself pins `search_path`.
SERVER: LiteralString = """
(extract(epoch FROM pg_catalog.pg_postmaster_start_time())
 OPERATOR(pg_catalog.*) 1000000)::pg_catalog.int8,
pg_catalog.concat(pg_catalog.inet_server_addr(), ':', pg_catalog.inet_server_port()),
(extract(epoch FROM pg_catalog.clock_timestamp()) OPERATOR(pg_catalog.*) 1000000)::pg_catalog.int8
"""
"""The fields of a `ServerInstance`, as columns."""
# A walsender that has sent everything waits in its main loop ('Activity'), other sessions for us
# ('Client'). Two other waits are also 'Client': a walsender on a standby that creates a slot waits
# for WAL from its primary; an advancing slot waits for synchronized_standby_slots (17+).
_SESSION: LiteralString = f"""
(SELECT coalesce(wait_event_type OPERATOR(pg_catalog.=) ANY (ARRAY['Activity', 'Client'])
                 AND wait_event OPERATOR(pg_catalog.<>) 'WaitForStandbyConfirmation', false)
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_replication_slots
                         WHERE active_pid OPERATOR(pg_catalog.=) pid
                           AND confirmed_flush_lsn IS NULL)
   FROM pg_catalog.pg_stat_activity WHERE pid OPERATOR(pg_catalog.=) {{}}), {SERVER}
"""  # noqa: S608 - a constant
_TCP_INFO = struct.Struct("@52xI")
"""From Linux' struct tcp_info: only tcpi_last_data_recv, in milliseconds."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LivenessPolicy:
    """How long an answer may take until a peer is probed, and until it counts as dead.

    `silent_s`: how long an answer may take before a second connection asks for the session's state;
    `again_s`: the interval at which it asks again. `probes`: how many times in a row the server
    must be unreachable. `probe_interval_s`: delay between the starts of two probes; all end
    together, this long after the last start. `in_flight_s`: how long an answer may be in flight
    after the session has started to wait for us. `ask_after_s`: the silence of a stream after which
    the server is asked for a reply.
    """

    silent_s: float = 7.0
    again_s: float = 10.0
    probes: int = 3
    probe_interval_s: float = 4.0
    in_flight_s: float = 1.0
    ask_after_s: float = 5.0


class _Doing(Enum):
    WORKING = auto()
    WAITING = auto()
    AWAY = auto()


@dataclass(frozen=True, slots=True)
class ServerInstance:
    """The server that answered: its start time, its own address and port, its current time."""

    started_us: int
    place: str
    now_us: int

    def is_another(self, instance: ServerInstance) -> bool:
        """Return whether `instance`, queried later, is another server, not this one restarted.

        Servers in containers may share an address and port; a server may have several addresses.
        """
        if instance.started_us == self.started_us:
            return False
        return instance.place != self.place or instance.started_us < self.now_us


class ConnectionUser(Protocol):
    """An object that uses resources which the connection frees when it is closed."""

    def release(self) -> None:
        """Stop using them before returning, in any thread. Idempotent."""
        ...


class LivenessCheckedConnection(LimitedConnection):
    """A connection that is cut when no answer can be expected any more.

    Call `watch` right after connecting. `why_lost`: why it was cut; empty if it was not.
    """

    liveness = LivenessPolicy()
    _borrower: ConnectionUser | None = None

    _elsewhere: Mapping[str, Any] | None = None
    _pid = 0
    _server: ServerInstance | None = None
    _is_warned = False
    why_lost = ""

    def watch(self, parameters: Mapping[str, Any]) -> None:
        """Set the parameters for a second connection to the same server; the address is known."""
        left_out = ("options", "replication", "autocommit", "prepare_threshold")
        kept = {k: v for k, v in parameters.items() if k not in left_out}
        info = self.info
        kept |= {"host": info.host, "port": info.port}
        kept.pop("hostaddr", None)
        if info.hostaddr:
            kept["hostaddr"] = info.hostaddr
        self._elsewhere = kept
        self._pid = info.backend_pid

    def is_session(self, pid: int, server: ServerInstance) -> None:
        """Set the backend pid and server of the session: a pooler reports different ones."""
        self._pid = pid
        self._server = server

    def lend(self, borrower: ConnectionUser) -> None:
        """Release `borrower` before this connection is closed. Its predecessor is released now."""
        if self._borrower is not None:
            self._borrower.release()
        self._borrower = borrower

    async def close(self) -> None:
        """Close the connection, after releasing its borrower."""
        if self._borrower is not None:
            self._borrower.release()
            self._borrower = None
        await super().close()

    async def wait(self, gen: PQGen[_T], *args: Any, **kwargs: Any) -> _T:  # noqa: ANN401
        """Wait as psycopg does, for every query and every row."""
        with self.expecting():
            return await super().wait(gen, *args, **kwargs)

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """Watch the wait for an answer inside. Raises psycopg.OperationalError if cut."""
        loop = asyncio.get_running_loop()
        doubting: list[asyncio.Task[None]] = []
        timer = loop.call_later(
            self.liveness.silent_s, lambda: doubting.append(loop.create_task(self._doubt()))
        )
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
            await asyncio.sleep(self.liveness.again_s)
            doing = await self._looked_at()
        found = (
            "a second connection can't reach the server either"
            if doing is _Doing.AWAY
            else "the server is not working on it"
        )
        self.cut(f"no answer arrives, and {found}: the connection is lost")

    def cut(self, why: str) -> None:
        """Shut the connection down as lost. `why`: raised to the caller that awaits an answer."""
        self.why_lost = self.why_lost or why
        with contextlib.suppress(OSError, psycopg.Error), self._socket() as end:
            end.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _socket(self) -> Iterator[socket.socket]:
        """Yield libpq's socket without a new descriptor, of which none may be left.

        Raises OSError, psycopg.Error if it was closed meanwhile.
        """
        end = socket.socket(fileno=self.pgconn.socket)
        try:
            yield end
        finally:
            end.detach()

    async def _looked_at(self) -> _Doing:
        """Probe twice: an answer may be in flight, or arrive slowly."""
        for _ in range(2):
            doing = await self._probe_until_answered()
            if doing is not _Doing.WAITING:
                break
            await asyncio.sleep(self.liveness.in_flight_s)
        return _Doing.WORKING if self._heard_s() < self.liveness.silent_s else doing

    def _heard_s(self) -> float:
        """Return seconds since the kernel last received data; inf unless TCP on Linux."""
        if sys.platform != "linux":
            return inf
        try:
            with self._socket() as end:
                info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except (OSError, psycopg.Error):  # another kind of socket, or closed meanwhile
            return inf
        return float(_TCP_INFO.unpack(info)[0]) / 1000

    async def _probe_until_answered(self) -> _Doing:
        """Start several probes one after another: one may be refused, or take long."""
        count, interval_s = self.liveness.probes, self.liveness.probe_interval_s
        end_s = asyncio.get_running_loop().time() + count * interval_s
        probes = [asyncio.create_task(self._probe(n * interval_s, end_s)) for n in range(count)]
        try:
            for probe in asyncio.as_completed(probes):
                if (doing := await probe) is not _Doing.AWAY:
                    return doing
        finally:
            await cancel_all(*probes)
        return _Doing.AWAY

    async def _probe(self, after_s: float, end_s: float) -> _Doing:
        """Probe after `after_s`, until `end_s` by the loop's clock."""
        await asyncio.sleep(after_s)
        if self._elsewhere is None:
            return _Doing.WORKING
        try:
            async with asyncio.timeout_at(end_s):
                other = await LimitedConnection.connect(
                    **self._elsewhere, autocommit=True, prepare_threshold=None
                )
        except TimeoutError:
            return _Doing.AWAY
        except psycopg.OperationalError as error:
            # A server that explains why it refuses us is alive, and says nothing of the session.
            return _Doing.WORKING if OF_A_SERVER.search(server_text(error)) else _Doing.AWAY
        asking = asyncio.create_task(self.is_waiting_by(other))
        try:
            # A pooler without free sessions accepts the connection and lets it wait.
            left_s = max(self.liveness.in_flight_s, end_s - asyncio.get_running_loop().time())
            done, _ = await asyncio.wait({asking}, timeout=left_s)
            return _Doing.WAITING if done and asking.result() else _Doing.WORKING
        except psycopg.OperationalError:
            return _Doing.WORKING
        except psycopg.Error as error:
            self._warn_blind(error)
            return _Doing.WORKING
        finally:
            await other.close()  # first: psycopg waits for the end of a query that it cancels
            await cancel_all(asking)

    async def is_waiting_by(self, other: AsyncConnection[Any]) -> bool:
        """Return whether the session waits for its client or does not exist."""
        # For this statement only: a pooler may pass the session to other clients afterwards.
        query = pinning(SETTINGS, is_local=True) + sql.SQL(_SESSION).format(self._pid)
        row = await (await other.execute(query)).fetchone()
        assert row is not None
        _, _, waits, *server = row
        if self._server is not None and self._server.is_another(ServerInstance(*server)):
            return False
        return waits is None or bool(waits)

    def _warn_blind(self, error: psycopg.Error) -> None:
        """Log, once, that only a completely unreachable server will be detected."""
        if not self._is_warned:
            structlog.get_logger("ingestd").warning(
                "watch.refused",
                reason=loggable_message(error),
                remedy="GRANT SELECT ON pg_catalog.pg_stat_activity TO this role (the default)",
            )
        self._is_warned = True
