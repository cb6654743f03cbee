"""What a publication sends, read without opening its tables, is what the server's view has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ingestd.model.schema import TableId
from ingestd.postgres.catalog.publication import FIRST_WITH_PARTS, WITH_GENERATED, published
from ingestd.postgres.catalog.published_filters import with_row_filters
from ingestd.postgres.connection.session import connect
from tests.harness.databases import Database, fresh_database, skip_without_lists
from tests.harness.standbys import needs, server_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ingestd.testing.embedded.postgres import PostgresServer

TABLES = (
    "CREATE SCHEMA a",
    "CREATE SCHEMA b",
    "CREATE TABLE a.plain (id int PRIMARY KEY, x text, g int GENERATED ALWAYS AS (id * 2) STORED)",
    'CREATE TABLE a."Odd.Name" (id int PRIMARY KEY)',
    "CREATE UNLOGGED TABLE a.unlogged (id int PRIMARY KEY)",
    "CREATE VIEW a.view AS SELECT * FROM a.plain",
    "CREATE MATERIALIZED VIEW a.kept AS SELECT * FROM a.plain",
    "CREATE TABLE a.parent (id int)",
    "CREATE TABLE b.child () INHERITS (a.parent)",
    "CREATE TABLE a.root (id int, k int) PARTITION BY RANGE (id)",
    "CREATE TABLE a.leaf PARTITION OF a.root FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE b.middle PARTITION OF a.root FOR VALUES FROM (10) TO (30) PARTITION BY RANGE (k)",
    "CREATE TABLE b.low PARTITION OF b.middle FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE a.high PARTITION OF b.middle FOR VALUES FROM (10) TO (20)",
    "CREATE TABLE b.empty (id int) PARTITION BY RANGE (id)",
)
SCOPES = {
    "all": "FOR ALL TABLES",
    "none": "",
    "list": 'FOR TABLE a.plain, a."Odd.Name"',
    "only": "FOR TABLE ONLY a.parent",
    "tree": "FOR TABLE a.parent",
    "root": "FOR TABLE a.root, b.empty",
    "middle": "FOR TABLE b.middle",
    "leaves": "FOR TABLE b.low, a.leaf",
}
NEWER = {
    "root_and_leaf": "FOR TABLE a.root, a.leaf, b.low",
    "schema": "FOR TABLES IN SCHEMA a",
    "schemas": "FOR TABLES IN SCHEMA a, b",
    "mixed": "FOR TABLES IN SCHEMA b, TABLE a.root",
    "beside": "FOR TABLES IN SCHEMA a, TABLE a.plain, b.child",
    "parts": "FOR TABLE a.plain (id, x) WHERE (id > 5 AND x <> ''), a.parent WHERE (id < 3)",
    "filtered_beside": "FOR TABLE a.plain WHERE (id > 5), TABLES IN SCHEMA a",
}
GENERATED = {
    "generated": "FOR TABLE a.plain, a.parent",
    "listed": "FOR TABLE a.plain (id, g)",
}


@pytest.fixture(
    scope="module",
    params=[15, 18, *(pytest.param(n, marks=pytest.mark.thorough) for n in (14, 16, 17))],
)
def server(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    needs(request.param)
    with server_of(request.param) as running:
        yield running


@pytest.fixture
def database(server: PostgresServer) -> Iterator[Database]:
    with fresh_database(server) as database:
        database.execute(*TABLES)
        yield database


def scopes(version: int) -> dict[str, str]:
    """Return every publication to try, by its name."""
    found = SCOPES | (NEWER if version >= FIRST_WITH_PARTS else {})
    made = {
        f"{name}_{how}": f"{scope} WITH (publish_via_partition_root = {how})"
        for name, scope in found.items()
        for how in ("true", "false")
    }
    if version >= WITH_GENERATED:
        for name, scope in GENERATED.items():
            made[name] = f"{scope} WITH (publish_generated_columns = stored)"
        made["listed_none"] = GENERATED["listed"]
    return made


_VIEW = "SELECT schemaname, tablename{} FROM pg_publication_tables WHERE pubname = %s"
_MEMBER = """
SELECT r.oid FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
 WHERE p.pubname = %s AND r.prrelid = to_regclass(format('%%I.%%I', %s::text, %s::text))"""
_ENTRY = """
SELECT coalesce((SELECT s.oid FROM pg_publication_namespace s
                  WHERE s.pnpubid = p.oid AND s.pnnspid = to_regnamespace(%s)), p.oid)
  FROM pg_publication p WHERE p.pubname = %s"""
_WITH_LIST = {"parts_true", "parts_false", "listed", "listed_none"}


@pytest.mark.thorough
async def test_it_is_what_the_server_says(database: Database) -> None:
    async with await connect(database.dsn) as connection:
        version = connection.info.server_version
        made = scopes(version)
        for name, scope in made.items():
            await connection.execute(f"CREATE PUBLICATION {name} {scope}")
        parts = ", attnames::text[], rowfilter" if version >= FIRST_WITH_PARTS else ""
        not_empty = set()
        for name in made:
            found = await with_row_filters(connection, await published(connection, name, version))
            cursor = await connection.execute(_VIEW.format(parts), (name,))
            said = {TableId(schema, table): how for schema, table, *how in await cursor.fetchall()}
            assert found.keys() == said.keys(), name
            for table, sent in found.items():
                cursor = await connection.execute(_MEMBER, (name, table.schema, table.name))
                assert sent.membership == ((await cursor.fetchone()) or [None])[0], (name, table)
                is_listed = name in _WITH_LIST and table.name == "plain"
                assert (sent.columns is not None) == is_listed, (name, table)
                if parts:
                    columns, row_filter = said[table]
                    assert sent.row_filter == row_filter, (name, table)
                    assert sent.columns in {None, frozenset(columns)}, (name, table)
                    cursor = await connection.execute(_ENTRY, (table.schema, name))
                    entry = sent.membership or (await cursor.fetchone() or [None])[0]
                    assert sent.entry == entry, (name, table)
                if version >= WITH_GENERATED:
                    assert ("g" in said[table][0]) == ("g" in sent.generated), (name, table)
            not_empty |= {name} if found else set()
    assert made.keys() - not_empty == {"none_true", "none_false"}


@pytest.mark.parametrize(
    "scope", ["FOR ALL TABLES", "FOR TABLE a.plain, a.root", "FOR TABLE a.plain WHERE (id > 5)"]
)
async def test_a_locked_table_keeps_nothing_from_being_read(database: Database, scope: str) -> None:
    if "WHERE" in scope:
        skip_without_lists(database)
    database.execute(f"CREATE PUBLICATION pub {scope}")
    with database.connect(autocommit=False) as locker:
        locker.execute("LOCK TABLE a.plain, a.root IN ACCESS EXCLUSIVE MODE")
        async with await connect(database.dsn, lock_timeout_s=0.1) as connection:
            found = await published(connection, "pub", connection.info.server_version)
        assert TableId("a", "plain") in found
        locker.rollback()
