"""A type is trusted only with all that is called for it, not by its owner alone."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from psycopg.conninfo import make_conninfo

from ingestd.model.errors import TableError
from ingestd.postgres.catalog.trusted_columns import read_type_trust
from ingestd.postgres.connection.session import connect
from ingestd.postgres.snapshot.where import check_condition
from tests.harness.owned_code import BODY, calls_of
from tests.integration.test_pages import table_named
from tests.integration.test_trusted_conditions import read

if TYPE_CHECKING:
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("table owner")


async def test_the_remedy_does_not_open_the_door(
    database: Database, owner: str, stranger: str
) -> None:
    database.execute(
        "CREATE TYPE m.own AS ENUM ('a')",
        f"CREATE FUNCTION m.cast_it(m.own) RETURNS int LANGUAGE plpgsql AS $$ {BODY.format(1)} $$",
        "CREATE CAST (m.own AS int) WITH FUNCTION m.cast_it(m.own) AS IMPLICIT",
        f"ALTER TYPE m.own OWNER TO {owner}",
        f"ALTER FUNCTION m.cast_it(m.own) OWNER TO {owner}",
        "CREATE TABLE t (id int PRIMARY KEY, e m.own)",
        "INSERT INTO t VALUES (1, 'a')",
        "GRANT SELECT ON t TO PUBLIC",
    )
    table = await table_named(database, "t")
    dsn = make_conninfo(database.dsn, user=stranger)
    with pytest.raises(TableError) as told:
        await check_condition(dsn, [table], "e < 1000")
    pasted, _, _ = (told.value.remedy or "").partition("or: ")[2].partition("--")
    superuser = database.value("SELECT current_user::text")
    database.execute(pasted.replace("TO postgres", f'TO "{superuser}"'))
    with contextlib.suppress(TableError):
        await check_condition(dsn, [table], "e < 1000")
        await read(dsn, table, "e < 1000")
    assert not calls_of(database, stranger)


FUNCTION = "CREATE FUNCTION m.{} LANGUAGE plpgsql {} AS $$ " + BODY.format("{}") + " $$"
MOOD = "CREATE TYPE m.own AS ENUM ('a')"
CAST = FUNCTION.format("called(m.own) RETURNS int", "", 1)
CALLED = {
    "a cast": (MOOD, CAST, "CREATE CAST (m.own AS int) WITH FUNCTION m.called(m.own)"),
    "a cast to it": (
        MOOD,
        FUNCTION.format("called(int) RETURNS m.own", "", "NULL"),
        "CREATE CAST (int AS m.own) WITH FUNCTION m.called(int) AS ASSIGNMENT",
    ),
    "a cast of its arrays": (
        MOOD,
        FUNCTION.format("called(m.own[]) RETURNS text", "", "''"),
        "CREATE CAST (m.own[] AS text) WITH FUNCTION m.called(m.own[]) AS IMPLICIT",
    ),
    "a cast of an attribute": (
        "CREATE TYPE m.inner AS ENUM ('a')",
        "CREATE TYPE m.own AS (x m.inner)",
        FUNCTION.format("called(m.inner) RETURNS int", "", 1),
        "CREATE CAST (m.inner AS int) WITH FUNCTION m.called(m.inner) AS IMPLICIT",
    ),
    "a subtype_diff": (
        FUNCTION.format("called(int, int) RETURNS float8", "IMMUTABLE", 1),
        "CREATE TYPE m.own AS RANGE (subtype = int, subtype_diff = m.called)",
    ),
    "a check": (
        FUNCTION.format("called(int) RETURNS int", "IMMUTABLE", 1),
        "CREATE DOMAIN m.own AS int CHECK (m.called(VALUE) = 1)",
    ),
    "an operator in a check": (
        FUNCTION.format("called(int, int) RETURNS bool", "IMMUTABLE", "true"),
        "CREATE OPERATOR m.<< (FUNCTION = m.called, LEFTARG = int, RIGHTARG = int)",
        "CREATE DOMAIN m.own AS int CHECK (VALUE OPERATOR(m.<<) 3)",
    ),
    "a check of a domain in a check": (
        FUNCTION.format("called(int) RETURNS int", "IMMUTABLE", 1),
        "CREATE DOMAIN m.inner AS int CHECK (m.called(VALUE) = 1)",
        "CREATE DOMAIN m.own AS int CHECK (VALUE::m.inner > 0)",
    ),
    "an operator of its class": (
        "CREATE TYPE m.own AS ENUM ('a')",
        FUNCTION.format("called(m.own, m.own) RETURNS int", "IMMUTABLE", 0),
        "CREATE OPERATOR CLASS m.c FOR TYPE m.own USING btree AS FUNCTION 1 m.called(m.own, m.own)",
    ),
}
"""By what is called for the type `m.own`: the function `m.called`."""


@pytest.mark.parametrize("what", CALLED)
async def test_a_type_with_another_roles_function_is_not_trusted(
    database: Database, owner: str, stranger: str, what: str
) -> None:
    made = list(CALLED[what])
    database.execute(*made, "CREATE TABLE t (id int PRIMARY KEY, e m.own)")
    table = await table_named(database, "t")
    dsn = make_conninfo(database.dsn, user=stranger)
    async with await connect(dsn) as connection:
        assert set((await read_type_trust(connection, table.oid)).trusted) == {"id", "e"}
        signature = database.value(
            "SELECT oid::regprocedure::text FROM pg_proc WHERE proname = 'called'"
        )
        database.execute(f"ALTER FUNCTION {signature} OWNER TO {owner}")
        trust = await read_type_trust(connection, table.oid)
        assert set(trust.trusted) == {"id"}
        remedy = trust.others["e"].remedy
        _, _, pasted = remedy.partition("or: ")
        assert "OWNER TO" not in remedy  # the type is a superuser's already
        assert bool(pasted) == ("cast" in what)
        if pasted:
            database.execute(pasted)
            assert set((await read_type_trust(connection, table.oid)).trusted) == {"id", "e"}


async def test_casts_to_another_roles_type_make_none_untrusted(
    database: Database, owner: str, stranger: str
) -> None:
    """Any role may create these, and they are called only where its type is named."""
    database.execute(
        "CREATE TYPE m.ok AS ENUM ('a')",
        "CREATE TYPE m.own AS ENUM ('a')",
        FUNCTION.format("called(m.ok) RETURNS m.own", "", "NULL"),
        "CREATE CAST (m.ok AS m.own) WITH FUNCTION m.called(m.ok) AS IMPLICIT",
        f"ALTER TYPE m.own OWNER TO {owner}",
        f"ALTER FUNCTION m.called(m.ok) OWNER TO {owner}",
        "CREATE TABLE t (id int PRIMARY KEY, e m.ok)",
        "GRANT SELECT ON t TO PUBLIC",
    )
    table = await table_named(database, "t")
    dsn = make_conninfo(database.dsn, user=stranger)
    await check_condition(dsn, [table], "e = 'a'")
    assert not calls_of(database, stranger)


async def test_trust_in_many_types_is_read_quickly(database: Database) -> None:
    """Each type is judged once: the cost is that of the types, not of columns times functions."""
    columns = ", ".join(f"c{n} many_{n % 60}" for n in range(200))
    database.execute(
        *(f"CREATE TYPE many_{n} AS (a int, b text, c numeric[])" for n in range(60)),
        f"CREATE TABLE many (id int PRIMARY KEY, {columns})",
    )
    oid = database.value("SELECT 'many'::regclass::oid::int8")
    async with await connect(database.dsn) as connection:
        await connection.execute("SET statement_timeout = '2s'")
        trust = await read_type_trust(connection, oid)
    assert len(trust.trusted) == 201
