"""Requests from planning and tasks to the keeper of snapshots. Blocking; from any process."""

from __future__ import annotations

import io
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ingestd.model.errors import TransientError
from spark_jobs.source.exported_snapshot import Granted
from spark_jobs.source.keeper_protocol import (
    GREETING_BYTES,
    MAX_LINE_BYTES,
    NONCE_BYTES,
    KeeperAddress,
    Talk,
    from_text,
    new_nonce,
    raise_failure,
    to_text,
)
from spark_jobs.source.read_plan import ReadPlan

CONNECT_LIMIT_S = 10.0
ANSWER_LIMIT_S = 120.0
"""A snapshot may wait for a table that is being altered."""


class Lease:
    """A partition being read. `granted`: what to read; call `finish` after that."""

    def __init__(self, line: _LeaseConnection, granted: Granted) -> None:
        self._line = line
        self.granted = granted

    def confirm_complete(self) -> None:
        """Report that everything needed was read. Raises IngestdError if the result is void."""
        self._line.say({"asks": "read"})
        raise_failure(self._line.answer())


def register(keeper: KeeperAddress, plan: ReadPlan) -> tuple[str, int]:
    """Register a plan; return its id and number of partitions. Raises IngestdError."""
    with _asked(keeper, {"asks": "plan", "plan": to_text(plan)}) as (_, answer):
        return answer["plan"], answer["count"]


@contextmanager
def leased(
    keeper: KeeperAddress, plan_id: str, execution: str | None, partition: int
) -> Iterator[Lease]:
    """Hold the execution's snapshot while a partition is read. Raises IngestdError."""
    request = {
        "asks": "lease",
        "plan": plan_id,
        "execution": execution,
        "partition": partition,
    }
    with _asked(keeper, request) as (line, answer):
        yield Lease(line, from_text(answer["granted"]))


def is_there(keeper: KeeperAddress) -> bool:
    """Return whether the keeper answers and is this application's."""
    try:
        with _asked(keeper, {"asks": "there"}):
            return True
    except TransientError:
        return False


class _LeaseConnection:
    """A connection to the keeper. Raises TransientError when it is lost."""

    def __init__(
        self, connection: socket.socket, file: io.BufferedReader, token: str, where: str
    ) -> None:
        self._connection = connection
        self._file = file
        self._where = where
        mine = new_nonce()
        self._send(f"{mine}\n".encode())
        nonces = mine, self._read_line(NONCE_BYTES).decode(errors="replace").strip()
        self._talk = Talk(token, nonces, is_keeper=False)
        self._ensure_signed(self._talk.heard(self._read_line(GREETING_BYTES)))
        self._send(self._talk.greeting())

    def say(self, value: dict[str, Any]) -> None:
        self._send(self._talk.line(value))

    def answer(self) -> dict[str, Any]:
        return self._ensure_signed(self._talk.heard(self._read_line(MAX_LINE_BYTES)))

    def _ensure_signed(self, answer: dict[str, Any] | None) -> dict[str, Any]:
        if answer is None:
            raise _unreachable(self._where, "the server there is not the keeper")
        return answer

    def _read_line(self, most_bytes: int) -> bytes:
        try:
            line = self._file.readline(most_bytes)
        except OSError as error:
            raise _unreachable(self._where, error) from error
        if not line:
            raise _unreachable(self._where, "it closed the connection")
        return line

    def _send(self, text: bytes) -> None:
        try:
            self._connection.sendall(text)
        except OSError as error:
            raise _unreachable(self._where, error) from error


@contextmanager
def _asked(
    keeper: KeeperAddress, request: dict[str, Any]
) -> Iterator[tuple[_LeaseConnection, dict[str, Any]]]:
    where = f"{keeper.host}:{keeper.port}"
    try:
        connection = socket.create_connection((keeper.host, keeper.port), CONNECT_LIMIT_S)
    except OSError as error:
        raise _unreachable(where, error) from error
    with connection, connection.makefile("rb") as file:
        connection.settimeout(ANSWER_LIMIT_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = _LeaseConnection(connection, file, keeper.token, where)
        line.say(request)
        answer = line.answer()
        raise_failure(answer)
        yield line, answer


def _unreachable(where: str, error: object) -> TransientError:
    return TransientError(
        f"the keeper of this query's snapshot, on the driver's machine at {where}, is unreachable: "
        f"{error}",
        reason="keeper_unreachable",
        remedy="executors must reach the driver there (the option keeper_host names another "
        "address of it); if the driver was restarted, load() the table again",
    )
