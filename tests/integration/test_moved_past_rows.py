"""A slot moved past a row that the server can't output: what it skips, and what it still sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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
    await_state(daemon, lake, "victim", "live")
    assert_lake_equals_source(database, lake, tables=[SMALL, VICTIM])
