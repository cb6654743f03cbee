"""A table that leaves the publication and returns to it, around a kill: it is read again (I6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ingestd.failpoints import VARIABLE
from tests.harness.config import wal_config
from tests.harness.databases import fresh_database
from tests.harness.shop_servers import assert_equal, snapshots

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60.0
KILLS = (
    "sink.tables_commit.after=crash@1",
    "sink.tables_commit.after=crash@2",
    "sink.epochs_commit.after=crash",
    "capture.confirm.before=crash",
)
"""From the first entry of a table in `_tables` on, until the catalog has been read once more."""
UNSEEN = (
    "ALTER PUBLICATION ingestd_shop DROP TABLE {0}",
    "UPDATE {0} SET note = 'unseen'",
    "ALTER PUBLICATION ingestd_shop ADD TABLE {0}",
)


def make_table(database: Database, name: str) -> None:
    database.execute(
        f"CREATE TABLE {name} (id int PRIMARY KEY, note text);"
        f" INSERT INTO {name} SELECT i, 'first' FROM generate_series(1, 50) i"
    )


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("when", "kill"), [*(("first start", kill) for kill in KILLS), ("new table", KILLS[1])]
)
def test_a_table_that_was_away_around_a_kill_is_read_again(
    postgres: PostgresServer, make_daemon: MakeDaemon, lake: Path, when: str, kill: str
) -> None:
    with fresh_database(postgres) as database:
        make_table(database, "orders")
        often = 'discover_interval = "300ms"'
        daemon = make_daemon(wal_config(lake=lake, dsn=database.dsn, source_extra=often))
        table = "orders"
        if when == "new table":
            daemon.start_ready()
            assert daemon.sigterm() == 0
            table = "items"
        daemon.environment[VARIABLE] = kill
        daemon.start()
        if when == "new table":
            daemon.await_ready()
            make_table(database, table)
        daemon.await_end(LIMIT_S)
        del daemon.environment[VARIABLE]
        database.execute(*(statement.format(table) for statement in UNSEEN))
        daemon.start_ready()
        assert_equal(database, lake)
        # Nor is anything read again for a kill alone.
        before = snapshots(lake)
        daemon.sigkill()
        daemon.start_ready()
        assert_equal(database, lake)
        assert snapshots(lake) == before
        assert daemon.sigterm() == 0
