"""A server that lies in its stream: nothing is believed that it could not have sent (I1, I9)."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ingestd.lake.delta.read import read_raw
from ingestd.lake.fold.plain import fold
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from tests.harness.config import wal_config
from tests.harness.lying_server import LyingServer, keepalive, message
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ingestd.testing.embedded.daemon import Daemon
    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60.0
ORDERS = TableId("public", "orders")
FUTURE = 1 << 61
HEADER_BYTES = 5
GROWTH_BYTES = 60_000_000


@pytest.fixture
def liar(postgres: PostgresServer, database: Database) -> Iterator[LyingServer]:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    with LyingServer(postgres.port) as server:
        yield server


def rows(lake: Path) -> int:
    is_there = (lake / "shop/public/orders/_delta_log").exists()
    return len(fold(read_raw(str(lake), "shop", ORDERS), ["id"])) if is_there else 0


def memory_bytes(daemon: Daemon, what: str) -> int:
    text = Path(f"/proc/{daemon.pid}/status").read_text(encoding="ascii")
    [line] = [line for line in text.splitlines() if line.startswith(what)]
    return 1024 * int(line.split()[1])


def confirmed(database: Database) -> Lsn:
    query = "SELECT min(confirmed_flush_lsn)::text FROM pg_replication_slots WHERE database = %s"
    return Lsn.parse(database.value(query, database.name))


def once(lie: Callable[[bytes], bytes], when: Callable[[bytes], bool]) -> Callable[[bytes], bytes]:
    """Lie about the first message that it is `when` for; the next stream is true."""
    told: list[bool] = []

    def tell(given: bytes) -> bytes:
        if told or not when(given):
            return given
        told.append(True)
        return lie(given)

    return tell


def is_data(kind: bytes) -> Callable[[bytes], bool]:
    return lambda given: given[:1] == b"d" and given[5:6] == b"w" and given[30:31] == kind


def end_lsn(given: bytes) -> bytes:
    return given[:40] + struct.pack(">Q", FUTURE) + given[48:]


FUTURES = {
    "keepalive": (lambda given: given + keepalive(FUTURE, asks=True), is_data(b"C")),
    "near keepalive": (
        lambda given: given + keepalive(struct.unpack_from(">Q", given, 40)[0] + (1 << 20)),
        is_data(b"C"),
    ),
    "commit": (end_lsn, is_data(b"C")),
}


@pytest.mark.thorough
@pytest.mark.parametrize("lie", FUTURES)
def test_ack_after_durable_positions_beyond_the_wal_are_refused(
    liar: LyingServer, database: Database, lake: Path, make_daemon: MakeDaemon, lie: str
) -> None:
    liar.lie = once(*FUTURES[lie])
    daemon = make_daemon(wal_config(lake=lake, dsn=liar.dsn(database.dsn)))
    daemon.start_ready()
    database.execute("INSERT INTO orders VALUES (1, 'a')")
    failed = await_until(
        lambda: [e for e in daemon.events() if "beyond the end of its WAL" in str(e)],
        LIMIT_S,
        daemon.tail,
    )
    assert "Traceback" not in str(failed)
    assert confirmed(database) <= Lsn.parse(database.value("SELECT pg_current_wal_lsn()::text"))
    # the same lake and slot continue with an honest server
    daemon.sigterm()
    liar.lie = bytes
    daemon.start_ready()
    database.execute("INSERT INTO orders VALUES (2, 'b')")
    await_until(lambda: rows(lake) == 2, LIMIT_S, daemon.tail)


def test_bounded_a_frame_of_two_gigabytes_ends_the_connection(
    liar: LyingServer, database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    told = message(b"d", b"w" + bytes(1 << 20), (1 << 31) - 5)
    liar.lie = once(lambda given: given + told, is_data(b"C"))
    daemon = make_daemon(wal_config(lake=lake, dsn=liar.dsn(database.dsn)))
    daemon.start_ready()
    before = memory_bytes(daemon, "VmHWM")
    database.execute("INSERT INTO orders VALUES (1, 'a')")
    await_until(
        lambda: [e for e in daemon.events() if "has an invalid length" in str(e)],
        LIMIT_S,
        daemon.tail,
    )
    assert memory_bytes(daemon, "VmHWM") < before + GROWTH_BYTES
    daemon.sigterm()  # it would connect again after 60 s
    daemon.start_ready()  # the next connection is true
    await_until(lambda: rows(lake) == 1, LIMIT_S, daemon.tail)


@pytest.mark.thorough
def test_lies_in_any_field_end_the_connection_or_are_harmless(
    liar: LyingServer, database: Database, lake: Path, make_daemon: MakeDaemon, seed: int
) -> None:
    """Byte by byte: whatever a field says, the daemon survives, and what it confirms is durable.

    Except for the length of a message: the rest of a longer one is awaited, as for any large row.
    """
    dice = random.Random(seed)
    numbers = [0, 1, 0x7F, 0x80, 0xFF]

    def lie(given: bytes) -> bytes:
        if dice.random() < 0.7:
            return given
        at = dice.choice([0, *range(HEADER_BYTES, len(given))])
        width = dice.choice([1, 2, 4, 8]) if at else 1
        spoilt = bytes(dice.choice(numbers) for _ in range(width))
        return (given[:at] + spoilt + given[at + width :])[: len(given)]

    daemon = make_daemon(wal_config(lake=lake, dsn=liar.dsn(database.dsn)))
    daemon.start_ready()
    liar.lie = lie
    streams = liar.streams
    for n in range(100):
        database.execute(f"INSERT INTO orders VALUES ({n}, 'row') ON CONFLICT DO NOTHING")
        if liar.streams > streams + 3:
            break
    await_until(lambda: liar.streams > streams, LIMIT_S, daemon.tail)
    answer = daemon.get("/healthz")
    assert answer is not None
    assert answer[0] == 200
    assert confirmed(database) <= Lsn.parse(database.value("SELECT pg_current_wal_lsn()::text"))
    assert "Traceback" not in daemon.log_path.read_text()
