"""The owner of a table gives a column a type of their own while a daemon reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from psycopg.conninfo import make_conninfo

from ingestd.testing.embedded.waiting import await_until
from tests.harness.config import polling_config, wal_config
from tests.harness.hostile import CALLED, hostile_calls

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

pytestmark = [pytest.mark.attack("table owner"), pytest.mark.thorough]

LIMIT_S = 60.0
RETYPE = (
    "ALTER TABLE t RENAME COLUMN at TO at0",
    "ALTER TABLE t ADD COLUMN at own NOT NULL DEFAULT 'a'",
)


@pytest.fixture
def owner(database: Database, stranger: str) -> Iterator[str]:
    """The owner of `t`, and of a type that has casts to text and timestamptz."""
    name = f"o_{database.name}"
    database.execute(
        f"CREATE ROLE {name}",
        "CREATE TYPE own AS ENUM ('a')",
        "CREATE TABLE t (id int PRIMARY KEY, at timestamptz NOT NULL, note text)",
        "CREATE INDEX ON t (at)",
        "INSERT INTO t SELECT i, now() - interval '1 day' FROM generate_series(1, 50) i",
        f"GRANT SELECT ON t TO {stranger}",
    )
    for target, how in (("text", ""), ("timestamptz", "AS IMPLICIT")):
        database.execute(
            f"CREATE FUNCTION to_{target}(own) RETURNS {target} LANGUAGE plpgsql AS $$ BEGIN"
            f" RAISE WARNING '{CALLED} by %', current_user; RETURN '2020-01-01 00:00:00'; END $$",
            f"CREATE CAST (own AS {target}) WITH FUNCTION to_{target}(own) {how}",
            f"ALTER FUNCTION to_{target}(own) OWNER TO {name}",
        )
    database.execute(f"ALTER TYPE own OWNER TO {name}", f"ALTER TABLE t OWNER TO {name}")
    yield name
    database.execute(f"DROP OWNED BY {name} CASCADE", f"DROP ROLE {name}")


def assert_uncalled(database: Database, role: str) -> None:
    assert not [line for line in hostile_calls(database.server) if role in line]


@pytest.mark.parametrize("cursor", ["", 'cursor = "at"'])
@pytest.mark.usefixtures("owner")
def test_a_daemon_that_polls_calls_no_cast(
    database: Database, lake: Path, make_daemon: MakeDaemon, stranger: str, cursor: str
) -> None:
    section = f'[sources.shop.table."public.t"]\n{cursor}\n'
    dsn = make_conninfo(database.dsn, user=stranger)
    daemon = make_daemon(polling_config(lake=lake, dsn=dsn, tables=["public.t"], extra=section))
    daemon.start_ready()
    database.execute("UPDATE t SET note = 'y', at = now() WHERE id < 9")
    with database.connect(autocommit=False) as session:
        for statement in RETYPE:
            session.execute(statement.encode())
        await_until(lambda: waits(database), LIMIT_S, "the daemon to wait for the lock")
        session.commit()
    database.execute("UPDATE t SET note = 'last' WHERE id = 10")
    # It reads on: of a column of that type the output function's text; a cursor it can't be.
    event = "table.stopped" if cursor else "epoch.committed"
    count = len(daemon.events(event))
    await_until(lambda: len(daemon.events(event)) > count - bool(cursor), LIMIT_S, event)
    daemon.close()
    assert_uncalled(database, stranger)


@pytest.mark.usefixtures("owner")
def test_a_wal_snapshot_calls_no_cast(
    database: Database, lake: Path, make_daemon: MakeDaemon, stranger: str
) -> None:
    """The second table is altered while the first is read, at the snapshot of both."""
    slot = f"p_{database.name}"
    database.execute(
        f"ALTER ROLE {stranger} REPLICATION",
        "CREATE TABLE a (id int PRIMARY KEY, x text)",
        "INSERT INTO a SELECT i, repeat('y', 500) FROM generate_series(1, 400000) i",
        f"GRANT SELECT ON a TO {stranger}",
        f"CREATE PUBLICATION {slot} FOR TABLE a, t",
        f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')",
    )
    extra = (
        f'slot = "{slot}"\npublication = "{slot}"\nmanage = false\n'
        'snapshot_workers = 1\nsnapshot_chunked_above = "10GB"'
    )
    dsn = make_conninfo(database.dsn, user=stranger)
    daemon = make_daemon(wal_config(lake=lake, dsn=dsn, tables=["public.*"], source_extra=extra))
    daemon.start()
    await_until(lambda: copies(database), LIMIT_S, "a COPY to run")
    database.execute(*RETYPE)
    assert copies(database)
    daemon.await_ready()
    daemon.close()
    assert_uncalled(database, stranger)


def waits(database: Database) -> bool:
    return bool(
        database.value(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND wait_event_type = 'Lock'",
            database.name,
        )
    )


def copies(database: Database) -> bool:
    return bool(
        database.value(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND query LIKE 'COPY%%'",
            database.name,
        )
    )
