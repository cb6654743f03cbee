"""A daemon that waits for a lock calls nothing of what the table's owner puts in its way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from psycopg.conninfo import make_conninfo

from ingestd.testing.embedded.waiting import await_until
from tests.harness.config import polling_config
from tests.harness.owned_code import calls_of, hand_over

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

pytestmark = [pytest.mark.attack("table owner"), pytest.mark.thorough]

SWAPS = {
    "a sequence": (
        "CREATE TABLE m.t (id int PRIMARY KEY)",
        (
            "ALTER TABLE m.t RENAME TO before",
            "CREATE TYPE m.row AS (id int)",
            "CREATE SEQUENCE m.t",
            "CREATE DOMAIN m.t AS m.row CHECK (m.evil('') = 1)",
        ),
    ),
    "a parent": (
        (
            "CREATE TABLE m.t (id int PRIMARY KEY) PARTITION BY RANGE (id);"
            "CREATE TABLE m.t1 PARTITION OF m.t FOR VALUES FROM (0) TO (1000)"
        ),
        (
            "CREATE TABLE m.over (id int) PARTITION BY RANGE ((m.evil('') + id))",
            "ALTER TABLE m.over ATTACH PARTITION m.t FOR VALUES FROM (MINVALUE) TO (MAXVALUE)",
        ),
    ),
}


@pytest.mark.parametrize("how", SWAPS)
def test_nothing_of_the_owners_is_called(
    database: Database, lake: Path, make_daemon: MakeDaemon, owner: str, how: str
) -> None:
    role = f"d_{database.name}"
    hand_over(database, owner)
    made, swap = SWAPS[how]
    database.execute(
        f"CREATE ROLE {role} LOGIN",
        f"GRANT USAGE ON SCHEMA m TO {role}",
        f"GRANT {owner} TO CURRENT_USER",
        f"ALTER SCHEMA m OWNER TO {owner}",
        f"SET ROLE {owner}; {made}",
        "INSERT INTO m.t SELECT generate_series(1, 9)",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA m TO {role}",
    )
    dsn = make_conninfo(database.dsn, user=role)
    section = '[sources.shop.table."m.t"]\ndetect_deletes = "1s"\n'
    config = polling_config(lake=lake, dsn=dsn, tables=["m.t"], extra=section)
    daemon = make_daemon(config.replace('"500ms"', '"15s"'))
    try:
        daemon.start_ready()
        await_until(
            lambda: any(e.get("state") == "live" for e in daemon.events("table.state")), 20, "live"
        )
        with database.connect(autocommit=False) as connection:
            connection.execute(f"SET ROLE {owner}".encode())
            connection.execute(b"LOCK TABLE m.t IN ACCESS EXCLUSIVE MODE")
            for statement in swap:
                connection.execute(statement.encode())
            time.sleep(1.0)  # the daemon waits for the lock
        time.sleep(6.0)
        assert not calls_of(database, role)
    finally:
        daemon.close()
        database.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")
