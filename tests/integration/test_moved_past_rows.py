"""A slot moved past a row that the server can't output: what it skips, and what it still sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ingestd.failpoints import VARIABLE
from ingestd.model.schema import TableId
from tests.harness.compare import assert_lake_equals_source
from tests.harness.waiting import await_until
from tests.integration.test_large_rows import LIMIT_S, await_state
from tests.integration.test_unsent_rows import SMALL, deepest, lost, wal

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("table owner")

VICTIM = TableId("public", "victim")
MOVES = "capture.publication.after=delay:0.01>"
"""The publication is altered once: to leave the table out, before the slot is moved."""
KILLS = {
    "lost tables are recorded": "sink.tables_commit.after=crash",
    "the publication is altered": "capture.publication.after=crash",
    "the slot is moved": MOVES + "sink.advance.before=crash",
    "its position is durable": MOVES + "sink.advance.after=crash",
    "reading begins": MOVES + "capture.split.before=crash",
    "an empty table is read": MOVES + "capture.split.before=crash@2",
    "the stream begins": MOVES + "capture.receive.before=crash",
    "rows are durable": MOVES + "sink.raw_commit.after=crash",
    "an epoch is durable": MOVES + "sink.epochs_commit.after=crash",
    "a table is live again": MOVES + "sink.tables_commit.after=crash@2",
}
"""Kills in the order of the table in `slots/create.py`."""


@pytest.fixture
def deep(database: Database) -> str:
    """Create good tables and one for deep values; return one."""
    database.execute(
        "CREATE TABLE small (id int PRIMARY KEY, note text)",
        "CREATE TABLE victim (id int PRIMARY KEY, note text, secret text)",
        "CREATE TABLE big (id int PRIMARY KEY, v jsonpath)",
        "INSERT INTO big VALUES (1, '$.a')",
        "INSERT INTO victim VALUES (1, 'a')",
    )
    return deepest(database)


def await_passed(daemon: Daemon, lake: Path) -> None:
    await_until(lambda: lost(daemon), LIMIT_S, daemon.tail)
    await_state(daemon, lake, "big", "stopped")
    await_state(daemon, lake, "small", "live")


def test_a_table_out_of_the_publication_for_a_time(
    database: Database, lake: Path, make_daemon: MakeDaemon, deep: str
) -> None:
    """I6: its reader waits for the transaction that wrote it meanwhile, and no other one does."""
    daemon = make_daemon(wal(database, lake))
    daemon.start_ready()
    daemon.sigterm()
    [(name,)] = database.rows("SELECT pubname::text FROM pg_publication")
    with database.connect(autocommit=False) as connection:
        database.execute(f"ALTER PUBLICATION {name} DROP TABLE victim")
        connection.execute("INSERT INTO victim VALUES (2, 'unpublished')")
        database.execute(f"INSERT INTO big SELECT 2, {deep}")
        daemon.start()
        await_passed(daemon, lake)
        connection.commit()
    database.execute("INSERT INTO small VALUES (1, 'later')")
    assert_lake_equals_source(database, lake, tables=[SMALL, VICTIM])


@pytest.mark.thorough
def test_a_column_added_beside_a_list(
    database: Database, lake: Path, make_daemon: MakeDaemon, deep: str
) -> None:
    """I6: the list lacks the column until the start after the row that can't be sent."""
    extra = '[sources.shop.table."public.victim"]\nexclude_columns = ["secret"]'
    daemon = make_daemon(wal(database, lake, 'discover_interval = "60s"', extra=extra))
    daemon.start_ready()
    with database.connect(autocommit=False) as connection:
        database.execute("ALTER TABLE victim ADD COLUMN more text")
        connection.execute("INSERT INTO victim (id, note, more) VALUES (2, 'open', 'more')")
        database.execute(f"INSERT INTO big SELECT 2, {deep}")
        await_passed(daemon, lake)
        connection.commit()
    database.execute("INSERT INTO small VALUES (1, 'later')")

    def is_settled() -> bool:
        """Equal once all changes are in the lake: the column may have to be read after that."""
        try:
            assert_lake_equals_source(database, lake, tables=[SMALL, VICTIM])
        except AssertionError:
            return False
        return True

    await_until(is_settled, LIMIT_S, daemon.tail)


@pytest.mark.parametrize("again", ["", pytest.param("@2", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "kill",
    [
        pytest.param(kill, marks=() if kill == "the slot is moved" else pytest.mark.thorough)
        for kill in KILLS
    ],
)
def test_a_kill_while_the_slot_is_moved(
    database: Database, lake: Path, make_daemon: MakeDaemon, deep: str, *, kill: str, again: str
) -> None:
    """The slot is never beyond the lake's position while a table needs the changes between them.

    `small` has no rows, `gone` is not captured any more. `again`: another kill, which split of the
    next process is about to be read.
    """
    database.execute("CREATE TABLE gone (id int PRIMARY KEY)", "INSERT INTO gone VALUES (1)")
    daemon = make_daemon(wal(database, lake))
    daemon.start_ready()
    daemon.sigterm()
    database.execute(f"INSERT INTO big SELECT 2, {deep}", "DROP TABLE gone")
    kills = [KILLS[kill], f"capture.split.before=crash{again}"][: 2 if again else 1]
    for number, points in enumerate(kills):
        killed = make_daemon(
            wal(database, lake), f"killed_{number}", environment={VARIABLE: points}
        )
        killed.start()
        killed.await_end(LIMIT_S)
    daemon.start()
    database.execute("INSERT INTO small VALUES (1, 'later')")
    assert_lake_equals_source(database, lake, tables=[SMALL, VICTIM])
