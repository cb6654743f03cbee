"""The speed of decoding pgoutput to typed Arrow batches on one core.

`python -m benchmarks.daemon.decode`. The messages have the shape of the drain benchmark's workload:
ten mixed columns, 1M inserts in 100 transactions, then 500k updates in one. Two more measurements:
a table of sixty mixed columns, and, for each type with values that no column can hold, the cost of
one such value in a hundred.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.decode.pgoutput.relation import table_of

TRANSACTIONS, INSERTS_EACH = 100, 10_000
FEED_BYTES = 4 << 20
PASSES = 3
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


def _relation(columns: Sequence[tuple[str, int, int]]) -> bytes:
    count = struct.pack(">ch", b"d", len(columns))
    parts = [struct.pack(">cI", b"R", OID), b"public\0orders\0", count]
    for i, (name, type_oid, typmod) in enumerate(columns):
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
    texts = (v.removesuffix(".0") if i == 8 else v for i, v in enumerate(values))
    return struct.pack(">h", 10) + b"".join(
        struct.pack(">ci", b"t", len(t)) + t.encode() for t in texts
    )


def _messages(transactions: int) -> Iterator[bytes]:
    for t in range(transactions):
        lsn = 1000 * (t + 1)
        yield struct.pack(">cQqI", b"B", lsn, t, t)
        if t == 0:
            yield _relation(COLUMNS)
        for n in range(t * INSERTS_EACH, (t + 1) * INSERTS_EACH):
            yield struct.pack(">cI", b"I", OID) + b"N" + _row(n)
        yield struct.pack(">cBQQq", b"C", 0, lsn, lsn + 500, t)
    lsn = 1000 * (transactions + 1)
    yield struct.pack(">cQqI", b"B", lsn, 0, transactions)
    for n in range(transactions * INSERTS_EACH // 2):
        yield struct.pack(">cI", b"U", OID) + b"N" + _row(n)
    yield struct.pack(">cBQQq", b"C", 0, lsn, lsn + 500, 0)


Feed = tuple[bytes, NDArray[np.int64], NDArray[np.int64]]


def _laid_out(messages: Iterable[bytes]) -> Iterator[Feed]:
    """Yield the messages as the transport delivers them: joined, each after a 25-byte header."""
    parts, size = [], 0
    for message in messages:
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


def measure(transactions: int = TRANSACTIONS) -> dict[str, float]:
    """Decode the workload on one core; return rows, bytes, CPU seconds, rows per CPU second.

    `transactions`: of 10,000 inserts; half as many updates follow. The seconds are the median of
    three passes in one process, as the first pass must allocate its memory.
    """
    pa.set_cpu_count(1)
    feeds = list(_laid_out(_messages(transactions)))
    nbytes = sum(len(f[0]) for f in feeds)
    rows = transactions * INSERTS_EACH * 3 // 2
    seconds = median(_decoded_s(feeds, rows) for _ in range(PASSES))
    return {"rows": rows, "bytes": nbytes, "seconds": seconds, "rows_per_s": rows / seconds}


def _decoded_s(feeds: Sequence[Feed], wanted: int) -> float:
    decoder = PgoutputDecoder(table_of)
    rows = 0
    began = time.process_time()
    for feed in feeds:
        for chunk in decoder.feed(*feed):
            rows += sum(b.rows.num_rows for b in chunk.batches)
    seconds = time.process_time() - began
    if rows != wanted:
        msg = f"{rows} rows decoded instead of {wanted}"
        raise RuntimeError(msg)
    return seconds


AS_DAEMON = """
from ingestd.process.memory import configure_allocators
configure_allocators()
import sys
from benchmarks.daemon import decode
from ingestd.decode import native
if sys.argv[2] == "numpy":
    native.compiled = None
print(decode.measure(int(sys.argv[1]))["rows_per_s"])
"""


def rows_per_s_as_daemon(
    transactions: int = TRANSACTIONS, way: Literal["compiled", "numpy"] = "compiled"
) -> float:
    """Measure in a process whose allocators are configured as in the daemon."""
    command = [sys.executable, "-c", AS_DAEMON, str(transactions), way]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


# --- sixty columns ---------------------------------------------------------------------------

ColumnFeed = tuple[int, int, Callable[[int], str]]
"""Type OID, typmod, the n-th value's text."""

_NUMERIC_12_2, _NUMERIC_18_4 = (12 << 16 | 2) + 4, (18 << 16 | 4) + 4
_UUID = "{:08x}-9c0b-4ef8-bb6d-6bb9bd380a11"


def _day(n: int) -> str:
    return f"2024-{n % 12 + 1:02}-{n % 28 + 1:02}"


MIXED: tuple[ColumnFeed, ...] = (
    *((23, -1, lambda n, k=k: str(n * 7919 % (100_000 + k))) for k in range(8)),
    *((20, -1, lambda n, k=k: str(10**9 * k - n)) for k in range(6)),
    *((21, -1, lambda n: str(n % 30_000)),) * 2,
    *((701, -1, lambda n, k=k: repr((n + 1) / (k + 7))) for k in range(6)),
    *((1700, _NUMERIC_12_2, lambda n, k=k: f"{n * k % 99_999}.{n % 100:02}") for k in range(4)),
    *((1700, _NUMERIC_18_4, lambda n: f"-{n}.{n % 10_000:04}"),) * 2,
    *((25, -1, lambda n, k=k: f"order number {n} of the synthetic workload"[: 9 + k + n % 9])
      for k in range(8)),
    *((1043, 24, lambda n: f"C{n % 1000:05}"),) * 4,
    *((1082, -1, _day),) * 4,
    *((1184, -1, lambda n: f"{_day(n)} {n % 24:02}:07:{n % 60:02}.5+00"),) * 6,
    *((1114, -1, lambda n: f"{_day(n)} {n % 24:02}:{n % 60:02}:07"),) * 2,
    *((16, -1, lambda n: "tf"[n & 1]),) * 4,
    *((2950, -1, _UUID.format),) * 2,
    (1007, -1, lambda n: f"{{{n},NULL,{n % 7}}}"),
    (1009, -1, lambda n: f'{{a{n},"b c",NULL}}'),
)  # fmt: skip
MIXED_ROWS, REPEATS = 20_000, 5


def measure_mixed() -> dict[str, float]:
    """Decode rows of sixty columns; return values per CPU second, the best of several passes."""
    feeds = _feeds_of(MIXED, MIXED_ROWS)
    seconds = _best_s([feeds])[0]
    values = MIXED_ROWS * len(MIXED)
    return {"values": values, "seconds": seconds, "values_per_s": values / seconds}


def _feeds_of(columns: Sequence[ColumnFeed], rows: int) -> list[Feed]:
    """Return the inserts of one transaction."""
    named = [(f"c{i}", oid, typmod) for i, (oid, typmod, _) in enumerate(columns)]
    messages = [struct.pack(">cQqI", b"B", 1000, 0, 1), _relation(named)]
    for n in range(rows):
        texts = [text(n).encode("latin-1") for _, _, text in columns]
        tuples = b"".join(struct.pack(">ci", b"t", len(t)) + t for t in texts)
        head = struct.pack(">cIch", b"I", OID, b"N", len(columns))
        messages.append(head + tuples)
    messages.append(struct.pack(">cBQQq", b"C", 0, 1000, 1500, 0))
    return list(_laid_out(messages))


def _best_s(workloads: Sequence[list[Feed]]) -> list[float]:
    """Decode each workload several times, alternately; return the least CPU time of each."""
    pa.set_cpu_count(1)
    best = [float("inf")] * len(workloads)
    for _ in range(REPEATS):
        for i, feeds in enumerate(workloads):
            decoder = PgoutputDecoder(table_of)
            began = time.process_time()
            for feed in feeds:
                decoder.feed(*feed)
            best[i] = min(best[i], time.process_time() - began)
    return best


# --- odd values ------------------------------------------------------------------------------

ODD: dict[str, tuple[int, int, Callable[[int], str], Sequence[str]]] = {
    "date": (1082, -1, MIXED[38][2], ("infinity", "0044-03-15 BC", "10000-01-01")),
    "timestamp": (1114, -1, MIXED[48][2], ("-infinity", "0044-03-15 00:00:00 BC",
                                          "10000-01-01 00:00:00")),
    "timestamptz": (1184, -1, MIXED[42][2], ("infinity", "0044-03-15 00:00:00+00 BC",
                                            "10000-01-01 00:00:00+00")),
    "numeric(12,2)": (1700, _NUMERIC_12_2, MIXED[22][2], ("NaN",)),
    "numeric(12,0)": (1700, (12 << 16) + 4, MIXED[0][2], ("NaN",)),
    "numeric(38,4)": (1700, (38 << 16 | 4) + 4, MIXED[26][2], ("NaN",)),
    "text": (25, -1, MIXED[30][2], ("caf\xe9", "\xff")),
    "text beyond ASCII": (25, -1, lambda n: f"gr\xc3\xbc\xc3\x9fe {n}", ("caf\xe9", "\xff")),
    "integer[]": (1007, -1, MIXED[58][2], ("{{1,2},{3,4}}", "[0:1]={1,2}")),
    "text[]": (1009, -1, MIXED[59][2], ("{{a,b},{c,d}}", '[0:1]={a,"b c"}')),
}  # fmt: skip
ODD_ROWS, ODD_EVERY = 50_000, 100


def measure_odd() -> dict[str, float]:
    """Decode columns with one odd value in a hundred; return CPU time relative to clean ones."""
    ratios = {}
    for name, (oid, typmod, text, odd) in ODD.items():

        def mixed(n: int, text: Callable[[int], str] = text, odd: Sequence[str] = odd) -> str:
            return text(n) if n % ODD_EVERY else odd[n // ODD_EVERY % len(odd)]

        clean = _feeds_of([(oid, typmod, text)], ODD_ROWS)
        spoilt = _feeds_of([(oid, typmod, mixed)], ODD_ROWS)
        clean_s, spoilt_s = _best_s([clean, spoilt])
        ratios[name] = spoilt_s / clean_s
    return ratios


if __name__ == "__main__":
    for result in (measure(), measure_mixed(), measure_odd()):
        for name, value in result.items():
            print(f"{name:18} {value:,.2f}")
