"""The process next to a Spark driver that holds its queries' snapshots.

``python -m spark_jobs.source.keeper HOST JVM_PID [FILE...]`` prints its port and token, and ends
when that process ends. It then removes the files, which contained its address. See
`spark_jobs.source.exported_snapshot` for its purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg

from ingestd.model.errors import IngestdError, OperatorError, TransientError
from spark_jobs.source.exported_snapshot import HeldSnapshot, IdlePolicy
from spark_jobs.source.filtered_splits import FilteredLoads
from spark_jobs.source.keeper_protocol import (
    GREETING_BYTES,
    MAX_LINE_BYTES,
    NONCE_BYTES,
    Talk,
    failure,
    from_text,
    new_nonce,
    to_text,
)
from spark_jobs.source.read_plan import ReadPlan, count_partitions, source_error

KNOWN_PLANS = 1000
"""A plan contains the description of its table: a few kB."""
KNOWN_OVER = 10_000
"""Number of ended executions to remember."""
AUTHENTICATION_LIMIT_S = 10.0
_BACKLOG = 512
_RETRY_S = 0.1
_WATCH_S = 1.0


class SnapshotKeeper:
    """Plans, and the snapshots of their executions. Call all methods from one event loop."""

    def __init__(self, policy: IdlePolicy | None = None) -> None:
        self._policy = policy or IdlePolicy()
        self._plans: OrderedDict[str, tuple[ReadPlan, str, int]] = OrderedDict()
        self._held: dict[tuple[str, str], HeldSnapshot] = {}
        self._over: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._holding: set[asyncio.Task[None]] = set()
        self._filtered = FilteredLoads()

    async def plan(self, plan: ReadPlan) -> tuple[str, int]:
        """Store a plan; return its id and the number of its partitions. Raises IngestdError."""
        self._filtered.planned(plan)
        dsn = plan.source.settings.dsn.get_secret_value()  # type: ignore[attr-defined] # all kinds
        try:
            count = await count_partitions(plan, dsn)
        except psycopg.Error as error:
            raise source_error(error, plan, dsn) from error
        plan_id = uuid4().hex
        self._plans[plan_id] = plan, dsn, count
        while len(self._plans) > KNOWN_PLANS:
            self._plans.popitem(last=False)
        return plan_id, count

    async def lease(
        self, plan_id: str, execution: str | None, partition: int
    ) -> tuple[HeldSnapshot, Any]:
        """Return the execution's snapshot, and what the partition reads; must be `released`.

        An execution without a number (a DataFrame's `rdd`) is identified by its plan. Raises
        IngestdError.
        """
        if plan_id not in self._plans:
            raise OperatorError(
                "this DataFrame was planned by a keeper of snapshots that has ended",
                remedy="load() the table again",
            )
        plan, dsn, count = self._plans[plan_id]
        name = f"plan {plan_id}" if execution is None else execution
        if (name, plan_id) in self._over:
            raise _over(plan, is_numbered=execution is not None)
        self._filtered.executed(plan_id, plan, name)
        held = self._held.get((dsn, name))
        if held is None:
            held = self._held[dsn, name] = HeldSnapshot(
                dsn, plan.idle_s, plan.limit_s, self._is_crowded, self._policy
            )
            task = asyncio.create_task(self._hold(held, dsn, name))
            self._holding.add(task)
            task.add_done_callback(self._holding.discard)
        held.leases += 1
        try:
            return held, await held.grant(plan_id, plan, count, partition)
        except BaseException:
            held.released(plan_id, partition, is_read=False)
            raise

    async def checked(self, held: HeldSnapshot, plan_id: str) -> dict[str, Any]:
        """Check that a task has read from the snapshot's files. Raises IngestdError."""
        plan, _, _ = self._plans[plan_id]
        await held.ensure_unreplaced(plan)
        return {}

    def _is_crowded(self) -> bool:
        return len(self._held) > self._policy.most

    async def _hold(self, held: HeldSnapshot, dsn: str, name: str) -> None:
        try:
            await held.until_over()
        finally:
            del self._held[dsn, name]
            for plan_id in held.plans:
                self._over[name, plan_id] = None
            while len(self._over) > KNOWN_OVER:
                self._over.popitem(last=False)
            await held.close()


def _over(plan: ReadPlan, *, is_numbered: bool) -> IngestdError:
    table = plan.source.table.id
    if not is_numbered:
        return OperatorError(
            f"table {table}: read outside of an SQL execution of Spark's (df.rdd), whose snapshot "
            "has ended",
            remedy="load() the table again, or raise the option snapshot_idle",
        )
    return TransientError(
        f"table {table}: the snapshot that this query read has ended, but a part of the table "
        "is read again or late",
        reason="snapshot_gone",
        remedy="run the query again; if it waits long between its parts, raise the option "
        "snapshot_idle (or snapshot_limit)",
    )


class _KeeperConnection:
    """A connection to a reader."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, talk: Talk
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._talk = talk

    async def say(self, value: dict[str, Any]) -> None:
        self._writer.write(self._talk.line(value))
        await self._writer.drain()

    async def heard(self) -> dict[str, Any] | None:
        return self._talk.heard(await self._reader.readline())


class KeeperServer:
    """Answers the processes of one Spark application.

    Any process that reaches the port can connect. Until a connection is authenticated, it has a few
    bytes of memory, `authentication_limit_s` of time, and is closed if it is the oldest of more
    than `most_strangers`. A reader needs a round trip for it, so even if all of a large cluster's
    tasks start together, few are in this state.
    """

    def __init__(
        self,
        keeper: SnapshotKeeper,
        token: str,
        *,
        authentication_limit_s: float = AUTHENTICATION_LIMIT_S,
        most_strangers: int = 256,
    ) -> None:
        self._authentication_limit_s = authentication_limit_s
        self._most_strangers = most_strangers
        self._keeper = keeper
        self._token = token
        self._strangers: dict[asyncio.Task[None], None] = {}
        """Connections that are not authenticated, the oldest first."""
        self._serving: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Accept and answer connections until cancelled."""
        loop = asyncio.get_running_loop()
        listener.settimeout(0)
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # the peer left, or no file descriptor is left
                await asyncio.sleep(_RETRY_S)
                continue
            task = asyncio.create_task(self._serve(connection))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
            self._strangers[task] = None
            task.add_done_callback(self._authenticated)
            if len(self._strangers) > self._most_strangers:
                oldest = next(iter(self._strangers))
                self._authenticated(oldest)
                oldest.cancel()
            await asyncio.sleep(0)  # accepting may not wait at all

    def _authenticated(self, task: asyncio.Task[None]) -> None:
        self._strangers.pop(task, None)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                talk = await self._greeted(connection)
                if talk is not None:
                    await self._serve_own(connection, talk)
            except (OSError, ValueError):
                pass  # the peer left, or is not ours

    async def _greeted(self, connection: socket.socket) -> Talk | None:
        """Exchange nonces and greetings; return None if the peer has not the token."""
        loop = asyncio.get_running_loop()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(self._authentication_limit_s):
            mine = new_nonce()
            await loop.sock_sendall(connection, f"{mine}\n".encode())
            theirs = (await _exactly(connection, NONCE_BYTES)).decode(errors="replace").strip()
            talk = Talk(self._token, (theirs, mine), is_keeper=True)
            await loop.sock_sendall(connection, talk.greeting())
            return talk if talk.heard(await _exactly(connection, GREETING_BYTES)) == {} else None

    async def _serve_own(self, connection: socket.socket, talk: Talk) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._authenticated(task)
        reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_LINE_BYTES)
        try:
            line = _KeeperConnection(reader, writer, talk)
            request = await line.heard()
            if request is not None:
                await self._answer(request, line)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, request: dict[str, Any], line: _KeeperConnection) -> None:
        match request["asks"]:
            case "there":
                await line.say({})
            case "plan":
                await line.say(await _answered(self._plan(request)))
            case "lease":
                await self._lease(request, line)

    async def _plan(self, request: dict[str, Any]) -> dict[str, Any]:
        plan_id, count = await self._keeper.plan(from_text(request["plan"]))
        return {"plan": plan_id, "count": count}

    async def _lease(self, request: dict[str, Any], line: _KeeperConnection) -> None:
        plan_id, partition = request["plan"], request["partition"]
        try:
            held, granted = await self._keeper.lease(plan_id, request["execution"], partition)
        except IngestdError as error:
            await line.say(failure(error))
            return
        is_read = False
        try:
            await line.say({"granted": to_text(granted)})
            # A task that ends early or dies closes the connection.
            if await line.heard() == {"asks": "read"}:
                answer = await _answered(self._keeper.checked(held, plan_id))
                is_read = "failed" not in answer
                await line.say(answer)
        finally:
            held.released(plan_id, partition, is_read=is_read)


async def _exactly(connection: socket.socket, nbytes: int) -> bytes:
    """Read so many bytes, never more. Raises OSError at the end of the stream."""
    loop = asyncio.get_running_loop()
    found = b""
    while len(found) < nbytes:
        piece = await loop.sock_recv(connection, nbytes - len(found))
        if not piece:
            raise ConnectionResetError
        found += piece
    return found


async def _answered(work: Any) -> dict[str, Any]:  # noqa: ANN401 - a coroutine of the above
    try:
        answer: dict[str, Any] = await work
    except IngestdError as error:
        return failure(error)
    return answer


async def _ended(pid: int) -> None:
    """Return when the process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, or it ended before
        while _is_running(pid):  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(_WATCH_S)
        return
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


async def _main(host: str, pid: int) -> None:
    token = secrets.token_hex(32)
    [(family, _, _, _, address), *_] = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    listener = socket.create_server(address, family=family, backlog=_BACKLOG)
    serving = asyncio.create_task(KeeperServer(SnapshotKeeper(), token).serve(listener))
    port = listener.getsockname()[1]
    sys.stdout.write(json.dumps({"port": port, "token": token}) + "\n")
    sys.stdout.flush()
    # The starter reads only one line: a full pipe must never block this process.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    ended = asyncio.create_task(_ended(pid))
    await asyncio.wait([ended, serving], return_when=asyncio.FIRST_COMPLETED)


if __name__ == "__main__":
    try:
        asyncio.run(_main(sys.argv[1], int(sys.argv[2])))
    finally:
        for file in sys.argv[3:]:
            Path(file).unlink(missing_ok=True)
