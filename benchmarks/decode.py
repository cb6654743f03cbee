"""How fast pgoutput becomes typed Arrow batches on one core: `python -m benchmarks.decode`.

The messages have the shape of the drain benchmark's workload: ten mixed columns, 1M inserts in 100
transactions, then 500k updates in one.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingestd.decode.relation import table_of
from ingestd.decode.stream import StreamDecoder

INSERTS, TRANSACTIONS, UPDATES = 1_000_000, 100, 500_000
FEED_BYTES = 4 << 20
OID = 16_384
COLUMNS = (
    ("id", 20, -1),
    ("customer", 23, -1),
    ("amount", 1700, (12 << 16 | 2) + 4),
    ("note", 25, -1),
    ("code", 1043, 24),
    ("paid", 16, -1),
    ("placed_at", 1184, -1),
    ("due", 1082, -1),
    ("weight", 701, -1),
    ("payload", 3802, -1),
)


def _relation() -> bytes:
    parts = [struct.pack(">cI", b"R", OID), b"public\0orders\0", struct.pack(">ch", b"d", 10)]
    for i, (name, type_oid, typmod) in enumerate(COLUMNS):
        parts += [bytes([i == 0]), name.encode(), b"\0", struct.pack(">Ii", type_oid, typmod)]
    return b"".join(parts)


def _row(n: int) -> bytes:
    values = (
        str(n),
        str(n * 7919 % 100_000),
        f"{n % 99_999}.{n % 100:02}",
        f"order number {n} of the synthetic workload"[: 20 + n % 20],
        f"C{n % 1000:05}",
        "tf"[n & 1],
        f"2024-{n % 12 + 1:02}-{n % 28 + 1:02} {n % 24:02}:{n % 60:02}:07.{n % 99_991:05}1+00",
        f"2025-{n % 12 + 1:02}-{n % 28 + 1:02}",
        repr(n / 7),
        f'{{"n": {n}, "tags": ["a", "b"]}}',
    )
    texts = (v.rstrip("0") if i == 8 else v for i, v in enumerate(values))
    return struct.pack(">h", 10) + b"".join(
        struct.pack(">ci", b"t", len(t)) + t.encode() for t in texts
    )


def _messages() -> Iterator[bytes]:
    per_transaction = INSERTS // TRANSACTIONS
    for t in range(TRANSACTIONS):
        lsn = 1000 * (t + 1)
        yield struct.pack(">cQqI", b"B", lsn, t, t)
        if t == 0:
            yield _relation()
        for n in range(t * per_transaction, (t + 1) * per_transaction):
            yield struct.pack(">cI", b"I", OID) + b"N" + _row(n)
        yield struct.pack(">cBQQq", b"C", 0, lsn, lsn + 500, t)
    lsn = 1000 * (TRANSACTIONS + 1)
    yield struct.pack(">cQqI", b"B", lsn, 0, TRANSACTIONS)
    for n in range(UPDATES):
        yield struct.pack(">cI", b"U", OID) + b"N" + _row(n)
    yield struct.pack(">cBQQq", b"C", 0, lsn, lsn + 500, 0)


Feed = tuple[bytes, NDArray[np.int64], NDArray[np.int64]]


def _feeds() -> Iterator[Feed]:
    """Give the messages as the transport does: joined, each after its 25-byte header."""
    parts, size = [], 0
    for message in _messages():
        parts.append(message)
        size += len(message) + 25
        if size >= FEED_BYTES:
            yield _joined(parts)
            parts, size = [], 0
    yield _joined(parts)


def _joined(parts: list[bytes]) -> Feed:
    lengths = np.array([len(p) for p in parts], np.int64)
    ends = np.cumsum(lengths + 25)
    return b"".join(b"w" * 25 + p for p in parts), ends - lengths, ends


def measure() -> dict[str, float]:
    """Decode the workload once: rows, bytes, seconds, rows per second. One core."""
    pa.set_cpu_count(1)
    feeds = list(_feeds())
    decoder = StreamDecoder(table_of)
    rows = 0
    began = time.perf_counter()
    for feed in feeds:
        for chunk in decoder.feed(*feed):
            rows += sum(b.rows.num_rows for b in chunk.batches)
    seconds = time.perf_counter() - began
    if rows != INSERTS + UPDATES:
        msg = f"{rows} rows decoded instead of {INSERTS + UPDATES}"
        raise RuntimeError(msg)
    nbytes = sum(len(f[0]) for f in feeds)
    return {"rows": rows, "bytes": nbytes, "seconds": seconds, "rows_per_s": rows / seconds}


if __name__ == "__main__":
    for name, value in measure().items():
        print(f"{name:12} {value:,.2f}")
