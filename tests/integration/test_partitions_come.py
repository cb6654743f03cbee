"""Which partitions were attached with rows that no change reports, on a real server.

The table of a partition that was empty when it came is not read anew, whatever was written to it
since; one that came with a row has its table read anew, whoever has tried to change that row since.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from ingestd.postgres.connection.session import connect
from ingestd.postgres.rewrites.fingerprint import TableFingerprint
from ingestd.postgres.rewrites.fingerprint_queries import (
    difference,
    read_attach_xids,
    read_empty,
    read_files,
)
from ingestd.postgres.snapshot.read_view import current_pg_snapshot

if TYPE_CHECKING:
    from psycopg import AsyncConnection

    from tests.harness.databases import Database

RANGE = "FOR VALUES FROM (0) TO (100)"
MAKE = f"CREATE TABLE leaf PARTITION OF t {RANGE}"
MAKE_ALONE = "CREATE TABLE leaf (id int PRIMARY KEY, note text)"
ATTACH = f"ALTER TABLE t ATTACH PARTITION leaf {RANGE}"
DETACH = "ALTER TABLE t DETACH PARTITION leaf"
BRANCH = f"CREATE TABLE branch PARTITION OF t {RANGE} PARTITION BY RANGE (id)"
BRANCH_ALONE = "CREATE TABLE branch (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)"
BRANCH_LEAF = f"CREATE TABLE leaf PARTITION OF branch {RANGE}"
ATTACH_BRANCH = f"ALTER TABLE t ATTACH PARTITION branch {RANGE}"
DETACH_BRANCH = "ALTER TABLE t DETACH PARTITION branch"
ATTACH_TO_BRANCH = f"ALTER TABLE branch ATTACH PARTITION leaf {RANGE}"
UNLOGGED = "CREATE UNLOGGED TABLE leaf (id int PRIMARY KEY, note text)"
MAKE_UNLOGGED = f"CREATE UNLOGGED TABLE leaf PARTITION OF t {RANGE}"
REWRITE = "ALTER TABLE t ADD n float DEFAULT random()"
INSERT = "INSERT INTO leaf VALUES (1, 'a')"
UPDATE = "UPDATE leaf SET note = 'b'"
TRUNCATE, COUNT, GRANT = "TRUNCATE leaf", "ANALYZE leaf", "GRANT SELECT ON leaf TO PUBLIC"
VACUUM = "VACUUM leaf"
CLUSTER = "CLUSTER leaf USING leaf_pkey"
MORE = "INSERT INTO leaf VALUES (2, 'b')"
FILLED_BEFORE = (MAKE, INSERT)
LATE_UPDATE = (*["INSERT INTO other VALUES (1)"] * 9, UPDATE)
"""An update with a larger command id than anything else here has."""


@dataclass(frozen=True)
class Coming:
    """`steps`: transactions after the last look, `before`: the one before it.

    `undone` is rolled back in the end; `under_way` is still open when the catalog is polled.
    """

    name: str
    steps: tuple[tuple[str, ...], ...]
    before: tuple[str, ...] = ()
    undone: tuple[str, ...] = ()
    under_way: tuple[str, ...] = ()


EMPTY = (
    Coming("attached", ((MAKE_ALONE,), (ATTACH,))),
    Coming("attached_at_once", ((MAKE_ALONE, ATTACH),), undone=(DETACH,)),
    Coming("made", ((MAKE,),)),
    Coming("made_then_written", ((MAKE,), (INSERT,))),
    Coming("made_and_written", ((MAKE, INSERT),)),
    Coming("made_written_and_update_undone", ((MAKE, INSERT),), undone=(UPDATE,)),
    Coming("made_written_and_update_under_way", ((MAKE, INSERT),), under_way=(UPDATE,)),
    Coming(
        "made_written_and_locked", ((MAKE, INSERT),), under_way=("SELECT FROM leaf FOR UPDATE",)
    ),
    Coming("made_in_a_savepoint", (("SAVEPOINT s", MAKE, "RELEASE s", INSERT),)),
    Coming("made_and_altered", ((MAKE, INSERT), ("ALTER TABLE t ALTER note SET DEFAULT 'x'",))),
    Coming("below_a_branch", ((BRANCH, BRANCH_LEAF, INSERT),), undone=(UPDATE,)),
    Coming("below_an_old_branch", ((BRANCH_LEAF, INSERT),), (BRANCH,), undone=(UPDATE,)),
    Coming(
        "below_a_branch_attached_before", ((BRANCH_LEAF, INSERT),), (BRANCH_ALONE, ATTACH_BRANCH)
    ),
)
FILLED = (
    # What was tried leaves the same trace as what was done.
    Coming("made_and_drop_undone", ((MAKE,), (INSERT,)), undone=("DROP TABLE leaf",)),
    # Nothing distinguishes rows of after the ATTACH from those of before it.
    Coming("attached_empty", ((MAKE_ALONE,), (ATTACH,), (INSERT,))),
    Coming("attached_empty_and_insert_undone", ((MAKE_ALONE, ATTACH),), undone=(INSERT,)),
    Coming("below_an_attached_branch", ((BRANCH_ALONE, BRANCH_LEAF, ATTACH_BRANCH), (INSERT,))),
    Coming("in_a_subtransaction", ((MAKE_ALONE, "SAVEPOINT s", INSERT, "RELEASE s", ATTACH),)),
    Coming("updated_since", ((MAKE_ALONE, INSERT, ATTACH), (UPDATE,))),
    Coming("emptied_since", ((MAKE_ALONE, INSERT, ATTACH), ("DELETE FROM leaf",))),
    Coming("cut_off_since", ((MAKE_ALONE, INSERT, ATTACH), ("DELETE FROM leaf",), (VACUUM,))),
    Coming("attached", ((MAKE_ALONE, INSERT), (ATTACH,))),
    Coming("attached_at_once", ((MAKE_ALONE, INSERT, ATTACH),)),
    Coming("update_undone", ((MAKE_ALONE, INSERT, ATTACH),), undone=LATE_UPDATE),
    Coming("update_under_way", ((MAKE_ALONE, INSERT, ATTACH),), under_way=LATE_UPDATE),
    Coming("detach_undone", ((MAKE_ALONE, INSERT, ATTACH),), undone=(DETACH,)),
    Coming("drop_undone", ((MAKE_ALONE, INSERT, ATTACH),), undone=("DROP TABLE leaf",)),
    Coming("written_in_the_same_transaction", ((MAKE_ALONE, ATTACH, INSERT),)),
    Coming("made_and_rewritten", ((MAKE, INSERT), (REWRITE,))),
    Coming("made_unlogged", ((MAKE_UNLOGGED,), (INSERT,), ("ALTER TABLE leaf SET LOGGED",))),
    Coming("rewritten", ((MAKE_ALONE, INSERT), (ATTACH,), (REWRITE,))),
    Coming("made_logged", ((UNLOGGED, INSERT), (ATTACH,), ("ALTER TABLE leaf SET LOGGED",))),
    Coming("written_while_detached", ((INSERT, ATTACH),), (MAKE, DETACH)),
    Coming("with_a_branch", ((BRANCH_ALONE, BRANCH_LEAF), (INSERT,), (ATTACH_BRANCH,))),
    Coming("with_a_branch_at_once", ((BRANCH_ALONE, BRANCH_LEAF, INSERT, ATTACH_BRANCH),)),
    Coming("attached_to_a_branch", ((BRANCH,), (MAKE_ALONE, INSERT, ATTACH_TO_BRANCH))),
)


RETURNED = (
    Coming("with_more", ((DETACH, INSERT, ATTACH),), (MAKE,)),
    Coming("with_less", ((DETACH,), ("DELETE FROM leaf",), (ATTACH,)), (MAKE, INSERT)),
    Coming("with_a_branch", ((DETACH_BRANCH,), (INSERT,), (ATTACH_BRANCH,)), (BRANCH, BRANCH_LEAF)),
)

RELOADED = (TRUNCATE, INSERT, MORE)
SINCE = {
    "nothing": (),
    "analyze": (COUNT,),
    "grant": (GRANT,),
    "set": ("ALTER TABLE leaf SET (fillfactor = 90)",),
    "trigger": (
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        "CREATE TRIGGER g AFTER INSERT ON leaf EXECUTE FUNCTION f()",
    ),
    "cluster": (CLUSTER,),
    "analyze_and_grant": (COUNT, GRANT),
    "cluster_and_grant": (CLUSTER, GRANT),
}
EMPTIED = (
    Coming("truncated", ((TRUNCATE,),), FILLED_BEFORE),
    *(
        Coming(f"{how}_and_{name}", (*steps, *((s,) for s in since)), FILLED_BEFORE)
        for name, since in SINCE.items()
        for how, steps in {
            "reloaded": ((TRUNCATE,), (INSERT,)),
            "reloaded_at_once": (RELOADED,),
            "reloaded_in_a_subtransaction": (
                ("SELECT pg_current_xact_id()", "SAVEPOINT a", TRUNCATE, "RELEASE a", INSERT),
            ),
        }.items()
    ),
)
KEPT = (
    Coming("clustered", ((CLUSTER,),), FILLED_BEFORE),
    Coming("clustered_and_granted", ((CLUSTER,), (COUNT,), (GRANT,)), FILLED_BEFORE),
    Coming("written", ((MORE,), (CLUSTER,)), FILLED_BEFORE),
    *(
        Coming(name, tuple((s,) for s in since), FILLED_BEFORE)
        for name, since in SINCE.items()
        if since
    ),
)


@pytest.mark.parametrize("coming", EMPTIED, ids=attrgetter("name"))
async def test_i6_a_partition_that_was_emptied_is_read(database: Database, coming: Coming) -> None:
    assert await reason_after(database, coming) == "a partition was truncated directly"


@pytest.mark.thorough
@pytest.mark.parametrize("coming", KEPT, ids=attrgetter("name"))
async def test_i7_a_partition_whose_file_was_recreated_is_not_read(
    database: Database, coming: Coming
) -> None:
    assert await reason_after(database, coming) is None


@pytest.mark.thorough
@pytest.mark.parametrize("coming", EMPTY, ids=attrgetter("name"))
async def test_i7_a_partition_that_came_empty_is_not_read(
    database: Database, coming: Coming
) -> None:
    assert await reason_after(database, coming) is None


@pytest.mark.thorough
@pytest.mark.parametrize("coming", FILLED, ids=attrgetter("name"))
async def test_i6_a_partition_that_came_with_rows_is_read(
    database: Database, coming: Coming
) -> None:
    assert await reason_after(database, coming) == "a partition was added with rows"


@pytest.mark.parametrize("coming", RETURNED, ids=attrgetter("name"))
async def test_i6_a_partition_that_was_away_is_read(database: Database, coming: Coming) -> None:
    assert await reason_after(database, coming) == "a partition was detached and attached again"


async def test_i6_a_partition_still_being_detached_is_left_out(database: Database) -> None:
    """DETACH CONCURRENTLY waits for readers of the table, or was interrupted while it waited."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)", MAKE, INSERT
    )
    oid = int(database.value("SELECT 't'::regclass::int8"))
    async with await connect(database.dsn) as looking:
        then = await stored(looking, oid)
        with (
            closing(database.connect(autocommit=False)) as reading,
            closing(database.connect(autocommit=True)) as detaching,
        ):
            reading.execute("SELECT FROM t")
            detaching.execute("SET statement_timeout = '500ms'")
            with pytest.raises(psycopg.errors.QueryCanceled):
                detaching.execute(f"{DETACH} CONCURRENTLY")
        assert database.value("SELECT count(*) FROM t") == 0
        now = await stored(looking, oid)
        reason = await difference(looking, oid, then, now)
        assert reason == "a partition was detached or dropped"
        database.execute(f"{DETACH} FINALIZE")
        assert await difference(looking, oid, now, await stored(looking, oid)) is None


async def reason_after(database: Database, coming: Coming) -> str | None:
    """Play it and return the result of the next catalog poll."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)",
        "CREATE TABLE other (id int)",
    )
    run(database, coming.before)
    oid = int(database.value("SELECT 't'::regclass::int8"))
    async with await connect(database.dsn) as looking:
        then = await stored(looking, oid)
        for step in coming.steps:
            run(database, step)
        run(database, coming.undone, keep=False)
        with closing(database.connect(autocommit=False)) as session:
            for statement in coming.under_way:
                session.execute(statement.encode())
            return await difference(looking, oid, then, await stored(looking, oid))


async def stored(looking: AsyncConnection[Any], oid: int) -> TableFingerprint:
    files, toast = await read_files(looking, [oid])
    places = await read_attach_xids(looking, [oid])
    return TableFingerprint(
        (),
        files.get(oid, {}),
        attach_xids=places.get(oid, {}),
        toast=toast.get(oid, {}),
        ended=(await current_pg_snapshot(looking)).xmin,
    )


def run(database: Database, statements: tuple[str, ...], *, keep: bool = True) -> None:
    with closing(database.connect(autocommit=statements == (VACUUM,))) as session:
        for statement in statements:
            session.execute(statement.encode())
        if keep:
            session.commit()


async def test_i7_an_empty_partition_rewritten_meanwhile_stays_empty(
    database: Database,
) -> None:
    """So does a locked one; one that has rows now does not."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)",
        *(f"CREATE TABLE p{n} PARTITION OF t FOR VALUES FROM ({n}) TO ({n + 1})" for n in (1, 2)),
    )
    oid = database.rows("SELECT 't'::regclass::oid::int8")[0][0]
    async with await connect(database.dsn, lock_timeout_s=0.5) as looking:
        files, _ = await read_files(looking, [oid])
        before = await read_empty(looking, files[oid])
        assert before == files[oid].keys()
        with closing(database.connect(autocommit=True)) as other:
            other.execute("VACUUM FULL p1")
        database.execute("INSERT INTO t VALUES (2, 'a')")
        [first] = [p for p in before if database.rows(f"SELECT {p}::regclass::text") == [("p1",)]]
        assert await read_empty(looking, files[oid]) == set()
        assert await read_empty(looking, files[oid], before) == {first}
        with closing(database.connect(autocommit=False)) as other:
            other.execute("LOCK TABLE p1")
            assert await read_empty(looking, files[oid], before) == before
