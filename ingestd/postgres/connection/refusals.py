"""The SQLSTATE of a refused connection, whatever the language of the message.

While connecting, libpq does not expose an error's code, only its text, which is in the server's
language (`lc_messages`). Its trace contains the code: if the text is not recognized, the connection
is attempted once more with a trace. Source: PostgreSQL documentation, "Control Functions", PQtrace.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo
from psycopg.errors import lookup

from ingestd.postgres.connection.server_messages import server_text

OF_A_SERVER = re.compile(r"\w:  \S")
"""Severity and message of a server error as libpq writes them, in any language and without a code:
separated by two spaces, which libpq's own messages never have."""
_CODE = re.compile(rb'ErrorResponse\b.*? C "([0-9A-Z]{5})"')
_LIMIT_S = 5.0
"""The server has just answered, so it is reachable."""


async def named(error: psycopg.Error, parameters: Mapping[str, Any]) -> psycopg.Error:
    """Return a connection error with its code, if it is the server's and the code is available.

    `parameters`: those of the attempted connection.
    """
    if error.sqlstate is not None or not OF_A_SERVER.search(server_text(error)):
        return error
    if sys.platform != "linux":  # psycopg traces only there
        return error
    with contextlib.suppress(TimeoutError, OSError, psycopg.Error, KeyError):
        async with asyncio.timeout(_LIMIT_S):
            return lookup(await _code_of_refusal(make_conninfo(**parameters)))(server_text(error))
    return error


async def _code_of_refusal(conninfo: str) -> str:
    """Connect, and return the code of the last error; empty if there is none."""
    trace = os.memfd_create("trace")  # may contain a password: keep it in memory only
    try:
        connection = pq.PGconn.connect_start(conninfo.encode())
        try:
            connection.trace(trace)
            while (step := connection.connect_poll()) not in {
                pq.PollingStatus.OK,
                pq.PollingStatus.FAILED,
            }:
                await _ready(connection.socket, reads=step == pq.PollingStatus.READING)
            connection.untrace()
        finally:
            connection.finish()
        size = os.fstat(trace).st_size
        found = _CODE.findall(os.pread(trace, size, 0))
    finally:
        os.close(trace)
    return found[-1].decode() if found else ""


async def _ready(socket: int, *, reads: bool) -> None:
    """Wait until the socket is readable or writable."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    add, remove = (
        (loop.add_reader, loop.remove_reader) if reads else (loop.add_writer, loop.remove_writer)
    )
    add(socket, ready.set)
    try:
        await ready.wait()
    finally:
        remove(socket)
