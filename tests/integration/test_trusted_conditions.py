"""Conditions of users call no cast that the owner of a column's type has defined."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from ingestd.model.errors import TableError
from ingestd.model.row_checks import UNLIMITED_BYTES
from ingestd.ports import Split
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.snapshot.read_view import OwnView
from ingestd.postgres.snapshot.table_pages import TablePages
from ingestd.postgres.snapshot.where import check_condition, joined
from tests.harness.hostile import CALLED, hostile_calls
from tests.integration.test_pages import table_named

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ingestd.model.schema import Table
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("table owner")

CAST = (
    f"LANGUAGE plpgsql AS $$ BEGIN RAISE WARNING '{CALLED} by %', current_user; RETURN '7'; END $$"
)
TYPES = f"""
CREATE TYPE own AS ENUM ('a', 'b');
CREATE TYPE pair AS (x own, y int);
CREATE TYPE trusted AS ENUM ('a', 'b');
CREATE TYPE trusted_pair AS (x trusted, y int);
CREATE DOMAIN above AS own;
CREATE FUNCTION to_int(own) RETURNS int {CAST};
CREATE CAST (own AS int) WITH FUNCTION to_int(own) AS IMPLICIT;
CREATE FUNCTION to_text(own) RETURNS text {CAST};
CREATE CAST (own AS text) WITH FUNCTION to_text(own);
CREATE DOMAIN checked AS int CHECK (VALUE > 0 OR to_int('a'::own) = 7);
CREATE TABLE t (id int PRIMARY KEY, e own, d above, p pair, l own[], c checked,
  k trusted, q trusted_pair, n text);
INSERT INTO t VALUES (1, 'a', 'a', ROW('a', 1), '{{a}}', 1, 'a', ROW('a', 1), 'x');
GRANT SELECT ON t TO PUBLIC
"""
REFUSED = (
    "e < 1000",
    "e::text = 'a'",
    "e::varchar = 'a'",
    "d < 1000",
    "(p).x < 1000",
    "l[1] < 1000",
    "ARRAY[c] = '{1}'",
    "id IN (SELECT e)",
    "id IN (VALUES (e))",
    "id > 0 AND (n = 'x' OR e < 1000)",
)
ACCEPTED = (
    "id < 1000",
    "n = 'x' AND id IN (1, 2)",
    "k = 'a'",
    "(q).x = 'a'",
    "ctid >= '(0,0)' AND xmin IS NOT NULL AND tableoid <> 0",
    "id = 1 -- the first",
)


@pytest.fixture
def dsn(database: Database, stranger: str) -> Iterator[str]:
    owner = f"o_{database.name}"
    database.execute(
        TYPES,
        f"CREATE ROLE {owner}",
        *(f"ALTER TYPE {name} OWNER TO {owner}" for name in ("own", "pair", "above", "checked")),
    )
    yield make_conninfo(database.dsn, user=stranger)
    database.execute(f"DROP OWNED BY {owner} CASCADE", f"DROP ROLE {owner}")
    assert not [line for line in hostile_calls(database.server) if stranger in line]


async def read(dsn: str, table: Table, condition: str) -> int:
    """The number of rows."""
    table = replace(table, row_filter=joined([condition]))
    blocks = BlockRange("public", "t", oid=table.oid)
    split = Split(table, "", blocks.to_text(), 0)
    pages = TablePages(dsn, split, OwnView(), row_limit_bytes=UNLIMITED_BYTES)
    return sum([page.batch.rows.num_rows async for page in pages.pages()])


@pytest.mark.parametrize("condition", REFUSED)
async def test_a_condition_on_an_owners_type_is_refused(
    database: Database, dsn: str, condition: str
) -> None:
    table = await table_named(database, "t")
    with pytest.raises(TableError, match="'e', 'd', 'p', 'l', 'c'") as found:
        await check_condition(dsn, [table], condition)
    assert found.value.remedy is not None
    assert 'ALTER TYPE "public"."own" OWNER TO' in found.value.remedy
    with pytest.raises(TableError, match="casts of that role's"):
        await read(dsn, table, condition)


@pytest.mark.parametrize("condition", ACCEPTED)
async def test_a_condition_on_other_columns_is_accepted(
    database: Database, dsn: str, condition: str
) -> None:
    table = await table_named(database, "t")
    await check_condition(dsn, [table], condition)
    assert await read(dsn, table, condition) == 1


@pytest.mark.parametrize("condition", ["missing = 1", "t IS NULL", "id <", "id < 1; SELECT 1"])
async def test_an_invalid_condition_is_refused_before(
    database: Database, dsn: str, condition: str
) -> None:
    table = await table_named(database, "t")
    with pytest.raises(TableError, match="the condition"):
        await check_condition(dsn, [table], condition)


async def test_a_column_retyped_after_its_condition_was_checked(
    database: Database, dsn: str
) -> None:
    """Also if its query names no other column."""
    table = await table_named(database, "t")
    few = replace(table, columns=(table.column("n"),), key=())
    await check_condition(dsn, [table], "id < 1000")
    database.execute(
        "ALTER TABLE t RENAME id TO id0", "ALTER TABLE t ADD COLUMN id own NOT NULL DEFAULT 'a'"
    )
    for each in (table, few):
        with pytest.raises(TableError):
            await read(dsn, each, "id < 1000")


async def test_an_unreadable_table_is_no_fault_of_its_condition(
    database: Database, dsn: str
) -> None:
    table = await table_named(database, "t")
    database.execute("DROP TABLE t")
    with pytest.raises(psycopg.errors.UndefinedTable):
        await check_condition(dsn, [table], "id < 1000")
