"""What the owner of a table makes for it to call is never called by a session of ours."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from ingestd.model.errors import TableError, TableReplacedError
from ingestd.model.printable_text import one_line, printable_lines
from ingestd.model.row_checks import UNLIMITED_BYTES
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.planner_functions import ensure_plannable
from ingestd.postgres.catalog.relation_lock import lock_table
from ingestd.postgres.connection.session import connect
from ingestd.postgres.polling.keys.key_order import key_order
from ingestd.postgres.polling.keys.key_pages import KeyPages
from ingestd.postgres.snapshot.key_lookup import KeyedRelation, KeyList
from ingestd.postgres.snapshot.key_range import KeyRange
from ingestd.postgres.snapshot.key_splits import KeySplits
from ingestd.postgres.snapshot.read_view import enter_snapshot
from ingestd.testing.embedded.waiting import await_until
from tests.harness.command_line import run_command
from tests.harness.config import polling_config, wal_config
from tests.harness.owned_code import BODY, calls_of, hand_over
from tests.integration.test_pages import exported, table_named

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("table owner")

LIMIT_S = 60.0
VALUES = {
    "checked": "i",
    "named": "'k' || i",
    "mood": "chr(96 + i)::m.mood",
    "feeling": "chr(96 + i)::m.mood",
    "pair": "ROW(i, 1)::m.pair",
    "plain_pair": "ROW(i, 1)::m.plain_pair",
    "span": "m.span(i::m.checked, (i + 5)::m.checked)",
    "plain_span": "m.plain_span(i, i + 5)",
    "checked[]": "ARRAY[i]::m.checked[]",
    "mood[]": "ARRAY[chr(96 + i)]::m.mood[]",
}
CASTS = {"mood", "plain_pair", "plain_span"}
"""Those that have an implicit cast to text."""
EXPRESSIONS = {
    "CREATE INDEX e ON m.t ((m.evil('') + id))": True,
    "CREATE INDEX e ON m.t (id) WHERE id > m.evil('')": True,
    "CREATE INDEX e ON m.t ((m.inlined(id)))": True,
    "CREATE INDEX e ON m.t ((m.plain(CASE WHEN true THEN 1 ELSE id END)))": True,
    "CREATE INDEX e ON m.t ((m.plain(coalesce(NULL + id, 3))))": True,
    "CREATE STATISTICS m.e ON (m.evil('') + id) FROM m.t": True,
    "CREATE INDEX e ON m.t ((id::m.theirs))": True,
    "CREATE INDEX e ON m.t ((id::m.theirs + 1))": True,
    "CREATE INDEX e ON m.t ((id::m.above))": True,
    "CREATE INDEX e ON m.t ((ARRAY[id]::m.theirs[]))": True,
    "CREATE INDEX e ON m.t ((ARRAY[id]::m.above[]))": True,
    "CREATE INDEX e ON m.t ((ARRAY[id]::m.of_array))": True,
    "CREATE INDEX e ON m.t ((ROW(id, 1)::m.their_pair))": True,
    "CREATE INDEX e ON m.t (id) WHERE id::m.theirs > 3": True,
    "CREATE INDEX e ON m.t (id) WHERE (CASE WHEN id > 3 THEN id::m.above END) > 3": True,
    "CREATE STATISTICS m.e ON (id::m.theirs + 1) FROM m.t": True,
    "CREATE INDEX e ON m.t ((id::m.ours))": False,
    "CREATE INDEX e ON m.t ((ARRAY[id]::m.ours[])) WHERE coalesce(id, 3) IN (3, 4)": False,
    "CREATE INDEX e ON m.t (greatest(id, 3), nullif(id, 3), (ROW(id, 1)::m.plain_pair))": False,
    "CREATE INDEX e ON m.t ((m.plain(id)))": False,
    "CREATE INDEX e ON m.t ((m.plain(id + 1) + 7))": False,
    "CREATE INDEX e ON m.t (lower(note)) WHERE id > 7 AND note <> 'x'": False,
    "CREATE STATISTICS m.e ON (id + 1), lower(note) FROM m.t": False,
}
"""By what the owner adds to the table: whether planning could call a function then."""


@pytest.mark.usefixtures("owner")
@pytest.mark.parametrize("kind", VALUES)
async def test_keys_are_found_and_ordered_without_running_owned_code(
    database: Database, stranger: str, kind: str
) -> None:
    database.execute(
        f"CREATE TABLE m.t (k m.{kind} NOT NULL, n int NOT NULL, PRIMARY KEY (k, n))",
        f"INSERT INTO m.t SELECT {VALUES[kind]}, i FROM generate_series(1, 6) i",
        "GRANT SELECT ON m.t TO PUBLIC",
    )
    table = replace(await table_named(database, "t"), key=("k", "n"))
    texts = [(k, str(n)) for k, n in database.rows("SELECT concat(k), n FROM m.t ORDER BY n")]
    dsn = make_conninfo(database.dsn, user=stranger)
    async with await connect(dsn, autocommit=False) as connection:
        pages = KeyPages(table, UNLIMITED_BYTES)
        await pages.lock(connection)
        found, place = [], None
        while (page := await pages.page(connection, place, 2)) is not None:
            place = page.last
            found.append(page.rows)
        keyed = await KeyedRelation.find(connection, table, table.key)
        order = await key_order(connection, table, keyed.types)
        listed = KeyList(table, keyed, tuple(texts[1:4]))
        query = sql.SQL("SELECT pg_catalog.count(*)::int FROM m.t WHERE {}")
        [(count,)] = await (
            await connection.execute(query.format(sql.SQL(" AND ").join(listed.bounds)))
        ).fetchall()
    async with exported(database) as snapshot:
        await KeySplits(dsn).splits(table, snapshot, 8192)
    assert found == [2, 2, 2]
    assert count == 3
    assert order.columns
    assert not calls_of(database, stranger)


@pytest.mark.usefixtures("owner")
@pytest.mark.parametrize("kind", sorted(CASTS))
async def test_a_cast_owned_by_another_role_is_not_called_for_keys(
    database: Database, stranger: str, kind: str
) -> None:
    database.execute(
        f"CREATE FUNCTION m.cast_it(m.{kind}) RETURNS text LANGUAGE plpgsql"
        f" AS $$ {BODY.format(chr(39) * 2)} $$",
        f"CREATE CAST (m.{kind} AS text) WITH FUNCTION m.cast_it(m.{kind}) AS IMPLICIT",
    )
    with pytest.raises(Exception, match="operator is not unique"):
        await test_keys_are_found_and_ordered_without_running_owned_code(database, stranger, kind)
    assert not calls_of(database, stranger)


@pytest.mark.parametrize("added", EXPRESSIONS)
async def test_a_table_whose_expressions_run_at_planning_is_not_read(
    database: Database, owner: str, stranger: str, added: str
) -> None:
    hand_over(database, owner)
    database.execute(
        "CREATE TABLE m.t (id int, note text)",
        "INSERT INTO m.t SELECT i FROM generate_series(1, 9) i",
        "GRANT SELECT ON m.t TO PUBLIC",
        added,
        "ANALYZE m.t",
    )
    table = await table_named(database, "t")
    blocks = BlockRange("m", "t", oid=table.oid)
    async with await connect(
        make_conninfo(database.dsn, user=stranger), autocommit=False
    ) as connection:
        if EXPRESSIONS[added]:
            with pytest.raises(TableError, match=r"server would call .*m\.") as told:
                await lock_table(connection, table, blocks)
            assert "DROP" in (told.value.remedy or "")
        else:
            await lock_table(connection, table, blocks)
            await connection.execute("SELECT FROM m.t WHERE id > 3")
    assert not calls_of(database, stranger)


@pytest.mark.parametrize("key", ["(id::m.theirs)", "(ARRAY[id]::m.above[])"])
async def test_a_domain_in_a_partition_key_is_planned_too(
    database: Database, owner: str, stranger: str, key: str
) -> None:
    hand_over(database, owner)
    database.execute(f"CREATE TABLE m.p (id int) PARTITION BY LIST ({key})")
    table = await table_named(database, "p")
    async with await connect(make_conninfo(database.dsn, user=stranger)) as connection:
        with pytest.raises(TableError, match=r"the checks of the domain m\.theirs") as found:
            await ensure_plannable(connection, table.id, table.oid, with_partitions=True)
    assert "DROP" not in (found.value.remedy or "")
    assert not calls_of(database, stranger)


async def test_a_partition_key_with_an_inlined_function_has_a_remedy(
    database: Database, owner: str, stranger: str
) -> None:
    hand_over(database, owner)
    database.execute(
        "CREATE TABLE m.p (id int) PARTITION BY RANGE ((m.inlined(id)))",
        "CREATE TABLE m.p1 PARTITION OF m.p FOR VALUES FROM (0) TO (100)",
    )
    oid = int(database.value("SELECT 'm.p'::regclass::int8"))
    table = await table_named(database, "p")
    async with await connect(make_conninfo(database.dsn, user=stranger)) as connection:
        with pytest.raises(TableError) as told:
            await ensure_plannable(connection, table.id, oid, with_partitions=True)
        remedy, _, _ = (told.value.remedy or "").partition("--")
        database.execute(remedy)
        await ensure_plannable(connection, table.id, oid, with_partitions=True)
    assert not calls_of(database, stranger)


KEYS = ("m.evil('') + id", "m.inlined(id)", "id::m.theirs", "id::m.checked_by_them")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("levels", [1, 2])
async def test_the_key_of_a_tables_parent_is_not_evaluated(
    database: Database, owner: str, stranger: str, key: str, levels: int
) -> None:
    database.execute(
        "CREATE DOMAIN m.checked_by_them AS int CHECK (m.plain(3) = 3 OR m.evil('') = 1)"
    )
    hand_over(database, owner)
    database.execute(
        "CREATE TABLE m.t (id int) PARTITION BY RANGE (id)",
        "CREATE TABLE m.t1 PARTITION OF m.t FOR VALUES FROM (0) TO (100)",
        "INSERT INTO m.t SELECT i FROM generate_series(1, 9) i",
        "GRANT SELECT ON ALL TABLES IN SCHEMA m TO PUBLIC",
    )
    table = await table_named(database, "t")
    blocks = BlockRange("m", "t", is_whole=True, oid=table.oid)
    below, above = "m.t", "m.over0"
    for level in range(levels):
        is_last = level == levels - 1
        database.execute(
            f"CREATE TABLE m.over{level} (id int) PARTITION BY RANGE"
            f" (({key if is_last else 'id'}))",
            f"ALTER TABLE m.over{level} ATTACH PARTITION {below}"
            " FOR VALUES FROM (MINVALUE) TO (MAXVALUE)",
        )
        below = f"m.over{level}"
    async with await connect(
        make_conninfo(database.dsn, user=stranger), autocommit=False
    ) as connection:
        with pytest.raises(TableError, match=r"parent's key, .* m\.") as found:  # noqa: PT012 - what is called is the point
            await lock_table(connection, table, blocks)
            # What a poll, a sweep, a probe and the snapshot of a whole table do next.
            query = sql.SQL("SELECT id FROM {} WHERE id > 3").format(blocks.relation)
            await connection.execute(query)
    assert f"ALTER TABLE {above} DETACH PARTITION m.t;" in (found.value.remedy or "")
    assert not calls_of(database, stranger)


async def test_a_leaf_is_read_whatever_keys_are_above_it(
    database: Database, owner: str, stranger: str
) -> None:
    """The planner does not use them: `constraint_exclusion` is off."""
    hand_over(database, owner)
    database.execute(
        "CREATE TABLE m.over (id int) PARTITION BY RANGE ((m.evil('') + id))",
        "CREATE TABLE m.t PARTITION OF m.over FOR VALUES FROM (0) TO (100)",
        "INSERT INTO m.t SELECT i FROM generate_series(1, 9) i",
        "GRANT SELECT ON m.t TO PUBLIC",
    )
    table = await table_named(database, "over")
    oid = int(database.value("SELECT 'm.t'::regclass::int8"))
    async with await connect(
        make_conninfo(database.dsn, user=stranger), autocommit=False
    ) as connection:
        await lock_table(connection, table, BlockRange("m", "t", oid=oid))
        await connection.execute("SELECT FROM ONLY m.t WHERE id > 3")
        await connection.execute("SELECT FROM m.t WHERE id > 3")
    assert not calls_of(database, stranger)


async def test_a_parent_that_the_snapshot_does_not_see_is_noticed(
    database: Database, owner: str, stranger: str
) -> None:
    hand_over(database, owner)
    database.execute(
        "CREATE TABLE m.t (id int) PARTITION BY RANGE (id)",
        "GRANT SELECT ON m.t TO PUBLIC",
    )
    table = await table_named(database, "t")
    async with (
        exported(database) as snapshot,
        await connect(make_conninfo(database.dsn, user=stranger), autocommit=False) as connection,
    ):
        await enter_snapshot(connection, snapshot)
        database.execute(
            "CREATE TABLE m.over (id int) PARTITION BY RANGE ((m.evil('') + id))",
            "ALTER TABLE m.over ATTACH PARTITION m.t FOR VALUES FROM (MINVALUE) TO (MAXVALUE)",
        )
        with pytest.raises(TableReplacedError, match="became a partition"):
            await lock_table(connection, table, BlockRange("m", "t", is_whole=True, oid=table.oid))
    assert not calls_of(database, stranger)


RANGE = f"""
CREATE FUNCTION m.diff(int, int) RETURNS float8 IMMUTABLE LANGUAGE plpgsql
  AS $$ {BODY.format(1)} $$;
CREATE TYPE m.far AS RANGE (subtype = int, subtype_diff = m.diff);
CREATE TABLE m.t (k m.far PRIMARY KEY, filler text);
INSERT INTO m.t SELECT m.far(i, i + 5), repeat('x', 100) FROM generate_series(1, 3000) i;
ANALYZE m.t;
GRANT SELECT ON m.t TO PUBLIC
"""
PAIRS = """
CREATE TABLE m.t (k m.plain_pair PRIMARY KEY, filler text);
INSERT INTO m.t SELECT ROW(i, i)::m.plain_pair, repeat('x', 100) FROM generate_series(1, 3000) i;
GRANT SELECT ON m.t TO PUBLIC
"""
CHECKED = (
    "ALTER TYPE m.plain_pair DROP ATTRIBUTE y",
    "ALTER TYPE m.plain_pair ADD ATTRIBUTE y m.theirs",
)


@pytest.mark.parametrize(
    ("type_", "made", "altered"),
    [("far", RANGE, ()), ("plain_pair", PAIRS, CHECKED)],
    ids=["a range", "a composite type"],
)
async def test_queries_on_keys_call_nothing_of_their_types(
    database: Database,
    owner: str,
    stranger: str,
    *,
    type_: str,
    made: str,
    altered: Sequence[str],
) -> None:
    """Neither row estimates of a range, nor literals of a type altered while it is read."""
    database.execute(made, f"ALTER TYPE m.{type_} OWNER TO {owner}")
    table = replace(await table_named(database, "t"), key=("k",))
    dsn = make_conninfo(database.dsn, user=stranger)
    keys = [(text,) for (text,) in database.rows("SELECT concat(k) FROM m.t LIMIT 9")]
    async with (
        exported(database) as snapshot,
        await connect(dsn, autocommit=False) as connection,
    ):
        pages = KeyPages(table, UNLIMITED_BYTES)
        await pages.lock(connection)
        page = await pages.page(connection, None, 100)
        assert page is not None
        keyed = await KeyedRelation.find(connection, table, table.key)
        splits = await KeySplits(dsn).splits(table, snapshot, 8192)
        database.execute(*altered)
        listed = KeyList(table, keyed, tuple(keys))
        conditions = [sql.SQL(" AND ").join(listed.bounds)]
        ranges = [KeyRange.parse(split.where) for split in splits]
        conditions += [sql.SQL(" AND ").join(r.bounds) for r in ranges if r and r.bounds]
        for condition in conditions:
            await connection.execute(sql.SQL("SELECT FROM m.t WHERE {}").format(condition))
        await pages.page(connection, page.last, 100)
    assert not calls_of(database, stranger)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["wal", "polling"])
def test_a_daemon_runs_nothing_that_a_tables_owner_made(
    database: Database, lake: Path, make_daemon: MakeDaemon, owner: str, kind: str
) -> None:
    """Checks, casts, defaults, generated columns, policies, rules and triggers of its tables."""
    role = f"d_{database.name}"
    hand_over(database, owner)
    database.execute(f"CREATE ROLE {role} LOGIN REPLICATION", f"GRANT USAGE ON SCHEMA m TO {role}")
    try:
        _run(database, lake, make_daemon, role, kind)
    finally:
        database.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def _run(database: Database, lake: Path, make_daemon: MakeDaemon, role: str, kind: str) -> None:
    tables = []
    for number, (key, value) in enumerate(VALUES.items()):
        tables.append(name := f"m.t{number}")
        database.execute(
            f"CREATE TABLE {name} (k m.{key} PRIMARY KEY, d int DEFAULT m.evil(''), big text,"
            " g int GENERATED ALWAYS AS (m.evil('') + 1) STORED)",
            f"ALTER TABLE {name} ALTER big SET STORAGE EXTERNAL",
            f"INSERT INTO {name} (k, big) SELECT {value}, repeat('x', 3000)"
            " FROM generate_series(1, 6) i",
            f"CREATE RULE r AS ON INSERT TO {name} DO ALSO SELECT m.evil('')",
            f"CREATE POLICY p ON {name} USING (m.evil('') = 1)",
        )
    database.execute(
        "CREATE TABLE m.bad (id int PRIMARY KEY)",
        "CREATE INDEX ON m.bad ((id + m.evil('')))",
        "CREATE TABLE m.worse (id int PRIMARY KEY)",
        "CREATE INDEX ON m.worse ((id::m.theirs))",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA m TO {role}",
    )
    dsn = make_conninfo(database.dsn, user=role)
    if kind == "wal":
        slot = f"ingestd_{database.name}"
        listed = ", ".join([*tables, "m.bad", "m.worse"])
        database.execute(
            f"CREATE PUBLICATION {slot} FOR TABLE {listed}",
            f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')",
        )
        extra = (
            f'slot = "{slot}"\npublication = "{slot}"\nmanage = false\nsnapshot_chunked_above = 0'
        )
        config = wal_config(lake=lake, dsn=dsn, tables=["m.*"], source_extra=extra)
    else:
        sections = "".join(
            f'[sources.shop.table."{name}"]\ndetect_deletes = "1s"\n' for name in tables
        )
        config = polling_config(lake=lake, dsn=dsn, tables=["m.*"], extra=sections)
    daemon = make_daemon(config)
    run_command(daemon.config_path, "check")
    daemon.start()
    await_until(lambda: len(daemon.events("table.stopped")) > 1, LIMIT_S, "both to be stopped")
    for name in tables:
        database.execute(
            f"UPDATE {name} SET d = 7 WHERE d = 1",
            f"DELETE FROM {name} WHERE ctid IN (SELECT ctid FROM {name} LIMIT 1)",
        )
    run_command(daemon.config_path, "verify")
    run_command(daemon.config_path, "verify")
    stopped = {event["table"] for event in daemon.events("table.stopped")}
    assert stopped == {"m.bad", "m.worse"}
    assert not calls_of(database, role)


INLINED = "RETURNS int IMMUTABLE LANGUAGE sql AS $$ SELECT m.evil('') + $1 $$"
OTHERS = {
    "INDEX": (
        'CREATE INDEX "by id" ON m.victim (id)',
        "CREATE INDEX \"by\x1bid\" ON m.t ((m.evil('') + id))",
    ),
    "STATISTICS": (
        'CREATE STATISTICS m."by id" ON id, b FROM m.victim',
        "CREATE STATISTICS m.\"by\x1bid\" ON (m.evil('') + id) FROM m.t",
    ),
    "FUNCTION": (
        f'CREATE FUNCTION m."by id"(int) {INLINED}',
        f'CREATE FUNCTION m."by\x1bid"(int) {INLINED}',
        'ALTER FUNCTION m."by\x1bid" OWNER TO {owner}',
        'CREATE INDEX ON m.t ((m."by\x1bid"(id)))',
    ),
}
"""An object of the owner's, and one whose name differs by a blank for a control character."""
LEFT = {
    "INDEX": "SELECT count(*)::int FROM pg_class WHERE relname = %s",
    "STATISTICS": "SELECT count(*)::int FROM pg_statistic_ext WHERE stxname = %s",
    "FUNCTION": "SELECT count(*)::int FROM pg_proc WHERE proname = %s AND proconfig IS NULL",
}


@pytest.mark.parametrize("made", OTHERS)
async def test_a_pasted_remedy_names_no_other_object(
    database: Database, owner: str, stranger: str, made: str
) -> None:
    """What is pasted is what was printed: a control character is printed as a blank."""
    hand_over(database, owner)
    database.execute(
        "CREATE TABLE m.t (id int)",
        "CREATE TABLE m.victim (id int, b int)",
        *(statement.format(owner=owner) for statement in OTHERS[made]),
    )
    table = await table_named(database, "t")
    async with await connect(
        make_conninfo(database.dsn, user=stranger), autocommit=False
    ) as connection:
        with pytest.raises(TableError) as refused:
            await lock_table(connection, table, BlockRange("m", "t", oid=table.oid))
    remedy = refused.value.remedy or ""
    database.execute(one_line(printable_lines(remedy)).partition("  ")[0])
    assert database.value(LEFT[made], "by id") == 1
    assert database.value(LEFT[made], "by\x1bid") == 0
