"""DDL on captured tables, under load while the daemon runs and while it does not.

Each life is played once for all cases, which then are looked at one by one: the lake folded is the
source (I6, I7), rows before the change have its old shape and rows after it the new one, nothing is
read again without need, and no other table is affected (I8).
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, QueryBuilder
from psycopg import errors, sql

from ingestd.lake.delta.read import read_raw
from ingestd.lake.layout import Layout
from ingestd.model.schema import TableId
from ingestd.testing.embedded.daemon import Daemon
from ingestd.testing.oracle.comparison import await_caught_up, compare_table, source_tables
from tests.harness.compare import registry, wrong_current_rows
from tests.harness.config import wal_config
from tests.harness.databases import fresh_database
from tests.harness.schema_cases import CASES, PATTERNS, TABLESPACE, Case
from tests.harness.waiting import await_until
from tests.harness.writers import Writers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.harness.databases import Database

LIMIT_S = 90
WRITES = 3
ATTEMPTS = 20
LOOKED_AFTER = 5
OUTSIDE_TRANSACTIONS = ("VACUUM", "CLUSTER", "REINDEX", "ALTER TYPE")
BYSTANDER = TableId("public", "bystander")
SOME = CASES[::4]
RECORDED = tuple(c for c in CASES if c.name in {"add_random", "same_type", "rename_column"})
EXPECTED = {"table.stopped", "snapshot.retried", "tables.unmatched"}
"""REPLICA IDENTITY NOTHING stops its table; a table rewritten while it is read is read again.

The pattern of the other schema matches nothing until a case moves its table there.
"""


@dataclass
class Life:
    """A database, its lake and the daemon that has captured it, when all is over."""

    database: Database
    lake: Path
    daemon: Daemon
    writers: Writers
    events: list[dict[str, Any]] = field(default_factory=list)

    def events_of(self, table: TableId) -> list[dict[str, Any]]:
        return [e for e in self.events if e["table"] == str(table)]

    def told_of(self, table: TableId) -> str:
        """Return what the daemon logged of a table, and of the source, a line each."""
        told = [e for e in self.daemon.events() if e.get("table", str(table)) == str(table)]
        return "\n".join(str(e) for e in told if e["event"] != "epoch.committed")

    def raw(self, table: TableId) -> pa.Table:
        return read_raw(str(self.lake), "shop", table)

    def apply(self, case: Case, step: tuple[str, ...]) -> None:
        """Run a step, again if it met the writers."""
        statements = [case.sql(s).replace("{p}", self.database.name) for s in step]
        alone = statements[0].startswith(OUTSIDE_TRANSACTIONS)
        for attempt in range(ATTEMPTS):
            try:
                with self.database.connect(autocommit=alone) as session:
                    for statement in statements:
                        session.execute(statement.encode())
            except (errors.DeadlockDetected, errors.SerializationFailure, errors.UniqueViolation):
                if attempt + 1 == ATTEMPTS:
                    raise
            else:
                return

    def present(self, case: Case) -> list[TableId]:
        with self.database.connect() as connection:
            there = set(source_tables(connection))
        return [t for name in case.tables() if (t := TableId(*name)) in there]

    def captured(self, case: Case) -> list[TableId]:
        return [t for t in self.present(case) if t.schema != "elsewhere" and "hidden" not in t.name]

    def play(self, case: Case) -> None:
        """Do what the case does, between writes."""
        for step in case.steps:
            self.writers.await_writes(self.present(case), WRITES)
            self.apply(case, step)
        self.writers.await_writes(self.present(case), WRITES)

    def await_bystander(self) -> None:
        """Wait until something written to the bystander from now on is in the lake."""
        now = datetime.now(UTC)
        self.writers.await_writes([BYSTANDER], WRITES)
        await_until(
            lambda: pc.max(self.raw(BYSTANDER)["_cdc_ts"]).as_py() > now,
            LIMIT_S,
            lambda: f"a row of the bystander from after {now}\n{self.daemon.tail()}",
        )

    def settle(self) -> None:
        """Wait until the daemon has polled the catalog and read all that it must."""
        self.database.execute("CREATE TABLE the_last (id int PRIMARY KEY)")
        await_until(self._is_settled, LIMIT_S, lambda: f"all tables live\n{self.daemon.tail()}")
        with self.database.connect() as connection:
            await_caught_up(connection, self.database.name, LIMIT_S)
        self.events = registry(self.lake)

    def _is_settled(self) -> bool:
        last = {row["table"]: row["state"] for row in registry(self.lake)}
        return last.get("public.the_last") == "live" and "snapshotting" not in last.values()


@contextmanager
def life(
    postgres: PostgresServer, folder: Path, cases: Sequence[Case], extra: str = ""
) -> Iterator[Life]:
    with fresh_database(postgres) as database:
        database.execute(
            "CREATE SCHEMA other",
            "CREATE SCHEMA elsewhere",
            f"CREATE TABLE {BYSTANDER} (id int PRIMARY KEY, n int)",
        )
        for case in cases:
            database.execute(*map(case.sql, case.create))
        config = wal_config(
            lake=folder / "lake",
            dsn=database.dsn,
            tables=PATTERNS,
            max_delay="100ms",
            source_extra=f'slot = "{database.name}"\npublication = "{database.name}"\n'
            f'discover_interval = "1s"\n{extra}',
        )
        daemon = Daemon(folder, config)
        tables = [BYSTANDER, *(TableId(*n) for c in cases for n in c.tables())]
        with Writers(database.dsn, tables) as writers:
            writers.await_writes([BYSTANDER], 200)
            try:
                daemon.start_ready(LIMIT_S)
                yield Life(database, folder / "lake", daemon, writers)
            finally:
                daemon.close()


@pytest.fixture(scope="module")
def tablespace(postgres: PostgresServer) -> Iterator[None]:
    name = sql.Identifier(TABLESPACE)
    with postgres.connect() as connection:
        connection.execute("SET allow_in_place_tablespaces = on")
        connection.execute(sql.SQL("CREATE TABLESPACE {} LOCATION ''").format(name))
    yield
    with postgres.connect() as connection:
        connection.execute(sql.SQL("DROP TABLESPACE {}").format(name))


@pytest.fixture(scope="module")
def running(
    postgres: PostgresServer, tablespace: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Life]:
    del tablespace
    with life(postgres, tmp_path_factory.mktemp("running"), CASES) as played:
        for number, case in enumerate(CASES, start=1):
            played.play(case)
            if number % LOOKED_AFTER == 0:
                played.await_bystander()
        played.writers.stop()
        played.settle()
        yield played


@pytest.fixture(scope="module")
def stopped(
    postgres: PostgresServer, tablespace: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Life]:
    del tablespace
    with played_while_stopped(postgres, tmp_path_factory.mktemp("stopped"), CASES) as played:
        yield played


@pytest.fixture(scope="module")
def stopped_some(
    postgres: PostgresServer, tablespace: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Life]:
    del tablespace
    with played_while_stopped(postgres, tmp_path_factory.mktemp("some"), SOME) as played:
        yield played


@contextmanager
def played_while_stopped(
    postgres: PostgresServer, folder: Path, cases: Sequence[Case]
) -> Iterator[Life]:
    with life(postgres, folder, cases) as played:
        assert played.daemon.sigterm() == 0
        for case in cases:
            played.play(case)
        played.daemon.start_ready(LIMIT_S)
        played.writers.stop()
        played.settle()
        yield played


@pytest.fixture(scope="module")
def recording(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    folder = tmp_path_factory.mktemp("recording")
    with life(postgres, folder, RECORDED, 'on_rewrite = "record"') as played:
        for case in RECORDED:
            played.play(case)
        played.writers.stop()
        played.settle()
        yield played


@pytest.mark.parametrize("case", CASES, ids=attrgetter("name"))
def test_i6_i7_ddl_while_running(running: Life, case: Case) -> None:
    check(running, case)


@pytest.mark.parametrize("case", SOME, ids=attrgetter("name"))
def test_i6_i7_some_ddl_while_stopped(stopped_some: Life, case: Case) -> None:
    check(stopped_some, case)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES, ids=attrgetter("name"))
def test_i6_i7_ddl_while_stopped(stopped: Life, case: Case) -> None:
    check(stopped, case)


def check(played: Life, case: Case) -> None:
    """The lake equals the source, was not re-read without need, and recorded the changes."""
    with played.database.connect() as connection:
        for table in played.captured(case):
            compared = compare_table(connection, str(played.lake), "shop", table)
            assert compared.is_equal, f"{compared}\n{played.events_of(table)}"
            assert wrong_current_rows(connection, played.lake, "shop", [table]) == []
    table = TableId("public", case.name)
    events = played.events_of(table)
    if case.gone:
        assert events[-1]["state"] == "dropped"
        return
    assert events[-1]["state"] == "live"
    versions = [e["schema_version"] for e in events]
    assert versions == sorted(versions)
    raw = played.raw(table)
    if case.is_read_anew is not None:
        assert (markers(raw) > 1) is case.is_read_anew, played.told_of(table)
    types = {c["name"]: c["delta_type"] for e in events for c in e["columns"]}
    assert dict(case.columns).items() <= types.items()
    missing = {c["name"]: c["missing"] for c in events[-1]["columns"]}
    assert dict(case.missing).items() <= missing.items()
    # One scan by a reader that is not ours has every column that ever was, and all rows.
    scanned = DeltaTable(str(played.lake / Layout("shop").raw(table)))
    assert set(types) <= {f.name for f in scanned.schema().fields}
    rows = QueryBuilder().register("raw", scanned).execute("SELECT count(*) AS n FROM raw")
    assert pa.table(rows.read_all())["n"].to_pylist() == [raw.num_rows]


def markers(raw: pa.Table) -> int:
    found: int = raw["_cdc_seq"].to_pylist().count(-1)
    return found


@pytest.mark.parametrize("name", ["add_column", "drop_column", "int_to_text"])
def test_rows_have_the_shape_of_their_time(running: Life, name: str) -> None:
    """Before the change the old columns only, from it on the new ones only."""
    table = TableId("public", name)
    gone, came = {
        "add_column": (None, "x"),
        "drop_column": ("note", None),
        "int_to_text": ("v", "v__v2"),
    }[name]
    events = [e for e in running.events_of(table) if e["columns"]]
    now = {c["name"] for c in events[-1]["columns"]}
    since = next(e["at_lsn"] for e in events if {c["name"] for c in e["columns"]} == now)
    old, new = 0, 0
    for row in running.raw(table).to_pylist():
        if row["_cdc_op"] not in "cu":
            continue
        if row["_cdc_lsn"] < since:
            old += 1
            assert came is None or row[came] is None
        else:
            new += 1
            assert gone is None or row[gone] is None
    assert old
    assert new


def test_i8_no_other_table_is_affected(running: Life) -> None:
    """I8: no fault, no restart, and another table's epochs continued throughout."""
    faults = [e for e in running.daemon.events() if e.get("level") not in {"info", "debug"}]
    assert [e for e in faults if e["event"] not in EXPECTED] == []
    answer = running.daemon.get("/metrics")
    assert answer is not None
    restarts = re.findall(
        r"^ingestd_restarts_total\{reason=\"(\w+)\".* [1-9]", answer[1], re.MULTILINE
    )
    assert restarts == []
    with running.database.connect() as connection:
        assert compare_table(connection, str(running.lake), "shop", BYSTANDER).is_equal
    raw = running.raw(BYSTANDER)
    assert markers(raw) == 1
    assert {e["schema_version"] for e in running.events_of(BYSTANDER)} == {1}
    # `await_bystander` saw it move in the lake again and again.
    assert len(set(raw["_cdc_epoch"].to_pylist())) > len(CASES) // LOOKED_AFTER


@pytest.mark.thorough
@pytest.mark.parametrize("case", RECORDED, ids=attrgetter("name"))
def test_a_rewrite_is_only_recorded_if_so_configured(recording: Life, case: Case) -> None:
    table = TableId("public", case.name)
    assert markers(recording.raw(table)) == 1
    events = recording.events_of(table)
    reasons = [e["reason"] for e in events if e["reason"]]
    assert reasons
    assert {e["state"] for e in events[1:]} == {"live"}
    with recording.database.connect() as connection:
        compared = compare_table(connection, str(recording.lake), "shop", table)
    assert not compared.is_equal, "a case without any effect"
