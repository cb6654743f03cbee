"""Conditions that somebody wrote, before they are put into a query."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from ingestd.capture.conditions import check_condition, joined
from ingestd.errors import TableError
from ingestd.schema import TableId

if TYPE_CHECKING:
    from tests.harness.databases import Database

T = TableId("public", "a %s {t}")


@pytest.fixture
def dsn(database: Database) -> str:
    database.execute('CREATE TABLE "a %s {t}" (id int PRIMARY KEY, "No{te}" text, ok boolean)')
    return database.dsn


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
async def test_a_condition_is_taken_and_stays_one_expression(dsn: str, text: str) -> None:
    await check_condition(dsn, [T], text)
    with psycopg.connect(dsn) as connection:
        query = f'SELECT * FROM "a %s {{t}}" WHERE {joined([text, "id = 1"])}'
        assert connection.execute(query.encode()).fetchall() == []


@pytest.mark.thorough
@pytest.mark.parametrize("text", [*BAD, GOOD[-1]])
async def test_anything_else_is_refused_with_what_the_server_says(dsn: str, text: str) -> None:
    with pytest.raises(TableError, match="it can't be asked this condition: ") as told:
        await check_condition(dsn, [T], text)
    assert told.value.remedy is not None


async def test_nothing_is_evaluated(dsn: str) -> None:
    await check_condition(dsn, [T], "pg_sleep(1000) IS NULL OR 1/(id - id) = 1")


async def test_a_server_that_is_not_there_is_no_fault_of_the_condition() -> None:
    with pytest.raises(psycopg.OperationalError):
        await check_condition("host=127.0.0.1 port=1", [T], "ok")
