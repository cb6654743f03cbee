"""One daemon on one database that lives through one failpoint after another, under a workload.

In each life, what the failpoint needs (a new table, a backlog) is prepared while the daemon is
down. Then the daemon is started with the failpoint, under a workload, until it has acted.
"""

from __future__ import annotations

import contextlib
import random
import re
import signal
from collections import defaultdict
from typing import TYPE_CHECKING

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from ingestd.failpoints import POINTS, VARIABLE
from ingestd.lake.delta.append_log import AppendLog
from ingestd.lake.epochs_table import EpochTable
from ingestd.lake.layout import Layout
from ingestd.lake.store.store import open_store
from ingestd.model.lsn import Lsn
from ingestd.testing.oracle.comparison import compare_source
from tests.harness.compare import assert_change_log_is_sound, epochs, registry
from tests.harness.config import wal_config
from tests.harness.epoch_versions import assert_epoch_versions
from tests.harness.waiting import await_until
from tests.harness.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from ingestd.testing.oracle.comparison import LakeComparison
    from tests.harness.databases import Database

SOURCE = "shop"
LIMIT_S = 120.0
PAUSE_S, LONG_PAUSE_S = 0.02, 0.2
"""Pauses of a writing session between two transactions."""
BEHIND, BEHIND_BYTES = 20, 400_000
"""Transactions and bytes written before a start: a backlog of a few parts."""
LATE = ("sink.checkpoint",)
"""Steps that occur only every hundred commits."""
QUIET = ("sink.advance",)
"""Steps that occur while captured tables are not written."""
ANEW = ("capture.slot",)
"""Steps that occur when the slot is missing."""
NEW_TABLE = ("capture.publication", "capture.split", "sink.raw_create", "sink.tables_commit")
KEYLESS_TABLE = ("capture.point",)
NEW_COLUMN = ("sink.new_columns",)
CAUGHT_UP = ("capture.stream_begin",)
"""Steps after catching up. If commits are slow, not every workload lets the daemon catch up."""

DRAINS = ("capture.slot_copy", "capture.drain", "capture.slot_advance")
"""Steps that occur at a start with a backlog."""
ONCE = (*DRAINS, *CAUGHT_UP)
"""The usual steps that need not occur twice in a life."""
HELP = {"capture.slot_advance": "capture.drain.after=delay:0.5@1+"}
"""Makes a step occur: the slot is advanced only if an epoch is durable before the drain ends."""
HELP_ROWS = 1_000
"""Rows to write for that, so that parts of the backlog have changes: 200 kB of WAL."""

FIRST = ("sink.marker", "sink.adopt")
"""Steps that occur only at a first start: tests/faults/test_lake_lost.py."""


def step_of(point: str) -> str:
    return point.rpartition(".")[0]


OWN = tuple(p for p in POINTS if not p.startswith("maintenance.") and step_of(p) not in FIRST)
"""The points of the daemon's own process that are reached in a life."""


USUAL = tuple(
    point
    for point in OWN
    if step_of(point) not in (*LATE, *QUIET, *ANEW, *NEW_TABLE, *KEYLESS_TABLE, *NEW_COLUMN)
)
"""Points that are reached in any life."""

OFTEN = tuple(point for point in USUAL if step_of(point) not in ONCE)
"""Points that are reached many times in any life."""


def lives_config(database: Database, lake: Path, *, max_delay: str = "20ms") -> str:
    """Return TOML for short epochs, small parts of backlogs, and fast discovery of tables."""
    return wal_config(
        lake=lake,
        dsn=database.dsn,
        max_delay=max_delay,
        source_extra=f'slot = "{database.name}"\npublication = "{database.name}"\n'
        'discover_interval = "200ms"\ncatch_up_above = "250kB"\ncatch_up_part = "60kB"',
    )


def confirmed_lsn(database: Database) -> Lsn:
    """Return the confirmed position of the slot of `lives_config`; 0 without one."""
    found = database.rows(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s",
        database.name,
    )
    return Lsn.parse(found[0][0]) if found and found[0][0] else Lsn(0)


def durable_lsn(lake: Path) -> Lsn | None:
    """Return the lake's position: of the last epoch, or one recorded later while idle."""
    layout = Layout(SOURCE)
    try:
        handle = DeltaTable(str(lake / layout.epochs))
    except TableNotFoundError:
        return None
    version = handle.transaction_version(layout.app_id())
    return None if version is None else Lsn(version)


def helped(point: str, action: str) -> str:
    """Return the failpoint entries that make a point act in any life."""
    helping = HELP.get(step_of(point))
    return f"{point}={action}" if helping is None else f"{helping},{point}={action}"


def last_end_lsn(lake: Path) -> Lsn:
    """Return the end of the last epoch, 0 without one, without reading all of `_epochs`."""
    layout = Layout(SOURCE)
    log = AppendLog(open_store(str(lake), None), layout.epochs, layout.app_id())
    table = EpochTable(log, lambda _: None)
    table.load()
    return table.end_lsn or Lsn(0)


class Lives:
    """See the module. `reached`: each (point, action) that acted; `lives`: their number."""

    def __init__(self, database: Database, lake: Path, daemon: Daemon, seed: int) -> None:
        self.database = database
        self.lake = lake
        self.daemon = daemon
        self.reached: set[tuple[str, str]] = set()
        self.lives = 0
        self._seed = seed
        self._rng = random.Random(seed)
        self._new_slot = True

    def load(self) -> None:
        """Create the raw tables, then kill the daemon. After this, every point can be reached."""
        self._write(BEHIND)
        self.start()
        self.daemon.await_ready(LIMIT_S)
        self.await_settled()
        self.daemon.sigkill()
        self._new_slot = False

    # --- lives -------------------------------------------------------------------------------

    def crash(self, point: str, *, first: str = "") -> None:
        """Make the daemon die at `point`. `first`: where the connection or lake fails before."""
        times = self._rng.choice((1, 1, 2, 3)) if point in OFTEN else 1
        asked = (
            [(first, "error"), (point, f"crash@{times}")] if first else [(point, f"crash@{times}")]
        )
        with self._life(asked):
            try:
                code = self.daemon.await_end(LIMIT_S)
            except TimeoutError as error:
                raise TimeoutError(f"{asked}, {self.acted()} acted: {error}") from None
        assert code == -signal.SIGKILL, f"{asked}: ended with {code}\n{self.daemon.tail()}"
        self._took_note(asked)

    def endure(self, point: str, action: str) -> None:
        """Make a fault or delay at `point`; the daemon continues automatically, and is killed."""
        asked = [(point, action)]
        with self._life(asked):
            self._await_acted({(point, action.partition(":")[0])})
            self.await_epoch()
        self.daemon.sigkill()
        self._took_note(asked)

    def fail_twice(self, first: str, then: str) -> None:
        """Make a fault at one point, and at the next attempt one at another."""
        asked = [(first, "error"), (then, "error")]
        with self._life(asked):
            self._await_acted(set(asked))
            self.await_epoch()
        self.daemon.sigkill()
        self._took_note(asked)

    def crawl(self, points: Collection[str]) -> None:
        """Delay all of these points, each time. Points that need HELP can't be used."""
        with self._life([(point, "delay:0.02@1+") for point in points], side_by_side=True):
            self._await_acted({(point, "delay") for point in points})
            self.await_epoch()
        self.daemon.sigkill()
        self.reached.update(self.acted())
        self.assert_not_early()

    def await_epoch(self) -> None:
        """Wait until a new row is in the lake."""
        mark = self._position()
        self.database.execute("INSERT INTO events (kind) VALUES ('later')")
        await_until(
            lambda: last_end_lsn(self.lake) > mark, LIMIT_S, lambda: self._awaited("an epoch")
        )

    @contextlib.contextmanager
    def writing(self, pause_s: float = PAUSE_S) -> Iterator[None]:
        """Run a workload inside the block."""
        with self._workload(100_000, pause_s=pause_s):
            yield

    def start(self, entries: str = "") -> None:
        """Start the daemon with these failpoints, or with none."""
        self.daemon.environment[VARIABLE] = entries
        self._seen = len(self.daemon.events("failpoint.reached"))
        self.daemon.start()

    # --- checks ------------------------------------------------------------------------------

    def compare(self) -> Sequence[LakeComparison]:
        """Start without failpoints, wait until the lake is complete, and compare."""
        self.start()
        self.daemon.await_ready(LIMIT_S)
        self.await_settled()
        self.await_epoch()
        return self.compare_now()

    def compare_now(self) -> Sequence[LakeComparison]:
        """I1 to I4, I6: nothing lost or doubled, epochs and versions correct. Writers must rest."""
        with self.database.connect() as connection:
            found = compare_source(connection, str(self.lake), SOURCE)
        wrong = [str(one) for one in found if not one.is_equal]
        assert not wrong, "\n".join(wrong)
        assert_change_log_is_sound(self.database, self.lake)
        assert_epoch_versions(self.lake)
        self._new_slot = False
        self.assert_not_early()
        return found

    def await_settled(self) -> None:
        """Wait until every table of the source is live."""

        def is_settled() -> bool:
            last = {row["table"]: row["state"] for row in registry(self.lake)}
            return self._tables() <= last.keys() and set(last.values()) == {"live"}

        await_until(is_settled, LIMIT_S, lambda: self._awaited("all tables to be live"))

    def assert_not_early(self) -> None:
        """I1. Skipped while the slot is new: all earlier changes are then re-read."""
        # Read the slot first: what is durable then is still durable when the lake is read.
        confirmed = confirmed_lsn(self.database)
        durable = durable_lsn(self.lake)
        if durable is not None and not self._new_slot:
            assert confirmed <= durable, f"confirmed {confirmed}, durable {durable}"

    def epochs(self) -> int:
        """Return the number of epochs."""
        return max((row["epoch"] for row in epochs(self.lake)), default=0)

    def acted(self) -> list[tuple[str, str]]:
        """Return the (point, action) that acted since the last start."""
        events = self.daemon.events("failpoint.reached")[self._seen :]
        return [(event["point"], event["action"]) for event in events]

    def fall_behind(self) -> None:
        """Write WAL that contains no change: the next start has a backlog to drain."""
        self.database.execute(
            f"SELECT pg_logical_emit_message(false, 'test', repeat('x', {BEHIND_BYTES}))"
        )

    # --- inside ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _life(
        self, asked: Sequence[tuple[str, str]], *, side_by_side: bool = False
    ) -> Iterator[None]:
        """Start the daemon with these (point, action), one after the other or `side_by_side`."""
        self.lives += 1
        steps = {step_of(point) for point, _ in asked}
        self._write(BEHIND)
        self.fall_behind()
        self._prepare(steps)
        stages = [helped(point, action) for point, action in asked]
        self.start(",".join(stages) if side_by_side else ">".join(stages))
        if steps & set(QUIET):
            yield
            return
        with self.writing(LONG_PAUSE_S if steps & set(CAUGHT_UP) else PAUSE_S):
            yield

    def _prepare(self, steps: set[str]) -> None:
        new = f"new_{self.lives}"
        if steps & HELP.keys():
            self._write_parts()
        if steps & set(QUIET):
            self.database.execute("SELECT pg_logical_emit_message(true, 'test', '')")
        if steps & set(NEW_TABLE):
            self.database.execute(
                f"CREATE TABLE {new} (id int PRIMARY KEY, note text)",
                f"INSERT INTO {new} SELECT n, 'note ' || n FROM generate_series(1, 20) n",
            )
        if steps & set(KEYLESS_TABLE):
            self.database.execute(
                f"CREATE TABLE {new}_keyless (n int)",
                f"ALTER TABLE {new}_keyless REPLICA IDENTITY FULL",
                f"INSERT INTO {new}_keyless SELECT n % 3 FROM generate_series(1, 20) n",
            )
        if steps & set(NEW_COLUMN):
            self.database.execute(
                f"ALTER TABLE visits ADD {new} text",
                f"INSERT INTO visits (id, {new}) VALUES ({1000 + self.lives}, 'new')",
            )
        if steps & set(ANEW):
            self._new_slot = True
            self.database.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
                f" WHERE slot_name = '{self.database.name}' AND active_pid IS NOT NULL"
            )
            await_until(self._drop_slot, LIMIT_S, "the slot to be dropped")

    def _write_parts(self) -> None:
        with self.database.connect() as connection:
            for first in range(0, HELP_ROWS, 50):
                connection.execute(
                    "INSERT INTO visits (id) SELECT %s + n FROM generate_series(0, 49) n"
                    " ON CONFLICT (id) DO UPDATE SET seen = localtime",
                    [10_000 + first],
                )

    def _drop_slot(self) -> bool:
        self.database.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            f" WHERE slot_name = '{self.database.name}' AND NOT active"
        )
        return self.database.name not in self.database.slots()

    def _write(self, transactions: int) -> None:
        with self._workload(transactions) as workload:
            workload.join()

    def _workload(self, transactions: int, *, pause_s: float = 0.0) -> Workload:
        return Workload(
            self.database.dsn,
            seed=hash((self._seed, self.lives, transactions)),
            sessions=2,
            transactions=transactions,
            limit_s=2 * LIMIT_S,
            pause_s=pause_s,
        )

    def _took_note(self, asked: Sequence[tuple[str, str]]) -> None:
        """Assert that all requested failpoints acted, in order."""
        names = [(point, re.split("[@:]", action)[0]) for point, action in asked]
        acted = [one for one in self.acted() if one in names]
        assert acted == names, f"{asked}: {acted} acted\n{self.daemon.tail()}"
        self.reached.update(acted)
        self.assert_not_early()

    def _await_acted(self, points: set[tuple[str, str]]) -> None:
        await_until(
            lambda: points <= set(self.acted()),
            LIMIT_S,
            lambda: self._awaited(str(points - set(self.acted()))),
        )

    def _awaited(self, what: str) -> str:
        return f"{what} (--seed {self._seed}, life {self.lives})\n{self.daemon.tail()}"

    def _position(self) -> Lsn:
        return Lsn.parse(self.database.value("SELECT pg_current_wal_insert_lsn()::text"))

    def _tables(self) -> set[str]:
        tables: dict[str, set[str]] = defaultdict(set)
        found = self.database.rows("SELECT schemaname, tablename FROM pg_tables")
        for schema, name in found:
            tables[schema].add(f"{schema}.{name}")
        return tables["public"]
