"""A server that lies in the COPYs of a daemon: snapshots, polls, drains (I2, I8, I9)."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.lake.delta.read import read_raw
from ingestd.lake.fold.plain import fold
from ingestd.model.schema import TableId
from tests.harness import lying_messages as honest
from tests.harness.compare import registry
from tests.harness.config import polling_config, wal_config
from tests.harness.lies import written
from tests.harness.lying_server import COPY, LyingServer, message
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database


Lie = Callable[[bytes], bytes]
pytestmark = pytest.mark.attack("server")
LIMIT_S = 60.0
FEW = 4
"""So many lies are told to one daemon, each once it has started again."""
SAID_BYTES = 3000
"""A reason and its remedy."""
TRAILER = message(b"d", b"\xff\xff")
ROWS = 3


def is_row(given: bytes) -> bool:
    return given[:1] == b"d" and given != TRAILER


def of_rows(lie: Lie) -> Lie:
    return lambda given: lie(given) if is_row(given) else given


def instead(of: Callable[[bytes], bool], *sent: bytes) -> Lie:
    return lambda given: b"".join(sent) if of(given) else given


def is_done(given: bytes) -> bool:
    return given[:1] == b"c"


def content(given: bytes, lie: Lie) -> bytes:
    return message(b"d", lie(given[5:]))


LIES: dict[str, Lie] = {
    "no trailer": instead(lambda given: given == TRAILER),
    "two trailers": instead(lambda given: given == TRAILER, TRAILER, TRAILER),
    "two CopyDone": instead(is_done, message(b"c", b""), message(b"c", b"")),
    "a response amid": of_rows(lambda given: given + written(honest.copy_response("W"))),
    "an unknown kind": of_rows(lambda given: b"?" + given[1:]),
    "two gigabytes": of_rows(lambda given: message(b"d", given[5:], (1 << 31) - 5)),
    "a length of 3": of_rows(lambda given: message(b"d", given[5:], -1)),
    "an empty row": of_rows(lambda given: message(b"d", b"") + given),
    "a row cut": of_rows(lambda given: content(given, lambda row: row[:-1])),
    "a row longer": of_rows(lambda given: content(given, lambda row: row + b"\0")),
}


class Liar:
    """Applies the next lie to each COPY that begins, then sends the truth."""

    def __init__(self, names: Iterable[str]) -> None:
        self.told: list[str] = []
        self._names = iter(names)
        self._lie: Lie = bytes

    def __call__(self, given: bytes) -> bytes:
        if given[:1] == b"H":
            name = next(self._names, None)
            self._lie = bytes if name is None else LIES[name]
            self.told += [] if name is None else [name]
        return self._lie(given)


@pytest.fixture
def liar(postgres: PostgresServer) -> Iterator[LyingServer]:
    with LyingServer(postgres.port) as server:
        server.about = COPY
        yield server


def rows(lake: Path, table: TableId) -> int:
    is_there = (lake / f"shop/{table.schema}/{table.name}/_delta_log").exists()
    return len(fold(read_raw(str(lake), "shop", table), ["id"])) if is_there else 0


def await_rows(daemon: Daemon, lake: Path, count: int) -> None:
    await_until(lambda: rows(lake, ORDERS) == count, LIMIT_S, daemon.tail)


def failure_after(daemon: Daemon, before: Sequence[object]) -> dict[str, Any] | None:
    """The first one reported after these."""
    return next(iter(daemon.events("source.failed")[len(before) :]), None)


def assert_nothing_unknown(daemon: Daemon) -> None:
    log = daemon.log_path.read_text()
    assert "Traceback" not in log
    assert "source.unknown_error" not in log


def test_isolated_a_lie_in_a_snapshot_stops_its_table(
    liar: LyingServer, database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    tables = [TableId("public", f"t{n:02}") for n in range(len(LIES) + 1)]
    for table in tables:
        database.execute(
            f"CREATE TABLE {table.name} (id int PRIMARY KEY, note text)",
            f"INSERT INTO {table.name} SELECT n, 'note ' || n FROM generate_series(1, {ROWS}) n",
        )
    liar.lie = lie = Liar(LIES)
    config = wal_config(
        lake=lake, dsn=liar.dsn(database.dsn), source_extra="snapshot_workers = 1\n"
    )
    daemon = make_daemon(config)
    daemon.start()

    def states() -> dict[str, dict[str, Any]]:
        return {row["table"]: row for row in registry(lake)}

    def is_settled() -> bool:
        found = [row["state"] for row in states().values()]
        return len(found) == len(tables) and "snapshotting" not in found

    await_until(is_settled, LIMIT_S, daemon.tail)
    assert lie.told == [*LIES]
    stopped = {name for name, row in states().items() if row["state"] == "stopped"}
    assert len(stopped) == len(LIES)
    for name in stopped:
        reason = states()[name]["reason"]
        assert "the server sent rows" in reason
        assert len(reason.encode()) < SAID_BYTES
    [true] = [table for table in tables if str(table) not in stopped]
    database.execute(f"INSERT INTO {true.name} VALUES (0, 'streamed')")
    await_until(lambda: rows(lake, true) == ROWS + 1, LIMIT_S, daemon.tail)
    told = [e for e in daemon.events("table.stopped") if "ingestd check" in e["remedy"]]
    assert {event["table"] for event in told} == stopped
    assert_nothing_unknown(daemon)


ORDERS = TableId("public", "orders")
CONFIGS: dict[str, Callable[..., str]] = {
    "poll": polling_config,
    "catch-up": partial(wal_config, source_extra='catch_up_above = "0"\n'),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", CONFIGS)
def test_exactly_once_a_lie_in_a_later_read_ends_its_source(  # noqa: PLR0917
    liar: LyingServer,
    database: Database,
    lake: Path,
    make_daemon: MakeDaemon,
    kind: str,
    seed: int,
) -> None:
    """In a poll or a backlog: the falsified rows come again and are appended once."""
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    daemon = make_daemon(CONFIGS[kind](lake=lake, dsn=liar.dsn(database.dsn)))
    for count, name in enumerate(random.Random(seed).sample([*LIES], FEW)):
        liar.lie = bytes
        daemon.start_ready()
        database.execute(f"INSERT INTO orders VALUES ({count}, 'true')")
        await_rows(daemon, lake, 2 * count + 1)
        if kind == "catch-up":
            daemon.sigterm()
        liar.lie = lie = Liar([name])
        failures = daemon.events("source.failed")
        database.execute(f"INSERT INTO orders VALUES ({FEW + count}, 'lied about')")
        if kind == "catch-up":
            daemon.start()
        failed = await_until(partial(failure_after, daemon, failures), LIMIT_S, daemon.tail)
        assert lie.told == [name]
        assert failed["reason"].startswith(f"source shop, {kind}, ")
        assert len(f"{failed['reason']} {failed['remedy']}".encode()) < SAID_BYTES
        assert rows(lake, ORDERS) == 2 * count + 1
        daemon.sigterm()  # it would be tried again after 60 s
    daemon.start_ready()
    await_rows(daemon, lake, 2 * FEW)
    assert_nothing_unknown(daemon)
