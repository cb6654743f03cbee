"""Rows that the server has, but can't output: each stops its own table, and nothing else (I8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from ingestd.failpoints import VARIABLE
from ingestd.model.schema import TableId
from tests.harness.compare import assert_change_log_is_sound, assert_lake_equals_source, registry
from tests.harness.config import polling_config, wal_config
from tests.harness.waiting import await_until
from tests.integration.test_large_rows import (
    LIMIT_S,
    await_confirmed,
    await_rows,
    await_state,
    slot_of,
    table_state,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("table owner")

SMALL = TableId("public", "small")
OUTPUTS = {"0A000": "trigger_out", "XX000": "pg_ndistinct_out", "22P03": "enum_out"}
"""Output functions of the server that fail for texts, as an extension's may, by their code."""
DEEP = "('$' || repeat('.a', {n}))::jsonpath"
KEYLESS = "CREATE TABLE keyless (note text); ALTER TABLE keyless REPLICA IDENTITY FULL"
KINDS = {
    "jsonpath": ("jsonpath", "54001"),
    "jsonpath[]": ("jsonpath[]", "54001"),
    "pair": ("pair", "54001"),
    **{code: (f"t_{code.lower()}", code) for code in OUTPUTS},
}


def passes(database: Database, query: str) -> bool:
    try:
        database.execute(query)
    except psycopg.errors.StatementTooComplex:
        return False
    return True


def deepest(database: Database) -> str:
    """Return the deepest jsonpath that can be written."""
    low, high = 1, 200_000
    while high - low > 1:
        middle = (low + high) // 2
        if passes(database, f"DO $$ DECLARE v jsonpath := {DEEP.format(n=middle)}; BEGIN END $$"):
            low = middle
        else:
            high = middle
    return DEEP.format(n=low - 200)  # in a plan, or a list, it may be a little less


@pytest.fixture
def values(database: Database) -> dict[str, str]:
    """Create the types, a good table and one of each kind; return a value that has no text."""
    database.execute(
        "CREATE TABLE small (id int PRIMARY KEY, note text)",
        "CREATE TYPE pair AS (x int, v jsonpath)",
    )
    for code, function in OUTPUTS.items():
        name = KINDS[code][0]
        made = "LANGUAGE internal IMMUTABLE STRICT"
        database.execute(
            f"CREATE TYPE {name}",
            f"CREATE FUNCTION {name}_in(cstring) RETURNS {name} {made} AS 'textin'",
            f"CREATE FUNCTION {name}_out({name}) RETURNS cstring {made} AS '{function}'",
            f"CREATE TYPE {name} (INPUT = {name}_in, OUTPUT = {name}_out)",
        )
    deep = deepest(database)
    values = {kind: f"'a'::{name}" for kind, (name, _) in KINDS.items()}
    values |= {"jsonpath": deep, "jsonpath[]": f"ARRAY[{deep}]", "pair": f"ROW(1, {deep})::pair"}
    for number, (name, _) in enumerate(KINDS.values()):
        database.execute(f"CREATE TABLE bad_{number} (id int PRIMARY KEY, v {name})")
    return values


@pytest.fixture
def deep(database: Database) -> str:
    """Create a good table and one for deep values; return one."""
    database.execute(
        "CREATE TABLE small (id int PRIMARY KEY, note text)",
        "CREATE TABLE big (id int PRIMARY KEY, v jsonpath)",
        "INSERT INTO big VALUES (1, '$.a')",
    )
    return deepest(database)


def wal(database: Database, lake: Path, source: str = "", extra: str = "") -> str:
    return wal_config(lake=lake, dsn=database.dsn, source_extra=source, extra=extra)


def excluding(tables: int) -> str:
    return "\n".join(
        f'[sources.shop.table."public.bad_{n}"]\nexclude_columns = ["v"]' for n in range(tables)
    )


def is_recorded(lake: Path) -> bool:
    """Return whether the lake has states of all tables."""
    return len({row["table"] for row in registry(lake)}) > len(KINDS)


def commit_with_row(database: Database, deep: str) -> None:
    """Commit a row that can't be sent, with rows of other tables."""
    with database.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO small VALUES (1, 'with the row')")
        connection.execute("INSERT INTO keyless VALUES ('with the row')")
        connection.execute(f"INSERT INTO big SELECT 2, {deep}".encode())
        connection.commit()


def is_begun(lake: Path) -> bool:
    """Return whether the tables are being read, so the slot exists."""
    return any(row["state"] == "snapshotting" for row in registry(lake))


def lost(daemon: Daemon) -> int:
    return len(daemon.events("source.slot_lost"))


@pytest.mark.parametrize("kind", ["wal", "polling"])
def test_a_snapshot_stops_only_tables_it_cannot_read(
    database: Database, lake: Path, make_daemon: MakeDaemon, values: dict[str, str], kind: str
) -> None:
    config = wal_config if kind == "wal" else polling_config
    database.execute(
        "INSERT INTO small VALUES (1, 'a')",
        *(f"INSERT INTO bad_{n} SELECT 1, {value}" for n, value in enumerate(values.values())),
    )
    daemon = make_daemon(config(lake=lake, dsn=database.dsn))
    daemon.start()
    await_until(lambda: is_recorded(lake), LIMIT_S, daemon.tail)
    await_state(daemon, lake, "small", "live")
    await_rows(lake, 1)
    for number, (name, code) in enumerate(KINDS.values()):
        stopped = await_state(daemon, lake, f"bad_{number}", "stopped")
        is_deep = "nested too deeply" in stopped["reason"]
        assert is_deep if code == "54001" else code in stopped["reason"], (name, stopped)
        assert kind != "wal" or "in blocks 0 to the last" in stopped["reason"]
    database.execute("INSERT INTO small VALUES (2, 'b')")
    await_rows(lake, 2)
    assert table_state(lake, "small")["state"] == "live"
    assert "exclude_columns" in str(daemon.events("table.stopped"))
    daemon.sigterm()
    daemon.write_config(config(lake=lake, dsn=database.dsn, extra=excluding(len(values))))
    daemon.start_ready()
    assert_change_log_is_sound(database, lake, is_dense=False)


@pytest.mark.thorough
def test_a_poll_stops_only_the_table_it_cannot_read(
    database: Database, lake: Path, make_daemon: MakeDaemon, values: dict[str, str]
) -> None:
    daemon = make_daemon(polling_config(lake=lake, dsn=database.dsn))
    daemon.start_ready()
    for number, value in enumerate(values.values()):
        database.execute(f"INSERT INTO bad_{number} SELECT 1, {value}")
        await_state(daemon, lake, f"bad_{number}", "stopped")
        database.execute(f"INSERT INTO small VALUES ({number}, 'later')")
        await_rows(lake, number + 1)
    assert table_state(lake, "small")["state"] == "live"


@pytest.mark.parametrize("way", ["streamed", pytest.param("drained", marks=pytest.mark.thorough)])
def test_a_row_that_cannot_be_streamed_stops_its_table(
    database: Database, lake: Path, make_daemon: MakeDaemon, deep: str, way: str
) -> None:
    """Changes of the other table in that transaction, and later, are in the lake once."""
    daemon = make_daemon(wal(database, lake, "catch_up_above = 0" if way == "drained" else ""))
    daemon.start_ready()
    if way == "drained":
        daemon.sigterm()
    with database.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO small VALUES (1, 'before it')")
        connection.execute(f"INSERT INTO big SELECT 2, {deep}".encode())
        connection.execute("INSERT INTO small VALUES (2, 'after it')")
        connection.commit()
    if way == "drained":
        daemon.start()
    stopped = await_state(daemon, lake, "big", "stopped")
    assert "nested too deeply" in stopped["reason"]
    database.execute("INSERT INTO small VALUES (3, 'later')", "DELETE FROM small WHERE id = 2")
    assert_lake_equals_source(database, lake, tables=[SMALL])
    assert not [e for e in daemon.events("source.failed") if e["state"] == "stopped"]
    # Other rows like it are not sent at all.
    assert lost(daemon) == 1
    database.execute(f"INSERT INTO big SELECT 3, {deep}", "INSERT INTO small VALUES (4, 'x')")
    await_confirmed(database, daemon)
    assert_lake_equals_source(database, lake, tables=[SMALL])
    assert lost(daemon) == 1
    # The remedy: correct the rows, and restart.
    assert "correct or delete the row" in str(daemon.events("table.stopped"))
    database.execute("DELETE FROM big WHERE id = 2", "UPDATE big SET v = '$.b' WHERE id = 3")
    daemon.sigterm()
    daemon.start_ready()
    await_state(daemon, lake, "big", "live")
    database.execute("INSERT INTO big VALUES (4, '$.c')")
    assert_lake_equals_source(database, lake)


@pytest.mark.thorough
def test_each_kind_of_row_not_sent_stops_its_table(
    database: Database, lake: Path, make_daemon: MakeDaemon, values: dict[str, str]
) -> None:
    daemon = make_daemon(wal(database, lake))
    daemon.start_ready()
    for number, value in enumerate(values.values()):
        database.execute(
            f"BEGIN; INSERT INTO small VALUES ({number}, ''); INSERT INTO bad_{number} "
            f"SELECT 1, {value}; DELETE FROM bad_{number}; COMMIT"
        )
        await_state(daemon, lake, f"bad_{number}", "stopped")
        await_state(daemon, lake, "small", "live")  # read again: the new slot exists
        assert lost(daemon) == number + 1
    assert_lake_equals_source(database, lake, tables=[SMALL])
    assert not [e for e in daemon.events("source.failed") if e["state"] == "stopped"]


@pytest.mark.parametrize("partitioned", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("first", ["", "INSERT INTO big VALUES (2, '$.b');"])
def test_a_deleted_row_that_was_not_sent_is_found(
    database: Database,
    lake: Path,
    make_daemon: MakeDaemon,
    deep: str,
    first: str,
    *,
    partitioned: bool,
) -> None:
    """No snapshot sees it; it is the only table that was sent."""
    if partitioned:
        database.execute(
            "DROP TABLE big",
            "CREATE TABLE big (id int PRIMARY KEY, v jsonpath) PARTITION BY LIST (id)",
            "CREATE TABLE big_some PARTITION OF big FOR VALUES IN (1, 2)",
            "CREATE TABLE big_others PARTITION OF big DEFAULT",
        )
    daemon = make_daemon(wal(database, lake))
    daemon.start_ready()
    database.execute(
        f"BEGIN; {first} INSERT INTO big SELECT 3, {deep}; DELETE FROM big WHERE id = 3; COMMIT"
    )
    await_state(daemon, lake, "big", "stopped")
    database.execute("INSERT INTO small VALUES (1, 'later')")
    assert_lake_equals_source(database, lake, tables=[SMALL])


def test_a_table_created_again_stays_stopped(
    database: Database, lake: Path, make_daemon: MakeDaemon, deep: str
) -> None:
    """Otherwise its owner could have all tables read again as often as they like."""
    daemon = make_daemon(wal(database, lake))
    daemon.start_ready()
    for number in range(3):
        database.execute(
            f"INSERT INTO big SELECT 2, {deep}",
            "DROP TABLE big",
            "CREATE TABLE big (id int PRIMARY KEY, v jsonpath)",
            f"INSERT INTO small VALUES ({number}, 'later')",
        )
        await_state(daemon, lake, "big", "stopped")
        await_rows(lake, number + 1)
    assert lost(daemon) == 1


def test_a_row_not_sent_while_tables_are_read_again(
    database: Database, lake: Path, make_daemon: MakeDaemon, deep: str
) -> None:
    """The slot of a source without a table that needs continuity is replaced, too."""
    database.execute("CREATE TABLE second (id int PRIMARY KEY, v jsonpath)")
    slowly = {VARIABLE: "capture.split.before=delay:1@1+"}
    daemon = make_daemon(wal(database, lake), environment=slowly)
    daemon.start()
    await_until(lambda: is_begun(lake), LIMIT_S, daemon.tail)
    database.execute(f"INSERT INTO second SELECT 2, {deep}", "DELETE FROM second")
    await_state(daemon, lake, "second", "stopped")
    await_state(daemon, lake, "small", "live")
    database.execute("INSERT INTO small VALUES (1, 'later')")
    await_rows(lake, 1)


@pytest.mark.parametrize("held", ["big", "all", "row"])
def test_an_open_transaction_holds_up_no_other_table(
    database: Database, lake: Path, make_daemon: MakeDaemon, deep: str, held: str
) -> None:
    """The slot passes the row without waiting for it; what it writes is complete in the end."""
    database.execute(KEYLESS)
    daemon = make_daemon(wal(database, lake))
    daemon.start_ready()
    with database.connect(autocommit=False) as connection:
        row = deep if held == "row" else "'$'"
        connection.execute(f"INSERT INTO big SELECT 3, {row}".encode())
        if held == "all":
            connection.execute("INSERT INTO small VALUES (100, 'open')")
            connection.execute("INSERT INTO keyless VALUES ('open')")
        commit_with_row(database, deep)
        await_until(lambda: lost(daemon), LIMIT_S, daemon.tail)
        database.execute("INSERT INTO small VALUES (2, '')", "INSERT INTO keyless VALUES ('later')")
        await_rows(lake, 2)
        await_state(daemon, lake, "small", "live")
        await_state(daemon, lake, "big", "stopped")
        connection.execute("INSERT INTO small VALUES (101, 'open')")
        connection.commit()
    assert_lake_equals_source(database, lake, tables=[SMALL, TableId("public", "keyless")])
    assert lost(daemon) == (2 if held == "row" else 1)


@pytest.mark.thorough
@pytest.mark.parametrize("is_open", [False, True])
def test_a_kill_while_the_slot_passes_a_row_loses_nothing(
    database: Database, lake: Path, make_daemon: MakeDaemon, deep: str, *, is_open: bool
) -> None:
    database.execute(KEYLESS)
    daemon = make_daemon(wal(database, lake))
    daemon.start_ready()
    daemon.sigterm()
    slowly = make_daemon(
        wal(database, lake), "slow", environment={VARIABLE: "capture.split.before=delay:3@1+"}
    )
    with database.connect(autocommit=False) as connection:
        if is_open:
            connection.execute("INSERT INTO small VALUES (100, 'open')")
        commit_with_row(database, deep)
        slowly.start()
        await_until(lambda: lost(slowly), LIMIT_S, slowly.tail)
        await_state(slowly, lake, "big", "stopped")
        slowly.sigkill()
        daemon.start()
        database.execute("INSERT INTO small VALUES (2, '')", "INSERT INTO keyless VALUES ('later')")
        connection.commit()
    assert_lake_equals_source(database, lake, tables=[SMALL, TableId("public", "keyless")])


@pytest.mark.thorough
def test_no_table_stops_for_one_row_of_another(
    database: Database, lake: Path, make_daemon: MakeDaemon, deep: str
) -> None:
    """Where it is not certain whose row it was, all tables are read, once.

    For the next one in an hour all tables of its transaction stop, until the next start.
    """
    daemon = make_daemon(wal(database, lake))
    daemon.start_ready()
    attack = (
        "BEGIN; INSERT INTO big VALUES ({n}, '$'); INSERT INTO small VALUES ({n}, '');"
        f" INSERT INTO big SELECT {{n}} + 1, {deep}; DELETE FROM big WHERE id = {{n}} + 1; COMMIT"
    )
    database.execute(attack.format(n=10))
    await_until(lambda: lost(daemon) == 1, LIMIT_S, daemon.tail)
    assert_lake_equals_source(database, lake)
    assert not daemon.events("table.stopped")
    database.execute(attack.format(n=20))
    await_until(lambda: lost(daemon) == 2, LIMIT_S, daemon.tail)
    for name in ("big", "small"):
        await_state(daemon, lake, name, "stopped")
    daemon.sigterm()
    daemon.start_ready()
    assert_lake_equals_source(database, lake)
    assert not [e for e in daemon.events("source.failed") if e["state"] == "stopped"]


@pytest.mark.thorough
@pytest.mark.parametrize("setting", ['slot_lost = "stop"', 'snapshot = "never"'])
def test_no_slot_is_replaced_against_the_config(
    database: Database, lake: Path, make_daemon: MakeDaemon, deep: str, setting: str
) -> None:
    daemon = make_daemon(wal(database, lake, setting))
    daemon.start_ready()
    slot = slot_of(database)
    database.execute(f"INSERT INTO big SELECT 2, {deep}")
    [failed, *_] = await_until(lambda: daemon.events("source.failed"), LIMIT_S, daemon.tail)
    assert failed["state"] == "stopped"
    assert "nested too deeply" in failed["reason"]
    assert 'slot_lost = "resnapshot" and snapshot = "initial"' in failed["remedy"]
    assert not lost(daemon)
    assert slot_of(database) == slot
    daemon.sigterm()
    daemon.write_config(wal(database, lake))
    daemon.start()
    await_until(lambda: lost(daemon), LIMIT_S, daemon.tail)
    await_state(daemon, lake, "big", "stopped")
    assert_lake_equals_source(database, lake, tables=[SMALL])
