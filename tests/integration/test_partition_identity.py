"""Partitions and tables that inherit: each has a replica identity of its own.

Publishing a table one of whose partitions has none would make that partition's own UPDATE and
DELETE fail. Where one gives less of old rows than the table's identity, changes would find no row;
where one is unlogged or a foreign table, none would come.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psycopg
import pytest

from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from ingestd.postgres.connection.session import connect
from ingestd.postgres.snapshot.read_probe import read_fault
from tests.harness.command_line import run_command
from tests.harness.compare import assert_lake_equals_source
from tests.harness.config import wal_config
from tests.harness.waiting import await_until
from tests.integration.test_pages import table_named

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60.0
REFUSED = (psycopg.errors.ObjectNotInPrerequisiteState, psycopg.errors.InvalidColumnReference)
PARTS = (
    "CREATE TABLE p_1 PARTITION OF p FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE p_2 PARTITION OF p FOR VALUES FROM (100) TO (200) PARTITION BY RANGE (k)",
    "CREATE TABLE p_20 PARTITION OF p_2 DEFAULT",
)
MADE = "CREATE TABLE p (k int {}, j int NOT NULL, note text) PARTITION BY RANGE (k)"
KEYED, KEYLESS = (MADE.format("PRIMARY KEY"), *PARTS), (MADE.format(""), *PARTS)
FULL = tuple(f"ALTER TABLE {name} REPLICA IDENTITY FULL" for name in ("p", "p_1", "p_20"))
OTHER = (
    "CREATE UNIQUE INDEX other ON p_20 (k, j)",
    "ALTER TABLE p_20 REPLICA IDENTITY USING INDEX other",
)


@dataclass(frozen=True)
class Case:
    """A partitioned table `p`, and its fault."""

    made: tuple[str, ...]
    why: str


CASES = {
    "root full": Case((*KEYLESS, FULL[0]), "partition public.p_1 has no usable replica identity"),
    "one not full": Case((*KEYLESS, *FULL[:2]), "partition public.p_20 has no usable"),
    "one has none": Case(
        (*KEYED, "ALTER TABLE p_20 REPLICA IDENTITY NOTHING"), "partition public.p_20 has no usable"
    ),
    "root has none": Case(
        (*KEYED, "ALTER TABLE p REPLICA IDENTITY NOTHING"),
        "partition public.p_1 has a replica identity, but the table has none",
    ),
    "only partitions": Case(
        (*KEYLESS, *FULL[1:]), "partition public.p_1 has a replica identity, but the table has none"
    ),
    "no partitions": Case(
        (
            "CREATE TABLE p (k int PRIMARY KEY, j int, note text)",
            "CREATE UNIQUE INDEX other ON p (k)",
            "ALTER TABLE p REPLICA IDENTITY USING INDEX other",
            "DROP INDEX other",
        ),
        "no usable replica identity",
    ),
    "unlogged": Case(
        (*KEYED, "ALTER TABLE p_20 SET UNLOGGED"), "partition public.p_20 is unlogged: it writes no"
    ),
    "none": Case(KEYLESS, "no usable replica identity"),
    "root full, keys": Case(
        (*KEYLESS, FULL[0], "ALTER TABLE p_1 ADD PRIMARY KEY (k)", FULL[2]),
        "partition public.p_1 does not send complete old rows, and it has no key",
    ),
    "root by index": Case(
        (
            *KEYED,
            "CREATE UNIQUE INDEX other ON p (k, j)",
            "ALTER TABLE p REPLICA IDENTITY USING INDEX other",
        ),
        "the replica identity of partition public.p_1 lacks 'j'",
    ),
}


def write(database: Database) -> None:
    """As their users do, whatever is published."""
    database.execute(
        "DELETE FROM p",
        "INSERT INTO p SELECT i, i, repeat('x', 10) FROM generate_series(20, 179, 20) i",
        "UPDATE p SET note = 'new' WHERE k % 40 = 0",
        "UPDATE p SET k = k + 1 WHERE k % 60 = 0",
        "DELETE FROM p WHERE k % 80 = 0",
        "DELETE FROM p WHERE k > 150",
        "DELETE FROM p WHERE k % 20 = 0",
    )


def configured(database: Database, lake: Path) -> str:
    return wal_config(lake=lake, dsn=database.dsn, source_extra='discover_interval = "500ms"')


def remedy_of(daemon: Daemon, table: str) -> tuple[str, str]:
    """What `check` says is wrong with it, and the line under that."""
    lines = run_command(daemon.folder / "ingestd.toml", "check").stdout.splitlines()
    [at] = [n for n, line in enumerate(lines) if f"table public.{table} " in line]
    assert lines[at].startswith("fail"), lines[at]
    return lines[at], lines[at + 1].strip()


def states(daemon: Daemon) -> dict[str, str]:
    changed = daemon.events("table.state") + daemon.events("table.stopped")
    changed.sort(key=lambda event: event["timestamp"])
    return {event["table"]: event.get("state", "stopped") for event in changed}


def await_state(daemon: Daemon, table: str, state: str) -> None:
    await_until(lambda: states(daemon).get(f"public.{table}") == state, LIMIT_S, daemon.tail)


def await_written(daemon: Daemon, database: Database, statement: str) -> None:
    """Wait until the server takes it: the table has left the publication."""

    def is_taken() -> bool:
        try:
            database.execute(statement)
        except REFUSED:
            return False
        return True

    await_until(is_taken, LIMIT_S, daemon.tail)


def assert_captured(daemon: Daemon, database: Database, lake: Path) -> None:
    """`p` is, or will be in a moment, and what is written to it is in the lake; ends the daemon."""
    await_state(daemon, "p", "live")
    write(database)
    assert_lake_equals_source(database, lake, limit_s=LIMIT_S)
    assert daemon.sigterm() == 0


def psql(database: Database, statement: str) -> None:
    """As a user who pastes it."""
    program = str(database.server.program("psql"))
    subprocess.run(
        [program, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", database.dsn],
        input=statement,
        text=True,
        check=True,
    )


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_partition_with_unusable_identity_is_published(
    database: Database, lake: Path, make_daemon: MakeDaemon, case: Case
) -> None:
    database.execute(*case.made, "CREATE TABLE fine (id int PRIMARY KEY)")
    daemon = make_daemon(configured(database, lake))
    told, remedy = remedy_of(daemon, "p")
    assert case.why in told
    daemon.start()
    await_state(daemon, "fine", "live")
    await_state(daemon, "p", "stopped")
    write(database)
    # What it says helps.
    psql(database, remedy.removeprefix("add a primary key, or "))
    assert_captured(daemon, database, lake)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "made", [(*KEYED, *OTHER, FULL[0]), (*KEYED, FULL[1]), (*KEYLESS, *FULL)], ids=str
)
def test_partitions_that_give_more_are_captured(
    database: Database, lake: Path, make_daemon: MakeDaemon, made: tuple[str, ...]
) -> None:
    database.execute(*made)
    daemon = make_daemon(configured(database, lake))
    daemon.start_ready()
    assert_captured(daemon, database, lake)


@pytest.mark.thorough
def test_a_generated_column_in_the_key(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """It is not sent: the rest of the key identifies no row, and 18 refuses the change."""
    database.execute(
        "CREATE TABLE t (a int, b int, g int GENERATED ALWAYS AS (a) STORED, PRIMARY KEY (b, g))",
        "INSERT INTO t (a, b) VALUES (1, 1), (2, 1), (3, 1)",
    )
    daemon = make_daemon(configured(database, lake))
    daemon.start()
    await_state(daemon, "t", "stopped")
    told, remedy = remedy_of(daemon, "t")
    assert "its replica identity has generated column 'g', which is not published" in told
    database.execute("UPDATE t SET a = 10 WHERE a = 1")
    if database.server.major < 18:
        psql(database, remedy)
    else:
        assert "add a primary key without generated columns" in remedy
        database.execute(
            "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD COLUMN id serial, ADD PRIMARY KEY (id)"
        )
    await_state(daemon, "t", "live")
    database.execute("UPDATE t SET a = 20 WHERE a = 2", "DELETE FROM t WHERE a = 3")
    # The harness would go by what is left of the key.
    verified = run_command(daemon.folder / "ingestd.toml", "verify", "shop", "public.t")
    assert "public.t: equal, 2 rows" in verified.stdout
    assert daemon.sigterm() == 0


def test_a_foreign_partition(database: Database, lake: Path, make_daemon: MakeDaemon) -> None:
    database.execute(
        *(*KEYLESS, *FULL),
        "CREATE FOREIGN DATA WRAPPER nothing",
        "CREATE SERVER elsewhere FOREIGN DATA WRAPPER nothing",
        "CREATE FOREIGN TABLE p_3 PARTITION OF p_2 FOR VALUES FROM (150) TO (160) SERVER elsewhere",
    )
    daemon = make_daemon(configured(database, lake))
    daemon.start()
    await_state(daemon, "p", "stopped")
    told, remedy = remedy_of(daemon, "p")
    assert "partition public.p_3 is a foreign table" in told
    psql(database, remedy)
    assert_captured(daemon, database, lake)


async def test_foreign_partitions_and_inheriting_tables_are_not_read(
    database: Database,
) -> None:
    """Their rows are another server's, in no snapshot of this one."""
    database.execute(
        *KEYLESS,
        "CREATE FOREIGN DATA WRAPPER nothing",
        "CREATE SERVER elsewhere FOREIGN DATA WRAPPER nothing",
        "CREATE TABLE parent (k int)",
        "CREATE FOREIGN TABLE child () INHERITS (parent) SERVER elsewhere",
        'CREATE FOREIGN TABLE "p ""3" PARTITION OF p_2 FOR VALUES FROM (150) TO (160)'
        " SERVER elsewhere",
    )
    async with await connect(database.dsn) as connection:
        fault = await read_fault(connection, await table_named(database, "p"), database.dsn)
        assert isinstance(fault, TableError)
        assert "is a foreign table: its rows are on another server" in fault.what
        assert fault.remedy is not None
        parent = await table_named(database, "parent")
        assert await read_fault(connection, parent, database.dsn) is None
        psql(database, fault.remedy)
        table = await table_named(database, "p")
        assert await read_fault(connection, table, database.dsn) is None


@pytest.mark.thorough
def test_a_partition_that_comes_without_identity(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    database.execute(*KEYLESS, *FULL)
    daemon = make_daemon(configured(database, lake))
    daemon.start_ready()
    await_state(daemon, "p", "live")
    database.execute("CREATE TABLE p_3 PARTITION OF p FOR VALUES FROM (200) TO (300)")
    database.execute("INSERT INTO p VALUES (200, 1, 'a')")

    await_written(daemon, database, "UPDATE p SET note = 'b' WHERE k = 200")
    await_state(daemon, "p", "stopped")
    psql(database, remedy_of(daemon, "p")[1])
    assert_captured(daemon, database, lake)


@pytest.mark.thorough
def test_a_table_is_published_without_those_that_inherit(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """Not for a moment: `child` has no identity; nor does `keyed`, published before, matter."""
    database.execute(
        "CREATE TABLE parent (k int PRIMARY KEY, note text)",
        "ALTER TABLE parent REPLICA IDENTITY NOTHING",
        "CREATE TABLE child () INHERITS (parent)",
        "CREATE TABLE keyed (PRIMARY KEY (k)) INHERITS (parent)",
    )
    daemon = make_daemon(configured(database, lake))
    daemon.start()
    await_state(daemon, "keyed", "live")

    def is_live_while_child_is_written() -> bool:
        database.execute(
            "INSERT INTO child VALUES (1, 'a')",
            "UPDATE ONLY child SET note = 'b'",
            "DELETE FROM ONLY child",
        )
        return states(daemon).get("public.parent") == "live"

    with database.connect() as other:
        other.execute("ALTER TABLE parent REPLICA IDENTITY DEFAULT")
        await_until(is_live_while_child_is_written, LIMIT_S, daemon.tail)
        for table in ("parent", "keyed", "child"):
            other.execute(f"INSERT INTO {table} VALUES (1, 'a'), (2, 'b')")
        other.execute("UPDATE parent SET note = 'c' WHERE k = 1")
        # Nothing is taken out with it.
        other.execute("ALTER TABLE parent REPLICA IDENTITY NOTHING")
        await_state(daemon, "parent", "stopped")
        await_written(daemon, database, "UPDATE parent SET note = 'd'")
        other.execute("ALTER TABLE parent REPLICA IDENTITY DEFAULT")
        await_state(daemon, "parent", "live")
        other.execute("UPDATE parent SET note = 'e' WHERE k = 1")
        # What is compared is then each one's own.
        for table in ("keyed", "child"):
            other.execute(f"ALTER TABLE {table} NO INHERIT parent")
    captured = [TableId("public", name) for name in ("keyed", "parent")]
    assert_lake_equals_source(database, lake, tables=captured, limit_s=LIMIT_S)
    assert daemon.sigterm() == 0
