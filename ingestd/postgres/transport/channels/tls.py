"""Reading and writing the TLS session of a connection without libpq.

`connection/tls.py` decides whether a connection must be encrypted, and its server verified.

libpq returns its session (`PQsslStruct`), which is passed to the OpenSSL that libpq uses: its
functions are looked up where the linker found them for libpq. While libpq is idle, it has consumed
all decrypted bytes. A call decrypts one record and never waits: the session reads the socket
through libpq, which made it non-blocking. Calls keep the GIL. A walsender sends a record for each
message, and releasing the GIL for each would make the reader wait for other threads as often.

Source: PostgreSQL documentation, "Connection Status Functions", PQsslStruct; OpenSSL's manual,
SSL_read(3), SSL_get_error(3), SSL_set_read_ahead(3).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog
from psycopg import pq

from ingestd.postgres.connection.liveness import LivenessCheckedConnection
from ingestd.postgres.transport.channels.channel import LOW_WATER_BYTES, PIECE_BYTES, read_turn

_WANT_READ, _WANT_WRITE, _SYSCALL, _ZERO_RETURN = 2, 3, 5, 6
"""Return values of SSL_get_error; any other is a protocol fault."""
_UNEXPECTED_EOF = "unexpected eof while reading"
"""OpenSSL 3's reason for a connection that ended without close_notify."""
_Pointer = ctypes.c_void_p


class TlsChannel:
    """See `Channel`. `ssl`: the SSL object of `connection`.

    The connection releases the channel before it closes, because closing frees the object.
    """

    def __init__(self, connection: LivenessCheckedConnection, library: Library, ssl: int) -> None:
        self.wants_write = False
        self._library = library
        self._ssl = ssl
        self._owner: object = connection.pgconn  # frees the session
        self._socket = socket.socket(fileno=os.dup(connection.pgconn.socket))
        self._buffer = ctypes.create_string_buffer(PIECE_BYTES)
        self._address = ctypes.addressof(self._buffer)
        # An SSL object is used by one thread at a time. Not held while waiting for the network.
        self._lock = threading.Lock()
        self._fault: Exception | None = None
        connection.lend(self)
        # One system call for up to 16 kB of records instead of two per record. Arrived bytes are
        # always read completely, so that none remain in the buffer when libpq waits for the socket.
        self._had_read_ahead = library.get_read_ahead(ssl)
        library.set_read_ahead(ssl, 1)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._socket.fileno()

    def read(self) -> bytes:
        """Return the bytes that have arrived, decrypted."""
        with self._lock:
            nbytes = 0 if self._fault else self._fill()
            if self._fault and not nbytes:
                raise self._fault.with_traceback(None)
            return ctypes.string_at(self._address, nbytes)

    def _fill(self) -> int:
        read, ssl, address = self._library.read, self._ssl, self._address
        self._library.clear_errors()
        ctypes.set_errno(0)
        self.wants_write = False
        nbytes = 0
        while nbytes < PIECE_BYTES:
            found = read(ssl, address + nbytes, PIECE_BYTES - nbytes)
            if found <= 0:
                kind, self._fault = self._outcome(found)
                self.wants_write = kind == _WANT_WRITE
                break
            nbytes += found
        return nbytes

    def _outcome(self, error: int) -> tuple[int, Exception | None]:
        """Return what the last call, which did nothing, must wait for, or its fault."""
        errno = ctypes.get_errno()
        kind: int = self._library.get_error(self._ssl, error)
        if kind in {_WANT_READ, _WANT_WRITE}:
            return kind, None
        if kind == _SYSCALL and errno:
            return kind, OSError(errno, os.strerror(errno))
        reason = self._library.reason()
        if kind in {_ZERO_RETURN, _SYSCALL} or reason == _UNEXPECTED_EOF:
            return kind, EOFError()
        return kind, OSError(f"TLS: {reason}")

    def read_turn(self, limit_s: float) -> list[bytes]:
        """Read for a turn, woken when enough bytes have arrived."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, LOW_WATER_BYTES)
        try:
            return read_turn(self.read, self._wait, limit_s)
        finally:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)  # for the loop

    def _wait(self, limit_s: float) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self.wants_write else 0))
        poll.poll(limit_s * 1000)

    def write(self, data: bytes) -> int:
        """Write all or nothing. What was not accepted must be passed again unchanged."""
        with self._lock:
            if not self._ssl:
                raise EOFError
            self._library.clear_errors()
            ctypes.set_errno(0)
            sent: int = self._library.write(self._ssl, data, len(data))
            if sent > 0:
                return sent
            kind, fault = self._outcome(sent)
            if kind != _WANT_WRITE:  # the server may have reported why: its bytes are still read
                raise fault or OSError("TLS: the server asks for another handshake")
            return 0

    def release(self) -> None:
        """Stop using the session."""
        with self._lock:
            if self._ssl:
                self._library.set_read_ahead(self._ssl, self._had_read_ahead)
                self._ssl, self._owner, self._fault = 0, None, EOFError()

    def close(self) -> None:
        """Close the descriptor."""
        self._socket.close()


def tls_channel(connection: LivenessCheckedConnection) -> TlsChannel | None:
    """Return the channel of an encrypted connection; None if its session is unavailable."""
    library = _library()
    pointer = getattr(connection.pgconn, "pgconn_ptr", None)
    ssl = None if library is None or pointer is None else library.session(pointer, b"OpenSSL")
    return TlsChannel(connection, library, ssl) if library is not None and ssl else None


@dataclass(frozen=True, slots=True)
class Library:
    """Functions of libpq and of its OpenSSL."""

    session: Any
    read: Any
    write: Any
    get_error: Any
    get_read_ahead: Any
    set_read_ahead: Any
    clear_errors: Any
    first_error: Any
    reason_of: Any

    def reason(self) -> str:
        """Return OpenSSL's error text for this thread's last call."""
        words: bytes | None = self.reason_of(self.first_error())
        self.clear_errors()  # other users in this thread share the queue
        return words.decode("utf-8", "replace") if words else "protocol error"


_INT, _POINTER, _TEXT, _LONG = ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_ulong
FUNCTIONS: dict[str, tuple[str, Any, list[Any]]] = {
    "session": ("PQsslStruct", _POINTER, [_POINTER, _TEXT]),
    "read": ("SSL_read", _INT, [_POINTER, _POINTER, _INT]),
    "write": ("SSL_write", _INT, [_POINTER, _TEXT, _INT]),
    "get_error": ("SSL_get_error", _INT, [_POINTER, _INT]),
    "get_read_ahead": ("SSL_get_read_ahead", _INT, [_POINTER]),
    "set_read_ahead": ("SSL_set_read_ahead", None, [_POINTER, _INT]),
    "clear_errors": ("ERR_clear_error", None, []),
    "first_error": ("ERR_get_error", _LONG, []),
    "reason_of": ("ERR_reason_error_string", _TEXT, [_LONG]),
}


Functions = Mapping[str, tuple[str, Any, list[Any]]]


@functools.cache
def _library() -> Library | None:
    return usable_library()


def usable_library(functions: Functions = FUNCTIONS) -> Library | None:
    """Return the functions; None if one is missing, or may not be the one that libpq calls."""
    try:
        return find_library(functions)
    except (OSError, AttributeError) as error:
        structlog.get_logger("ingestd").debug("tls.read_by_libpq", reason=str(error))
        return None


def find_library(functions: Functions = FUNCTIONS) -> Library:
    """Resolve the functions. Raises OSError; AttributeError for a missing one."""
    own = ctypes.PyDLL(file_of_libpq(), use_errno=True)
    everywhere = ctypes.PyDLL(None)
    found = {}
    for field, (name, result, arguments) in functions.items():
        function = own[name]  # a new object, so its types affect no other user
        # The linker prefers functions of the program itself.
        other = getattr(everywhere, name, None)
        if other is not None and _address(other) != _address(function):
            msg = f"the process has two functions {name}"
            raise AttributeError(msg)
        function.restype, function.argtypes = result, arguments
        found[field] = function
    return Library(**found)


def _address(function: Any) -> int | None:  # noqa: ANN401 - ctypes' own type has no name
    return ctypes.cast(function, _Pointer).value


def file_of_libpq() -> str:
    """Return the file of libpq, or of the module that is linked to it."""
    module = sys.modules[pq.PGconn.__module__]
    if pq.__impl__ != "python":
        return str(module.__file__)
    return str(sys.modules["psycopg.pq._pq_ctypes"].pq._name)  # noqa: SLF001
