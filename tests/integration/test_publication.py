"""The publication: column lists, row filters, and what it would do to the source's own writes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from ingestd.config import TableSettings
from ingestd.decode.type_mapping import BUILT_IN
from ingestd.model.schema import Table, TableId
from ingestd.postgres.captured.columns import controlled
from ingestd.postgres.catalog.publication import Published, published
from ingestd.postgres.catalog.published_filters import with_row_filters
from ingestd.postgres.catalog.replica_identity import incomplete, only_inserts
from ingestd.postgres.catalog.tables import describe, list_tables
from ingestd.postgres.connection.session import connect
from ingestd.postgres.wal.publication.alteration import keep_publication
from ingestd.postgres.wal.publication.replacement import must_be_replaced, replace_publication
from ingestd.postgres.wal.publication.statements import column_list
from tests.harness.databases import skip_without_lists

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.harness.databases import Database

PEOPLE = TableId("public", "people")
WHOLE = Published(None, None, None)


@pytest.fixture
def people(database: Database) -> Database:
    skip_without_lists(database)
    database.execute(
        "CREATE TABLE people"
        " (id int PRIMARY KEY, email text, salary numeric, born date, note text)",
        "INSERT INTO people SELECT i, 'p' || i || '@example.com', i * 1.50, '2000-01-01', 'secret'"
        " FROM generate_series(1, 10) i",
    )
    return database


def listed(found: Published) -> set[str] | None:
    return None if found.columns is None else set(found.columns)


async def described(database: Database, **controls: Any) -> Table:
    async with await connect(database.dsn) as connection:
        rows = [r for r in await list_tables(connection) if r.id == PEOPLE]
        [table] = await describe(connection, rows, before_full=False)
    return controlled(table, TableSettings.model_validate(controls), None, BUILT_IN)


async def keep(
    database: Database,
    tables: Sequence[str] = ("people",),
    lists: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Published]:
    """Keep publication `kept`; return what it publishes, by the table's name."""
    wanted = {TableId("public", t): columns for t, columns in (lists or {}).items()}
    async with await connect(database.dsn) as connection:
        ids = [TableId("public", t) for t in tables]
        await keep_publication(connection, "kept", ids, wanted)
        found = await published(connection, "kept", connection.info.server_version)
        await keep_publication(connection, "kept", ids, wanted)
        assert await published(connection, "kept", connection.info.server_version) == found
        found = await with_row_filters(connection, found)
    return {table.name: sent for table, sent in found.items()}


LISTED = ("id", "email")


async def test_a_column_list_is_made_changed_and_taken_away(people: Database) -> None:
    people.execute("CREATE TABLE other (id int PRIMARY KEY)")
    made = await keep(people, lists={"people": LISTED})
    assert listed(made["people"]) == {"id", "email"}
    assert made["people"].membership is not None
    more = await keep(people, ("people", "other"), {"people": (*LISTED, "born")})
    assert listed(more["people"]) == {"id", "email", "born"}
    assert more["people"].membership != made["people"].membership
    assert more["other"].columns is None
    whole = await keep(people, ("people", "other"))
    assert whole["people"].columns is None
    assert whole["other"] == more["other"]
    assert set(await keep(people, ("other",))) == {"other"}


@pytest.mark.attack("table owner")
async def test_a_locked_table_is_not_in_a_replaced_publication(people: Database) -> None:
    """All others keep their column lists and row filters; one to keep that is locked is refused."""
    people.execute(
        "CREATE TABLE other (id int PRIMARY KEY)",
        "CREATE TABLE surplus (id int PRIMARY KEY)",
        "CREATE TABLE busy (id int PRIMARY KEY)",
        "CREATE PUBLICATION kept FOR TABLE people (id, email) WHERE (id > 5), other, surplus, busy"
        " WITH (publish_via_partition_root = true)",
    )
    other, busy = TableId("public", "other"), TableId("public", "busy")
    with people.connect(autocommit=False) as holder:
        holder.execute("LOCK TABLE surplus, busy IN SHARE UPDATE EXCLUSIVE MODE")
        async with await connect(people.dsn) as connection:
            refused = await replace_publication(
                connection, "kept", [PEOPLE, busy, other], {PEOPLE: LISTED}
            )
    assert refused.keys() == {busy}
    made = await keep(people, ("people", "other"), {"people": LISTED})
    assert made.keys() == {"people", "other"}
    assert listed(made["people"]) == set(LISTED)
    assert made["people"].row_filter == "(id > 5)"


@pytest.mark.attack("table owner")
async def test_a_table_of_another_owner_stays_published(people: Database) -> None:
    """It could not be added to the new publication: only its owner may do that."""
    people.execute(
        "CREATE TABLE surplus (id int PRIMARY KEY)",
        "CREATE PUBLICATION kept FOR TABLE people, surplus"
        " WITH (publish_via_partition_root = true)",
        "DROP ROLE IF EXISTS publisher",
        "CREATE ROLE publisher",
        f"GRANT CREATE ON DATABASE {people.name} TO publisher",
        "ALTER PUBLICATION kept OWNER TO publisher",
    )
    try:
        async with await connect(people.dsn) as connection:
            await connection.execute("SET ROLE publisher")
            assert await must_be_replaced(connection, "kept", [PEOPLE])
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await replace_publication(connection, "kept", [PEOPLE])
            await connection.execute("RESET ROLE")
            present = await published(connection, "kept", connection.info.server_version)
    finally:
        people.execute(
            "ALTER PUBLICATION kept OWNER TO CURRENT_USER",
            "DROP OWNED BY publisher",
            "DROP ROLE publisher",
        )
    assert present.keys() == {PEOPLE, TableId("public", "surplus")}


async def test_a_publication_with_a_schema_is_not_replaced(people: Database) -> None:
    people.execute("CREATE SCHEMA empty", "CREATE TABLE surplus (id int PRIMARY KEY)")
    people.execute("CREATE PUBLICATION kept FOR TABLE people, surplus, TABLES IN SCHEMA empty")
    async with await connect(people.dsn) as connection:
        assert not await must_be_replaced(connection, "kept", [PEOPLE])


async def test_a_row_filter_set_by_hand_is_kept(people: Database) -> None:
    people.execute(
        "CREATE PUBLICATION kept FOR TABLE people (id, note) WHERE (id > 3 AND 'a%b{}' <> 'c')"
        " WITH (publish_via_partition_root = true)"
    )
    text = "((id > 3) AND ('a%b{}'::text <> 'c'::text))"
    assert (await keep(people))["people"].row_filter == text
    narrow = (await keep(people, lists={"people": LISTED}))["people"]
    assert (listed(narrow), narrow.row_filter) == ({"id", "email"}, text)


async def test_a_table_put_back_is_another_membership(people: Database) -> None:
    before = (await keep(people))["people"]
    people.execute(
        "ALTER PUBLICATION kept DROP TABLE people", "ALTER PUBLICATION kept ADD TABLE people"
    )
    assert (await keep(people))["people"].membership not in {None, before.membership}


@pytest.mark.parametrize("scope", ["ALL TABLES", "TABLES IN SCHEMA public"])
async def test_a_publication_of_everything_has_no_lists(people: Database, scope: str) -> None:
    people.execute(f"CREATE PUBLICATION kept FOR {scope} WITH (publish_via_partition_root = true)")
    found = (await keep(people, lists={"people": LISTED}))["people"]
    assert replace(found, entry=0) == WHOLE
    assert found.entry


async def test_a_list_that_would_break_the_sources_writes_is_not_made(people: Database) -> None:
    """The server holds the identity of each partition against the list."""
    people.execute(
        "CREATE TABLE parts (id int, k int, note text, PRIMARY KEY (id, k)) PARTITION BY LIST (k)",
        "CREATE TABLE part_1 PARTITION OF parts FOR VALUES IN (1)",
        "CREATE TABLE part_2 PARTITION OF parts FOR VALUES IN (2)",
        "INSERT INTO parts VALUES (1, 1, 'a'), (2, 2, 'b')",
    )
    lists = {"parts": ("id", "k")}
    assert listed((await keep(people, ("parts",), lists))["parts"]) == {"id", "k"}
    people.execute("ALTER TABLE part_2 REPLICA IDENTITY FULL")
    with pytest.raises(psycopg.errors.InvalidColumnReference, match="does not cover"):
        people.execute("UPDATE parts SET note = 'c'")
    assert (await keep(people, ("parts",), lists))["parts"].columns is None
    people.execute("UPDATE parts SET note = 'c'")


async def test_replica_identity_full_has_no_list(people: Database) -> None:
    controls = TableSettings(exclude_columns=["note", "salary", "born"])
    table = await described(people, exclude_columns=controls.exclude_columns)
    assert column_list(table, controls, people.server.major * 10_000) == ("id", "email")
    assert column_list(table, controls, 140_000) is None
    assert column_list(table, TableSettings(), people.server.major * 10_000) is None
    people.execute("ALTER TABLE people REPLICA IDENTITY FULL")
    table = await described(people, exclude_columns=controls.exclude_columns)
    assert column_list(table, controls, people.server.major * 10_000) is None


async def test_what_the_server_does_with_a_listed_column(people: Database) -> None:
    """DROP COLUMN and a change of type are refused; a new column is in no list."""
    await keep(people, lists={"people": LISTED})
    for ddl in ("DROP COLUMN email", "ALTER COLUMN email TYPE varchar(500)"):
        with pytest.raises(psycopg.Error, match=r"depends on|publication"):
            people.execute(f"ALTER TABLE people {ddl}")
    people.execute(
        "ALTER TABLE people DROP COLUMN note",
        "ALTER TABLE people ALTER COLUMN salary TYPE text",
        "ALTER TABLE people RENAME COLUMN email TO mail",
        "ALTER TABLE people ADD COLUMN more int DEFAULT 5",
    )
    async with await connect(people.dsn) as connection:
        found = await published(connection, "kept", connection.info.server_version)
    assert listed(found[PEOPLE]) == {"id", "mail"}
    # what the documentation says to do instead: no change between is left out of the stream
    with people.connect(autocommit=False) as session:
        session.execute("ALTER PUBLICATION kept DROP TABLE people")
        session.execute("ALTER TABLE people DROP COLUMN mail")
        session.execute("ALTER PUBLICATION kept ADD TABLE people (id, more)")
    assert listed((await keep(people, lists={"people": ("id", "more")}))["people"]) == {
        "id",
        "more",
    }


async def test_older_servers_publish_whole_tables(people: Database) -> None:
    await keep(people)
    async with await connect(people.dsn) as connection:
        found = await published(connection, "kept", 140_000)
    assert listed(found[PEOPLE]) is None
    assert found[PEOPLE].row_filter is None
    assert found[PEOPLE].membership is not None


async def test_an_excluded_column_is_not_in_the_servers_stream(people: Database) -> None:
    await keep(people, lists={"people": LISTED})
    people.value(
        "SELECT lsn::text FROM pg_create_logical_replication_slot(%s, 'pgoutput')", people.name
    )
    people.execute(
        "INSERT INTO people VALUES (11, 'seen', 1, '2001-01-01', 'needle')",
        "UPDATE people SET note = 'needle too', email = 'seen too' WHERE id = 11",
        "DELETE FROM people WHERE id = 11",
    )
    sent = b"".join(
        row[0]
        for row in people.rows(
            "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL,"
            " 'proto_version', '1', 'publication_names', 'kept')",
            people.name,
        )
    )
    assert b"seen too" in sent
    assert b"needle" not in sent


async def test_what_publishing_would_break_is_refused(people: Database) -> None:
    people.execute("ALTER TABLE people REPLICA IDENTITY NOTHING")
    table = await described(people)
    for ours in (None, Published(None, None, 5)):
        refused = incomplete(table, ours, manage=True)
        assert refused is not None
        assert "UPDATE and DELETE fail" in refused.reason
    assert incomplete(table, None, manage=False) is not None
    for theirs, manage in ((WHOLE, True), (WHOLE, False), (Published(None, None, 5), False)):
        assert incomplete(table, theirs, manage=manage) is None
        assert only_inserts(table, theirs) == "no usable replica identity"
    people.execute("CREATE PUBLICATION every FOR ALL TABLES")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        people.execute("UPDATE people SET note = 'x'")
    people.execute("ALTER TABLE people REPLICA IDENTITY DEFAULT")
    table = await described(people)
    assert incomplete(table, None, manage=True) is None
    assert only_inserts(table, WHOLE) is None
    lacking = only_inserts(table, Published(frozenset({"email"}), None, 5))
    assert lacking == "its column list lacks 'id' of the replica identity"
