"""DDL between two catalog polls causes a re-read unless they prove it harmless (I6).

Each case is a table; all live through one daemon on a real server. `is_read` says whether the table
has to be read again (True), must not be (False), or may be (None).
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from ingestd.model.schema import TableId
from ingestd.testing.oracle.comparison import await_caught_up, compare_source
from tests.harness.compare import raw_rows
from tests.harness.config import wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 150.0
PLAIN = (
    "CREATE TABLE {t} (id int PRIMARY KEY, n int, note text)",
    "INSERT INTO {t} SELECT i, i, 'a' FROM generate_series(1, 9) i",
)
NARROW = (
    "CREATE TABLE {t} (id int PRIMARY KEY, n int)",
    "INSERT INTO {t} SELECT i, i FROM generate_series(1, 9) i",
)
PARTED = (
    "CREATE TABLE {t} (id int PRIMARY KEY, n int, note text) PARTITION BY RANGE (id)",
    "CREATE TABLE {t}_1 PARTITION OF {t} FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE {t}_2 PARTITION OF {t} FOR VALUES FROM (100) TO (200)",
    "CREATE TABLE {t}_empty PARTITION OF {t} FOR VALUES FROM (200) TO (300)",
    "INSERT INTO {t} SELECT i, i, 'a' FROM generate_series(95, 104) i",
)
NARROW_PARTED = tuple(s.replace(", note text", "").replace(", 'a'", "") for s in PARTED)
FULL = (*PLAIN, "ALTER TABLE {t} REPLICA IDENTITY FULL")
MORE = "INSERT INTO {t} VALUES (10, 10, 'more')"
NEW_PART = "CREATE TABLE {t}_3 (LIKE {t} INCLUDING ALL)"
NEW_ROWS = "INSERT INTO {t}_3 SELECT i, i, repeat('loaded', 2000) FROM generate_series(301, 305) i"
ATTACH = "ALTER TABLE {t} ATTACH PARTITION {t}_3 FOR VALUES FROM (300) TO (400)"
MADE = "CREATE TABLE {t}_3 PARTITION OF {t} FOR VALUES FROM (300) TO (400)"
NEW_ROW = "INSERT INTO {t}_3 VALUES (306, 306, 'kept')"
RELOAD = "INSERT INTO {t}_1 SELECT i, 0, 'reloaded' FROM generate_series(1, 5) i"
GRANT = "GRANT SELECT ON {t} TO PUBLIC"


@dataclass(frozen=True)
class Case:
    """Each of `steps` is a transaction; one that begins with ``=`` runs outside of any."""

    name: str
    create: tuple[str, ...]
    steps: tuple[tuple[str, ...], ...]
    is_read: bool | None

    def sql(self, statement: str) -> str:
        return statement.replace("{t}", f"public.{self.name}").replace("{s}", self.name)


def block(*statements: str) -> str:
    """Statements of which the second and later are in a block with an EXCEPTION clause."""
    first, *inner = statements
    body = "; ".join(inner)
    return f"DO $$ BEGIN {first}; BEGIN {body}; EXCEPTION WHEN others THEN RAISE; END; END $$"


ATTACHED = (
    Case("attach_loaded", PARTED, ((NEW_PART, NEW_ROWS, ATTACH),), is_read=True),
    Case(
        "attach_subtransaction",
        PARTED,
        ((NEW_PART, "SAVEPOINT s", NEW_ROWS, "RELEASE s", ATTACH),),
        is_read=True,
    ),
    Case("attach_block", PARTED, ((block(NEW_PART, NEW_ROWS), ATTACH),), is_read=True),
    Case(
        "attach_older_transaction",
        PARTED,
        ((NEW_PART,), (NEW_ROWS,), (ATTACH,)),
        is_read=True,
    ),
    Case(
        "attach_updated",
        (*PARTED, "ALTER TABLE {t} ALTER note SET STORAGE EXTERNAL"),
        ((NEW_PART, NEW_ROWS, ATTACH), ("UPDATE {t}_3 SET n = -1",)),
        is_read=True,
    ),
    Case("attach_deleted", PARTED, ((NEW_PART, NEW_ROWS, ATTACH), ("DELETE FROM {t}_3",)), None),
    Case(
        "part_made",
        PARTED,
        (("CREATE TABLE {t}_3 PARTITION OF {t} FOR VALUES FROM (300) TO (400)",), (NEW_ROWS,)),
        is_read=False,
    ),
    Case(
        "part_made_emptied",
        PARTED,
        (
            ("CREATE TABLE {t}_3 PARTITION OF {t} FOR VALUES FROM (300) TO (400)",),
            (NEW_ROWS,),
            ("TRUNCATE {t}_3",),
        ),
        is_read=True,
    ),
    *(
        Case(f"part_made_{name}", PARTED, (steps,), is_read=True)
        for name, steps in {
            "emptied_at_once": (MADE, NEW_ROWS, "TRUNCATE {t}_3"),
            "reloaded_at_once": (MADE, NEW_ROWS, "TRUNCATE {t}_3", NEW_ROW),
            "in_savepoint": ("SAVEPOINT a", MADE, "RELEASE a", NEW_ROWS, "TRUNCATE {t}_3", NEW_ROW),
            "with_parts": (
                f"{MADE} PARTITION BY RANGE (id)",
                "CREATE TABLE {t}_3a PARTITION OF {t}_3 FOR VALUES FROM (300) TO (350)",
                NEW_ROWS,
                "TRUNCATE {t}_3",
                NEW_ROW,
            ),
        }.items()
    ),
    Case(
        "part_came_and_went",
        PARTED,
        (
            ("CREATE TABLE {t}_3 PARTITION OF {t} FOR VALUES FROM (300) TO (400)",),
            (NEW_ROWS,),
            ("DROP TABLE {t}_3",),
        ),
        is_read=True,
    ),
)
_AFTER = {
    "nothing": (),
    "analyze": ("ANALYZE {t}_1", "GRANT SELECT ON {t}_1 TO PUBLIC"),
    "set": ("ALTER TABLE {t}_1 SET (fillfactor = 90)",),
    "full": ("=VACUUM FULL {t}_1",),
    "cluster": ("=CLUSTER {t}_1 USING {s}_1_pkey",),
}
TRUNCATED = tuple(
    Case(f"truncate_{how}_{after}", PARTED, (*steps, *((s,) for s in since)), is_read=True)
    for after, since in _AFTER.items()
    for how, steps in {
        "reload": (("TRUNCATE {t}_1",), (RELOAD,)),
        "savepoint": (
            ("SELECT pg_current_xact_id()", "SAVEPOINT a", "TRUNCATE {t}_1", "RELEASE a", RELOAD),
        ),
        "none": (("TRUNCATE {t}_1",),),
    }.items()
)
EMPTY = (
    Case(
        "empty_filled_truncated",
        PARTED,
        (
            ("INSERT INTO {t} VALUES (201, 1, 'x')",),
            ("TRUNCATE {t}_empty",),
            ("=VACUUM FULL {t}_empty",),
        ),
        is_read=True,
    ),
)
UNLOGGED = tuple(
    Case(
        f"unlogged_{name}{after}",
        create,
        (
            (f"ALTER TABLE {stored} SET UNLOGGED",),
            (f"UPDATE {stored} SET n = -n",),
            (f"ALTER TABLE {stored} SET LOGGED",),
            *since,
        ),
        is_read=True,
    )
    for name, create, stored in (
        ("part", PARTED, "{t}_1"),
        ("narrow_part", NARROW_PARTED, "{t}_1"),
        ("plain", PLAIN, "{t}"),
        ("narrow", NARROW, "{t}"),
    )
    for after, since in {
        "": (),
        "_granted": ((f"GRANT SELECT ON {stored} TO PUBLIC",), (f"ANALYZE {stored}",)),
    }.items()
)
"""Those of plain tables only where a schema is published."""
OTHER_KEY = "CREATE UNIQUE INDEX {s}_1_n ON {t}_1 (n)"
BY_OTHER_KEY = "ALTER TABLE {t}_1 REPLICA IDENTITY USING INDEX {s}_1_n"
OF_FIRST = ("UPDATE {t} SET id = id - 10 WHERE n = 96", "DELETE FROM {t} WHERE n = 97")
KEYED = (
    *(
        Case(f"identity_of_a_partition_{name}", (*PARTED, *create), steps, is_read=True)
        for name, create, steps in (
            (
                "at_once",
                ("ALTER TABLE {t}_1 ALTER n SET NOT NULL", OTHER_KEY),
                ((BY_OTHER_KEY, *OF_FIRST, "ALTER TABLE {t}_1 REPLICA IDENTITY DEFAULT"),),
            ),
            (
                "there_and_back",
                ("ALTER TABLE {t}_1 ALTER n SET NOT NULL", OTHER_KEY),
                (
                    (BY_OTHER_KEY,),
                    OF_FIRST,
                    ("ALTER TABLE {t}_1 REPLICA IDENTITY DEFAULT",),
                    ("UPDATE {t} SET n = 0 WHERE id = 98",),
                ),
            ),
            (
                "moves_rows",
                ("ALTER TABLE {t}_1 ALTER n SET NOT NULL", OTHER_KEY),
                (
                    (
                        BY_OTHER_KEY,
                        "UPDATE {t} SET id = id + 90 WHERE n = 97",
                        "DROP INDEX {t}_1_n",
                        "ALTER TABLE {t}_1 REPLICA IDENTITY DEFAULT",
                    ),
                ),
            ),
            (
                "whole_rows",
                (
                    "ALTER TABLE {t} DROP CONSTRAINT {s}_pkey",
                    "ALTER TABLE {t} REPLICA IDENTITY FULL",
                    *(f"ALTER TABLE {{t}}_{n} REPLICA IDENTITY FULL" for n in ("1", "2", "empty")),
                    "ALTER TABLE {t}_1 ADD PRIMARY KEY (id)",
                ),
                (
                    (
                        "ALTER TABLE {t}_1 REPLICA IDENTITY DEFAULT",
                        *OF_FIRST,
                        "ALTER TABLE {t}_1 REPLICA IDENTITY FULL",
                    ),
                ),
            ),
        )
    ),
    Case(
        "key_dropped_and_added",
        FULL,
        (
            ("ALTER TABLE {t} DROP CONSTRAINT {s}_pkey",),
            ("INSERT INTO {t} VALUES (2, 0, 'new')",),
            ("DELETE FROM {t} WHERE id = 2 AND note = 'a'",),
            ("ALTER TABLE {t} ADD PRIMARY KEY (id)",),
        ),
        is_read=True,
    ),
    Case(
        "key_replaced_at_once",
        FULL,
        (
            (
                "ALTER TABLE {t} DROP CONSTRAINT {s}_pkey",
                "INSERT INTO {t} VALUES (2, 0, 'new')",
                "DELETE FROM {t} WHERE id = 2 AND note = 'a'",
                "ALTER TABLE {t} ADD PRIMARY KEY (id)",
            ),
        ),
        is_read=True,
    ),
    Case(
        "key_moved",
        PLAIN,
        (
            (
                "ALTER TABLE {t} DROP CONSTRAINT {s}_pkey",
                "ALTER TABLE {t} ALTER n SET NOT NULL",
                "ALTER TABLE {t} ADD PRIMARY KEY (n)",
            ),
            ("UPDATE {t} SET id = id + 100 WHERE n > 5", "DELETE FROM {t} WHERE n = 1"),
        ),
        is_read=True,
    ),
    Case(
        "identity_there_and_back",
        (*PLAIN, "ALTER TABLE {t} ALTER n SET NOT NULL", "CREATE UNIQUE INDEX {s}_n ON {t} (n)"),
        (
            ("ALTER TABLE {t} REPLICA IDENTITY USING INDEX {s}_n",),
            ("UPDATE {t} SET note = 'b' WHERE n = 3", "DELETE FROM {t} WHERE n = 4"),
            ("ALTER TABLE {t} REPLICA IDENTITY DEFAULT",),
        ),
        is_read=True,
    ),
    Case(
        "identity_index",
        (*PLAIN, "ALTER TABLE {t} ALTER n SET NOT NULL", "CREATE UNIQUE INDEX {s}_n ON {t} (n)"),
        (
            ("ALTER TABLE {t} REPLICA IDENTITY USING INDEX {s}_n",),
            ("UPDATE {t} SET note = 'b' WHERE n = 3", "DELETE FROM {t} WHERE n = 4"),
        ),
        is_read=True,
    ),
    Case(
        "key_typmod",
        (
            "CREATE TABLE {t} (id numeric(6, 2) PRIMARY KEY, n int, note text)",
            "INSERT INTO {t} SELECT i, i, 'a' FROM generate_series(1, 9) i",
        ),
        (("ALTER TABLE {t} ALTER id TYPE numeric(9, 2)",), MORE_ROW := (MORE,)),
        is_read=True,
    ),
    Case(
        "deferrable_shifted",
        (
            "CREATE TABLE {t} (id int PRIMARY KEY DEFERRABLE, n int, note text)",
            "ALTER TABLE {t} REPLICA IDENTITY FULL",
            "INSERT INTO {t} SELECT i, i, 'a' FROM generate_series(1, 9) i",
        ),
        (("UPDATE {t} SET id = id + 1",), ("UPDATE {t} SET id = 11 - id",)),
        is_read=False,
    ),
    Case(
        "made_deferrable",
        FULL,
        (
            (
                "ALTER TABLE {t} DROP CONSTRAINT {s}_pkey",
                "ALTER TABLE {t} ADD PRIMARY KEY (id) DEFERRABLE",
                "UPDATE {t} SET id = id + 1",
            ),
        ),
        is_read=True,
    ),
)
LABELS = (
    Case(
        "label_renamed",
        (
            "CREATE TYPE {t}_mood AS ENUM ('sad', 'ok')",
            "CREATE TABLE {t} (id int PRIMARY KEY, mood {t}_mood, many {t}_mood[])",
            "INSERT INTO {t} VALUES (1, 'sad', '{ok}')",
        ),
        (
            ("ALTER TYPE {t}_mood ADD VALUE 'sleppy'",),
            ("INSERT INTO {t} VALUES (2, 'sleppy', '{sad}')",),
            ("ALTER TYPE {t}_mood RENAME VALUE 'sleppy' TO 'sleepy'",),
        ),
        is_read=True,
    ),
    Case(
        "label_in_array_renamed",
        (
            "CREATE TYPE {t}_mood AS ENUM ('sad', 'ok')",
            "CREATE DOMAIN {t}_often AS {t}_mood[]",
            "CREATE TABLE {t} (id int PRIMARY KEY, many {t}_often)",
        ),
        (
            ("ALTER TYPE {t}_mood ADD VALUE 'sleppy'",),
            ("INSERT INTO {t} VALUES (2, '{sad,sleppy}')",),
            ("ALTER TYPE {t}_mood RENAME VALUE 'sleppy' TO 'sleepy'",),
        ),
        is_read=True,
    ),
    Case(
        "labels_swapped_and_back",
        (
            "CREATE TYPE {t}_mood AS ENUM ('sad', 'ok')",
            "CREATE TABLE {t} (id int PRIMARY KEY, mood {t}_mood)",
        ),
        (
            *tuple(
                (f"ALTER TYPE {{t}}_mood RENAME VALUE '{old}' TO '{new}'",)
                for old, new in (("sad", "x"), ("ok", "sad"), ("x", "ok"))
            ),
            ("INSERT INTO {t} VALUES (2, 'sad')",),
            *tuple(
                (f"ALTER TYPE {{t}}_mood RENAME VALUE '{old}' TO '{new}'",)
                for old, new in (("sad", "x"), ("ok", "sad"), ("x", "ok"))
            ),
        ),
        is_read=True,
    ),
    Case(
        "label_added",
        (
            "CREATE TYPE {t}_mood AS ENUM ('sad', 'ok')",
            "CREATE TABLE {t} (id int PRIMARY KEY, mood {t}_mood)",
            "INSERT INTO {t} VALUES (1, 'sad')",
        ),
        (("ALTER TYPE {t}_mood ADD VALUE 'sleepy'",), ("INSERT INTO {t} VALUES (2, 'sleepy')",)),
        is_read=False,
    ),
)
COLUMNS = (
    Case(
        "column_there_and_back",
        PLAIN,
        (
            ("ALTER TABLE {t} RENAME note TO remark",),
            ("INSERT INTO {t} (id, n, remark) VALUES (10, 10, 'b')",),
            ("ALTER TABLE {t} RENAME remark TO note",),
        ),
        is_read=True,
    ),
)
MOVED = (
    Case(
        "schema_there_and_back",
        PLAIN,
        (
            ("ALTER TABLE {t} SET SCHEMA elsewhere",),
            ("INSERT INTO elsewhere.{s} VALUES (10, 10, 'unseen')",),
            ("ALTER TABLE elsewhere.{s} SET SCHEMA public",),
        ),
        is_read=None,
    ),
    Case(
        "attached_for_a_time",
        (
            "CREATE TABLE {t}_root (id int PRIMARY KEY, n int, note text) PARTITION BY RANGE (id)",
            *PLAIN,
        ),
        (
            ("ALTER TABLE {t}_root ATTACH PARTITION {t} FOR VALUES FROM (0) TO (100)",),
            (MORE, "UPDATE {t} SET note = 'unseen' WHERE id = 3"),
            ("ALTER TABLE {t}_root DETACH PARTITION {t}",),
        ),
        is_read=True,
    ),
)
_SWAP = """
UPDATE pg_class c SET relfilenode = o.relfilenode FROM pg_class o
 WHERE (c.oid, o.oid) IN (SELECT a::regclass::oid, b::regclass::oid FROM (VALUES
   ('{t}', '{t}_new'), ('{t}_new', '{t}'), ('{t}_pkey', '{t}_new_pkey'),
   ('{t}_new_pkey', '{t}_pkey')) AS v (a, b))
"""
HARMLESS = (
    *tuple(
        Case(f"{name}_{where}", create, tuple((s,) for s in steps), is_read=False)
        for where, create in (("plain", PLAIN), ("narrow", NARROW), ("parted", PARTED))
        for name, steps in {
            "vacuum_full": ("=VACUUM FULL {t}",),
            "cluster": ("=CLUSTER {t} USING {s}_pkey",)
            if where != "parted"
            else ("=CLUSTER {t}_1 USING {s}_1_pkey",),
            "analyze": ("ANALYZE {t}",),
            "vacuum": ("=VACUUM (FREEZE, ANALYZE) {t}",),
            "grant": (GRANT, "GRANT SELECT (id) ON {t} TO PUBLIC"),
            "reindex": ("=REINDEX TABLE {t}", "=REINDEX TABLE CONCURRENTLY {t}"),
            "all": ("=VACUUM FULL {t}", "ANALYZE {t}", GRANT, "=REINDEX TABLE CONCURRENTLY {t}"),
            "settings": (
                "ALTER TABLE {t} ALTER n SET STATISTICS 100",
                "COMMENT ON TABLE {t} IS 'x'",
            ),
        }.items()
    ),
    Case("truncate_plain", PLAIN, (("TRUNCATE {t}", MORE), ("ANALYZE {t}",)), is_read=False),
    Case(
        "repack",
        NARROW,
        (
            ("CREATE TABLE {t}_new (LIKE {t} INCLUDING ALL)",),
            ("INSERT INTO {t}_new SELECT * FROM {t}",),
            (_SWAP,),
            ("DROP TABLE {t}_new",),
        ),
        is_read=False,
    ),
)
MANAGED = (
    *ATTACHED,
    *TRUNCATED,
    *EMPTY,
    *UNLOGGED[:4],
    *KEYED,
    *LABELS,
    *COLUMNS,
    *MOVED,
    *HARMLESS,
)
SCHEMA = (
    *UNLOGGED,
    *MOVED,
    *KEYED[:6],
    *(c for c in HARMLESS if "narrow" not in c.name and c.name != "repack"),
)
BY_SCHEMA = (
    "CREATE PUBLICATION {name} FOR TABLES IN SCHEMA public WITH (publish_via_partition_root = true)"
)


@pytest.mark.parametrize(
    ("publication", "way"),
    [
        ("managed", "running"),
        pytest.param("managed", "down", marks=pytest.mark.long),
        pytest.param("schema", "running", marks=pytest.mark.long),
        pytest.param("schema", "down", marks=pytest.mark.long),
    ],
)
def test_i6_between_two_readings(
    database: Database, lake: Path, make_daemon: MakeDaemon, publication: str, way: str
) -> None:
    cases = MANAGED if publication == "managed" else SCHEMA
    database.execute("CREATE SCHEMA elsewhere")
    for case in cases:
        database.execute(*map(case.sql, case.create))
    extra = 'discover_interval = "3s"\n'
    if publication == "schema":
        database.execute(BY_SCHEMA.format(name="by_schema"))
        database.execute("SELECT pg_create_logical_replication_slot('ingestd_shop', 'pgoutput')")
        extra += 'publication = "by_schema"\nmanage = false\nslot = "ingestd_shop"\n'
    daemon = make_daemon(wal_config(lake=lake, dsn=database.dsn, source_extra=extra))
    daemon.start_ready()
    before = {case.name: readings(lake, case) for case in cases}
    if way == "down":
        assert daemon.sigterm() == 0
    for case in cases:
        for statements in case.steps:
            play(database, case, statements)
    if way == "down":
        daemon.start_ready()
    settle(database, lake, daemon)
    read = {case.name: readings(lake, case) > before[case.name] for case in cases}
    wrong = {c.name: read[c.name] for c in cases if c.is_read not in {None, read[c.name]}}
    assert not wrong


def play(database: Database, case: Case, statements: tuple[str, ...]) -> None:
    if statements[0].startswith("="):
        with database.connect(autocommit=True) as session:
            for statement in statements:
                session.execute(case.sql(statement.removeprefix("=")).encode())
        return
    with closing(database.connect(autocommit=False)) as session:
        for statement in statements:
            session.execute(case.sql(statement).encode())
        session.commit()


def readings(lake: Path, case: Case) -> int:
    rows = raw_rows(lake, TableId("public", case.name))
    return sum(1 for row in rows if row["_cdc_op"] == "t" and row["_cdc_seq"] == -1)


def settle(database: Database, lake: Path, daemon: Daemon) -> None:
    """Wait until the catalog was read after all that, and the lake equals the source."""
    database.execute(
        "CREATE TABLE the_last (id int PRIMARY KEY)", "INSERT INTO the_last VALUES (1)"
    )
    last = TableId("public", "the_last")
    await_until(lambda: bool(raw_rows(lake, last)), LIMIT_S, daemon.tail)
    with database.connect() as connection:
        await_caught_up(connection, "ingestd_shop", LIMIT_S)

        def differences() -> list[str]:
            return [str(c) for c in compare_source(connection, str(lake), "shop") if not c.is_equal]

        # What the stream reports at the end of a backlog is judged right after it.
        await_until(lambda: not differences(), LIMIT_S, lambda: "\n".join(differences()))
    daemon.await_ready(LIMIT_S)
