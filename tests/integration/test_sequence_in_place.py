"""A sequence and a domain of the table's name run nothing in the check of the lock.

A sequence has no row type, so its name is free for a domain, whose checks the planner makes.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from psycopg.conninfo import make_conninfo

from ingestd.model.errors import TableChangedError
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.relation_lock import lock_table
from ingestd.postgres.connection.session import connect
from tests.harness.owned_code import calls_of, hand_over
from tests.integration.test_pages import table_named

if TYPE_CHECKING:
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("table owner")


@pytest.mark.parametrize("how", ["renamed", "dropped"])
async def test_a_domain_beside_a_sequence_is_not_checked(
    database: Database, owner: str, stranger: str, how: str
) -> None:
    hand_over(database, owner)
    database.execute(
        f"ALTER SCHEMA m OWNER TO {owner}",
        "CREATE TABLE m.t (id int PRIMARY KEY, note text)",
        f"ALTER TABLE m.t OWNER TO {owner}",
        "INSERT INTO m.t SELECT i FROM generate_series(1, 9) i",
        "GRANT SELECT ON m.t TO PUBLIC",
    )
    table = await table_named(database, "t")
    blocks = BlockRange("m", "t", oid=table.oid)
    as_owner = f"SET ROLE {owner}; "
    database.execute(
        as_owner + ("ALTER TABLE m.t RENAME TO before" if how == "renamed" else "DROP TABLE m.t"),
        as_owner + "CREATE TYPE m.row AS (id int, note text)",
        as_owner + "CREATE SEQUENCE m.t",
        as_owner + "CREATE DOMAIN m.t AS m.row CHECK (m.evil('') = 1)",
    )
    async with await connect(
        make_conninfo(database.dsn, user=stranger), autocommit=False
    ) as connection:
        with contextlib.suppress(TableChangedError):
            await lock_table(connection, table, blocks)
    assert not calls_of(database, stranger)


async def test_no_other_tables_rows_are_copied(
    database: Database, owner: str, stranger: str
) -> None:
    """What is gained. A sequence keeps it when the transaction is rolled back.

    In kind `wal` the session is read-write, as of `fingerprint_queries._has_older_row`.
    """
    database.execute(
        f"ALTER SCHEMA m OWNER TO {owner}",
        "CREATE SCHEMA vault",
        "CREATE TABLE vault.secret (v text)",
        "INSERT INTO vault.secret VALUES ('4111-1111')",
        f"GRANT USAGE ON SCHEMA vault TO {stranger}",
        f"GRANT SELECT ON vault.secret TO {stranger}",
        "CREATE TABLE m.t (id int PRIMARY KEY)",
        f"ALTER TABLE m.t OWNER TO {owner}",
        "GRANT SELECT ON m.t TO PUBLIC",
    )
    table = await table_named(database, "t")
    as_owner = f"SET ROLE {owner}; "
    database.execute(
        as_owner + "CREATE SEQUENCE m.loot; GRANT ALL ON SEQUENCE m.loot TO PUBLIC",
        as_owner + "CREATE FUNCTION m.take() RETURNS int LANGUAGE plpgsql AS $$ BEGIN"
        " PERFORM setval('m.loot', replace(v, '-', '')::int8) FROM vault.secret; RETURN 1; END $$",
        as_owner + "CREATE FUNCTION m.fixed() RETURNS bool IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN"
        " PERFORM m.take(); RETURN true; EXCEPTION WHEN insufficient_privilege THEN RETURN true;"
        " END $$",
        as_owner + "ALTER TABLE m.t RENAME TO before",
        as_owner + "CREATE TYPE m.row AS (id int)",
        as_owner + "CREATE SEQUENCE m.t",
        as_owner + "CREATE DOMAIN m.t AS m.row CHECK (m.fixed())",
    )
    async with await connect(make_conninfo(database.dsn, user=stranger)) as connection:
        with contextlib.suppress(TableChangedError):
            async with connection.transaction():
                await lock_table(connection, table, BlockRange("m", "t", oid=table.oid))
    assert database.value("SELECT last_value FROM m.loot") == 1
