"""A condition calls nothing that the owner of *another* table made, because it reads none."""

from __future__ import annotations

import contextlib
from itertools import product
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from ingestd.model.errors import TableError
from ingestd.postgres.catalog.trusted_columns import reads_relations
from ingestd.postgres.snapshot.where import check_condition
from tests.harness.owned_code import BODY, calls_of, hand_over
from tests.integration.test_pages import table_named
from tests.integration.test_trusted_conditions import read

if TYPE_CHECKING:
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("table owner")

OTHERS = {
    "an index": ["CREATE TABLE m.other (id int)", "CREATE INDEX ON m.other ((m.evil('') + id))"],
    "a cast": [
        "CREATE TYPE m.own AS ENUM ('a')",
        f"CREATE FUNCTION m.cast_it(m.own) RETURNS int LANGUAGE plpgsql AS $$ {BODY.format(1)} $$",
        "CREATE CAST (m.own AS int) WITH FUNCTION m.cast_it(m.own) AS IMPLICIT",
        "CREATE TABLE m.other (id m.own)",
        "INSERT INTO m.other VALUES ('a')",
    ],
    "a view": ["CREATE VIEW m.other AS SELECT m.evil('') AS id"],
}


@pytest.mark.parametrize("kind", OTHERS)
async def test_a_condition_on_another_owners_table(
    database: Database, owner: str, stranger: str, kind: str
) -> None:
    hand_over(database, owner)
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "INSERT INTO t SELECT i FROM generate_series(1, 9) i",
        *OTHERS[kind],
        "GRANT SELECT ON t TO PUBLIC",
        "GRANT SELECT ON m.other TO PUBLIC",
    )
    table = await table_named(database, "t")
    dsn = make_conninfo(database.dsn, user=stranger)
    condition = "id IN (SELECT o.id FROM m.other o)"
    with contextlib.suppress(TableError, psycopg.Error):
        await check_condition(dsn, [table], condition)
    with contextlib.suppress(TableError, psycopg.Error):
        await read(dsn, table, condition)
    assert not calls_of(database, stranger)


READS = (
    "id IN (SELECT o.id FROM m.other o)",
    "id IN (sElEcT id FROM m.other)",
    "EXISTS (TABLE m.other)",
    "EXISTS ((table m.other))",
    "EXISTS (TABLE ONLY m.other)",
    "id = ANY (ARRAY(TABLE m.other))",
    "id IN (WITH x AS (TABLE m.other) SELECT id FROM x)",
    "id IN (VALUES (1), ((SELECT max(id) FROM m.other)))",
    "EXISTS (VALUES (1) UNION TABLE m.other)",
    "EXISTS (SELECT'1'FROM m.other)",
    'EXISTS(SELECT*FROM"m"."other")',
    "EXISTS (/**/SELECT/**/FROM/**/m.other)",
    "EXISTS (--\nSELECT FROM m.other)",
    "EXISTS (SELECT FROM public.t, m.other)",
    "EXISTS (SELECT FROM unnest(ARRAY[1]) AS u(v) JOIN m.other ON v = other.id)",
    "(SELECT count(*) FROM m.other) > 1",
)
"""All spellings of a subquery that reads another table."""
AROUND = (
    ("", ""),
    ("note = '\"' OR ", " OR note = '\"'"),
    ("note = '''' OR ", " OR note = ''''"),
    ("\"'\" = '' OR ", " OR \"'\" = ''"),
    ("note = $$'$$ OR ", " OR note = $$'$$"),
    ("note = $a$ $$ ' $a$ OR ", " OR note = $a$ ' $a$"),
    ("note = E'\\'' OR ", " OR note = E'\\''"),
    ("note = E'\\\\' OR ", " OR note = E'\\\\'"),
    ("note = U&'\\0027' OR ", " OR note = U&'\\0027'"),
    ("note = U&'!0027' UESCAPE '!' OR ", " OR note = ''"),
    ("/*'*/ ", " /*'*/"),
    ("/* /* ' */ */ ", " --'"),
    ("-- '\n", " -- '"),
    ("note = 'a'\n'b' OR ", " OR note = B'1'::text"),
)
"""What could hide it from a search in the text."""
READS_NONE = (
    "note = 'select'",
    "note = 'it''s a TABLE' AND id > 1",
    '"table" = 1 OR "\'" = \'select\'',
    "selected = 1 OR tables = 2",
    "id IN (VALUES (1), (2))",
    "id IN (SELECT 1 UNION SELECT 2)",
    "id IS DISTINCT FROM 3 AND substring(note FROM 1) = 'table'",
    "id IN (1, 2) -- these",
    "note = E'\\'' AND id > 7",
)


async def test_every_subquery_that_reads_a_table_is_found(database: Database) -> None:
    """The server's locks show that each of these texts does read the table."""
    database.execute(
        "CREATE SCHEMA m",
        "CREATE TABLE m.other (id int)",
        'CREATE TABLE t (id int, note text, "\'" text, "table" int, selected int, tables int)',
    )
    for reading, (before, after) in product(READS, AROUND):
        text = f"{before}{reading}{after}"
        assert locks_other(database, text), text
        assert reads_relations(text), text
    assert reads_relations("EXISTS (VALUES (1)UNION ALL(1SELECT id FROM t))")  # of PostgreSQL 14
    for text in READS_NONE:
        assert not locks_other(database, text), text
        assert not reads_relations(text), text


def locks_other(database: Database, condition: str) -> bool:
    """Whether the server, when it analyzes the condition, finds another table in it."""
    with database.connect(autocommit=False) as connection:
        query = f"PREPARE read AS SELECT FROM public.t AS _ WHERE (\n{condition}\n)"
        connection.execute(query.encode())
        found = connection.execute(
            "SELECT FROM pg_locks WHERE pid = pg_backend_pid() AND relation = 'm.other'::regclass"
        )
        try:
            return bool(found.fetchall())
        finally:
            connection.execute("DEALLOCATE read")
            connection.rollback()


@pytest.mark.parametrize("condition", ["EXISTS (SELECT FROM t)", "id IN (TABLE t)"])
async def test_a_condition_does_not_read_its_own_table(
    database: Database, stranger: str, condition: str
) -> None:
    """There it would have the columns whose types are not trusted."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "GRANT SELECT ON t TO PUBLIC")
    table = await table_named(database, "t")
    dsn = make_conninfo(database.dsn, user=stranger)
    for use in (check_condition(dsn, [table], condition), read(dsn, table, condition)):
        with pytest.raises(TableError, match="so it may read tables") as found:
            await use
        assert "id IN (1, 2)" in (found.value.remedy or "")
