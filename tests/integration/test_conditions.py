"""Conditions written by users, before they are put into a query."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from ingestd.model.errors import TableError
from ingestd.model.schema import Table, TableId
from ingestd.postgres.snapshot.where import check_condition, joined
from tests.integration.test_pages import table_named

if TYPE_CHECKING:
    from tests.harness.databases import Database


@pytest.fixture
async def table(database: Database) -> Table:
    database.execute('CREATE TABLE "a %s {t}" (id int PRIMARY KEY, "No{te}" text, ok boolean)')
    return await table_named(database, "a %s {t}")


NOWHERE = Table(TableId("public", "t"), 1, ())
GOOD = [
    "ok",
    "id > 7",
    "id % 2 = 0 AND \"No{te}\" LIKE '%s%'",
    "id > 7 -- the newest",
    "id > 7 /* the ) newest ] */",
    "id > 7 AND \"No{te}\" <> ')'",
    'id > 7 AND "No{te}" <> $$ ]) $$',
    "(id, ok) = (1, true)",
    "id = ANY(ARRAY[1, 2])",
    "id IN (SELECT 1)",
    "NULL",
    "true) IS NOT NULL AND (true",
]
BAD = [
    "",
    "id >",
    "id",
    "nope > 1",
    "id > 'x'",
    "ok, ok",
    "true) OR (true",
    "true]) OR (ARRAY[true",
    "true) UNION SELECT FROM pg_class WHERE (true",
    "ok; DROP TABLE x",
    "ok); DROP TABLE x; --",
    "ok /* never ended",
    "'never ended",
    "count(*) > 1",
    "id > $1",
    "other.id > 1",
]


@pytest.mark.parametrize("text", GOOD[:-1])
async def test_a_condition_is_taken_and_stays_one_expression(
    database: Database, table: Table, text: str
) -> None:
    await check_condition(database.dsn, [table], text)
    with database.connect() as connection:
        query = f'SELECT * FROM "a %s {{t}}" WHERE {joined([text, "id = 1"])}'
        assert connection.execute(query.encode()).fetchall() == []


@pytest.mark.thorough
@pytest.mark.parametrize("text", [*BAD, GOOD[-1]])
async def test_anything_else_is_refused_with_what_the_server_says(
    database: Database, table: Table, text: str
) -> None:
    with pytest.raises(TableError, match="the condition is invalid: ") as told:
        await check_condition(database.dsn, [table], text)
    assert told.value.remedy is not None


async def test_nothing_is_evaluated(database: Database, table: Table) -> None:
    await check_condition(database.dsn, [table], "pg_sleep(1000) IS NULL OR 1/(id - id) = 1")


async def test_a_server_that_is_not_there_is_no_fault_of_the_condition() -> None:
    with pytest.raises(psycopg.OperationalError):
        await check_condition("host=127.0.0.1 port=1", [NOWHERE], "ok")
