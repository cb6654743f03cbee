"""Builds pgoutput messages, and lays them out as a transport would."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

UNCHANGED = object()
Value = bytes | None | object
"""None is null; UNCHANGED an unchanged TOAST value."""


def begin(lsn: int, *, ts: int = 0, xid: int = 7) -> bytes:
    return struct.pack(">cQqI", b"B", lsn, ts, xid)


def commit(lsn: int, end: int, *, ts: int = 0) -> bytes:
    return struct.pack(">cBQQq", b"C", 0, lsn, end, ts)


def relation(
    oid: int,
    name: str,
    columns: Sequence[tuple[str, int, int, bool]],
    *,
    schema: str = "public",
    identity: str = "d",
) -> bytes:
    """Columns are (name, type oid, typmod, part of the identity)."""
    out = [b"R", struct.pack(">I", oid), schema.encode(), b"\0", name.encode(), b"\0"]
    out.append(struct.pack(">ch", identity.encode(), len(columns)))
    for column, type_oid, typmod, key in columns:
        out += [bytes([key]), column.encode(), b"\0", struct.pack(">Ii", type_oid, typmod)]
    return b"".join(out)


def tuple_data(values: Sequence[Value]) -> bytes:
    out = [struct.pack(">h", len(values))]
    for value in values:
        if value is None:
            out.append(b"n")
        elif isinstance(value, bytes):
            out += [b"t", struct.pack(">i", len(value)), value]
        else:
            out.append(b"u")
    return b"".join(out)


def insert(oid: int, new: Sequence[Value]) -> bytes:
    return struct.pack(">cI", b"I", oid) + b"N" + tuple_data(new)


def update(
    oid: int,
    new: Sequence[Value],
    old: Sequence[Value] | None = None,
    kind: Literal["K", "O"] = "K",
) -> bytes:
    before = b"" if old is None else kind.encode() + tuple_data(old)
    return struct.pack(">cI", b"U", oid) + before + b"N" + tuple_data(new)


def delete(oid: int, old: Sequence[Value], kind: Literal["K", "O"] = "K") -> bytes:
    return struct.pack(">cI", b"D", oid) + kind.encode() + tuple_data(old)


def truncate(*oids: int) -> bytes:
    return struct.pack(f">ciB{len(oids)}I", b"T", len(oids), 0, *oids)


def laid_out(
    messages: Sequence[bytes], gap: bytes = b"w" * 25
) -> tuple[bytes, NDArray[np.int64], NDArray[np.int64]]:
    """Join messages with something else between them: buffer, starts, ends."""
    lengths = np.array([len(m) for m in messages], np.int64)
    ends = np.cumsum(lengths + len(gap))
    return b"".join(gap + m for m in messages), ends - lengths, ends
