"""Rows that the server can't output, again and again: who commits them stops only their tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ingestd.failpoints import VARIABLE
from ingestd.model.schema import TableId
from tests.harness.compare import assert_lake_equals_source, registry
from tests.harness.databases import skip_without_lists
from tests.harness.waiting import await_until
from tests.integration.test_large_rows import LIMIT_S, await_confirmed, await_state
from tests.integration.test_moved_past_rows import KILLS
from tests.integration.test_unsent_rows import SMALL, deepest, lost, wal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("table owner")

VICTIM = TableId("public", "victim")
TABLES = 10


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    """Create a role that owns ten tables, beside two of another owner; return its name."""
    name = f"owner_{database.name}"
    database.execute(
        f"CREATE ROLE {name}",
        f"GRANT ALL ON SCHEMA public TO {name}",
        "CREATE TABLE small (id int PRIMARY KEY, note text)",
        "CREATE TABLE victim (id int PRIMARY KEY, note text)",
    )
    for number in range(TABLES):
        own(database, name, f"bad_{number}")
    yield name
    database.execute(f"DROP OWNED BY {name}", f"DROP ROLE {name}")


@pytest.fixture
def deep(database: Database, role: str) -> str:
    """Return a value that has no text."""
    assert role
    return deepest(database)


def own(database: Database, role: str, table: str) -> None:
    database.execute(
        f"CREATE TABLE {table} (id int PRIMARY KEY, v jsonpath)",
        f"ALTER TABLE {table} OWNER TO {role}",
    )


def commit_row(database: Database, deep: str, table: str, *with_rows_of: str) -> None:
    """Commit a row that can't be sent, and that no snapshot sees; first rows of these and `table`.

    So it is not certain whose row it was, if there are others.
    """
    beside = "".join(
        f"INSERT INTO {name} SELECT coalesce(max(id), 0) + 1 FROM {name};"
        for name in (*with_rows_of, table)
    )
    database.execute(
        f"BEGIN; {beside} INSERT INTO {table} SELECT -1, {deep};"
        f" DELETE FROM {table} WHERE id < 0; COMMIT"
    )


def stops(daemon: Daemon) -> list[object]:
    """Return why the source stopped."""
    return [e["reason"] for e in daemon.events("source.failed") if e["state"] == "stopped"]


def states(lake: Path) -> dict[str, str]:
    return {row["table"].removeprefix("public."): row["state"] for row in registry(lake)}


def await_recorded(daemon: Daemon, lake: Path, name: str) -> None:
    await_until(lambda: name in states(lake), LIMIT_S, daemon.tail)


def await_delivered(database: Database, daemon: Daemon, lake: Path) -> None:
    """Wait until the stream has passed all rows so far, and tables are read again."""
    database.execute("INSERT INTO small SELECT coalesce(max(id), 0) + 1, 'later' FROM small")
    await_confirmed(database, daemon)
    await_state(daemon, lake, "small", "live")
    assert not stops(daemon)


def test_an_owner_of_uncertain_rows_stops_only_own_tables(
    database: Database, lake: Path, make_daemon: MakeDaemon, deep: str
) -> None:
    daemon = make_daemon(wal(database, lake))
    daemon.start_ready()
    for number in range(0, 6, 2):
        commit_row(database, deep, f"bad_{number}", f"bad_{number + 1}")
        database.execute(f"INSERT INTO victim VALUES ({number}, 'between')")
        await_delivered(database, daemon, lake)
    assert lost(daemon) == 3
    found = states(lake)
    assert {n for n, state in found.items() if state == "stopped"} == {
        f"bad_{n}" for n in range(2, 6)
    }
    commit_row(database, deep, "bad_2", "bad_3")
    await_delivered(database, daemon, lake)
    assert lost(daemon) == 3
    untouched = [TableId("public", f"bad_{n}") for n in (0, 1, 6)]
    assert_lake_equals_source(database, lake, tables=[SMALL, VICTIM, *untouched])


@pytest.mark.thorough
def test_an_owner_of_many_tables_stops_only_these(
    database: Database, lake: Path, make_daemon: MakeDaemon, role: str, deep: str
) -> None:
    """Also those that are created later: their rows are not sent."""
    daemon = make_daemon(wal(database, lake, 'discover_interval = "1s"'))
    daemon.start_ready()
    for number in range(TABLES):
        commit_row(database, deep, f"bad_{number}")
        await_delivered(database, daemon, lake)
    assert lost(daemon) == 4
    for number in range(TABLES):
        await_state(daemon, lake, f"bad_{number}", "stopped")
    for number in range(3):
        own(database, role, f"later_{number}")
        await_recorded(daemon, lake, f"later_{number}")
        commit_row(database, deep, f"later_{number}")
        await_delivered(database, daemon, lake)
        assert states(lake)[f"later_{number}"] == "stopped"
    assert lost(daemon) == 4
    database.execute("INSERT INTO victim VALUES (1, 'later')")
    assert_lake_equals_source(database, lake, tables=[SMALL, VICTIM])
    said = [e for e in daemon.events("table.stopped") if e["table"] == "public.bad_9"][-1]
    assert role in said["reason"]
    assert "exclude the tables of this role" in said["remedy"]


@pytest.mark.thorough
def test_a_dropped_table_counts_for_its_owner(
    database: Database, lake: Path, make_daemon: MakeDaemon, deep: str
) -> None:
    daemon = make_daemon(wal(database, lake))
    daemon.start_ready()
    for number in range(6):
        commit_row(database, deep, f"bad_{number}")
        database.execute(f"DROP TABLE bad_{number}")
        await_delivered(database, daemon, lake)
    assert lost(daemon) == 4
    assert_lake_equals_source(database, lake, tables=[SMALL, VICTIM])


@pytest.mark.thorough
def test_a_table_written_with_such_rows_comes_back(
    database: Database, lake: Path, make_daemon: MakeDaemon, deep: str
) -> None:
    """Who can write it in the same transaction can stop it; its remedy helps."""
    daemon = make_daemon(wal(database, lake))
    daemon.start_ready()
    for number in range(2):
        commit_row(database, deep, f"bad_{number}", "victim")
        await_delivered(database, daemon, lake)
    stopped = await_state(daemon, lake, "victim", "stopped")
    assert "in one transaction with" in stopped["reason"]
    assert "nested too deeply" in stopped["reason"]
    [said] = [e for e in daemon.events("table.stopped") if e["table"] == "public.victim"]
    assert "restart" in said["remedy"]
    database.execute("INSERT INTO victim VALUES (100, 'while it is stopped')")
    await_delivered(database, daemon, lake)
    daemon.sigterm()
    daemon.start_ready()
    await_state(daemon, lake, "victim", "live")
    database.execute("INSERT INTO victim VALUES (101, 'later')")
    assert_lake_equals_source(database, lake)


@pytest.mark.thorough
def test_rows_of_open_transactions_stop_nothing_more(
    database: Database, lake: Path, make_daemon: MakeDaemon, deep: str
) -> None:
    """A slot that was moved still sends them: no other table stops for one, nor does the source."""
    daemon = make_daemon(wal(database, lake))
    daemon.start_ready()
    sessions = [database.connect(autocommit=False) for _ in range(4)]
    for number, session in enumerate(sessions):
        session.execute(f"INSERT INTO victim VALUES ({number + 1}, 'open')")
        session.execute(f"INSERT INTO bad_0 SELECT {-number - 10}, {deep}".encode())
        session.execute(b"DELETE FROM bad_0")
    commit_row(database, deep, "bad_0")
    await_delivered(database, daemon, lake)
    for number, session in enumerate(sessions):
        session.commit()
        session.close()
        await_delivered(database, daemon, lake)
        assert lost(daemon) == number + 2
    assert {n for n, state in states(lake).items() if state == "stopped"} == {"bad_0"}
    assert_lake_equals_source(database, lake, tables=[SMALL, VICTIM])


@pytest.mark.thorough
def test_a_locked_table_leaves_the_publication(
    database: Database, lake: Path, make_daemon: MakeDaemon, deep: str
) -> None:
    """A lock that admits writers would otherwise keep its rows coming.

    A transaction that was open meanwhile is complete, too.
    """
    daemon = make_daemon(wal(database, lake))
    daemon.start_ready()
    with (
        database.connect(autocommit=False) as connection,
        database.connect(autocommit=False) as earlier,
    ):
        connection.execute("LOCK TABLE bad_0 IN SHARE UPDATE EXCLUSIVE MODE")
        earlier.execute("INSERT INTO small VALUES (1000, 'open')")
        for _ in range(3):
            commit_row(database, deep, "bad_0")
            await_delivered(database, daemon, lake)
        await_state(daemon, lake, "victim", "live")
        earlier.execute("INSERT INTO victim VALUES (1000, 'open')")
        earlier.commit()
    database.execute("INSERT INTO victim VALUES (1, 'later')")
    assert_lake_equals_source(database, lake, tables=[SMALL, VICTIM])
    assert {n for n, state in states(lake).items() if state == "stopped"} == {"bad_0"}
    assert lost(daemon) == 1
    read = [e for e in daemon.events("table.state") if e["table"] == "public.victim"]
    assert [e["state"] for e in read].count("live") == 2, read


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kill", "is_locked"),
    [
        ("the publication is altered", False),
        ("the publication is altered", True),
        ("the slot is moved", True),
        ("its position is durable", False),
    ],
)
def test_a_kill_while_tables_are_kept_out(
    database: Database,
    lake: Path,
    make_daemon: MakeDaemon,
    deep: str,
    *,
    kill: str,
    is_locked: bool,
) -> None:
    """The next process knows of no row: it streams to it again, or the slot is past it.

    `is_locked`: so the publication is replaced.
    """
    daemon = make_daemon(wal(database, lake))
    daemon.start_ready()
    daemon.sigterm()
    killed = make_daemon(wal(database, lake), "killed", environment={VARIABLE: KILLS[kill]})
    with database.connect(autocommit=False) as holder:
        if is_locked:
            holder.execute("LOCK TABLE bad_1 IN SHARE UPDATE EXCLUSIVE MODE")
        killed.start()
        commit_row(database, deep, "bad_0", "victim")
        await_delivered(database, killed, lake)
        commit_row(database, deep, "bad_1", "victim")
        killed.await_end(LIMIT_S)
    daemon.start()
    database.execute("INSERT INTO victim VALUES (100, 'later')")
    await_delivered(database, daemon, lake)
    for name in ("victim", "bad_0", "bad_1"):
        await_state(daemon, lake, name, "live")
    assert_lake_equals_source(database, lake)


@pytest.mark.parametrize(
    "stops_source",
    [False, pytest.param(True, marks=pytest.mark.thorough)],
    ids=["compares", "may fail"],
)
def test_a_row_filter_that_compares_can_not_have_failed(
    database: Database, lake: Path, make_daemon: MakeDaemon, deep: str, *, stops_source: bool
) -> None:
    """Another table's filter: if it can fail, the row may be of that table."""
    skip_without_lists(database)
    condition = "100 / id > 0" if stops_source else "id > 0 AND note IS NOT NULL"
    database.execute(f"CREATE PUBLICATION filtered FOR TABLE victim WHERE ({condition})")
    daemon = make_daemon(wal(database, lake, 'publication = "filtered"'))
    daemon.start_ready()
    commit_row(database, deep, "bad_0", "bad_1")
    await_delivered(database, daemon, lake)
    commit_row(database, deep, "bad_2", "bad_3")
    if stops_source:
        await_until(lambda: stops(daemon), LIMIT_S, daemon.tail)
        return
    database.execute("INSERT INTO victim VALUES (1, 'later')")
    await_delivered(database, daemon, lake)
    stopped = {n for n, state in states(lake).items() if state == "stopped"}
    assert stopped == {"bad_2", "bad_3"}
    assert_lake_equals_source(database, lake, tables=[SMALL, VICTIM])
