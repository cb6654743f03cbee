"""Histories that once lost rows silently, in smallest form, by what they show.

Each is played twice: with the daemon running, which checks the catalog when all is over, and while
it is down.
"""

from __future__ import annotations

from tests.histories.steps import History, script

LEAVES = (
    "CREATE TABLE {h}_t (id int, g int, note text, PRIMARY KEY (id, g)) PARTITION BY LIST (g)",
    "CREATE TABLE {h}_p0 PARTITION OF {h}_t FOR VALUES IN (0)",
    "INSERT INTO {h}_t SELECT n, 0, 'old' FROM generate_series(1, 4) n",
)
SHARED = (
    *LEAVES,
    "CREATE TABLE {h}_p1 PARTITION OF {h}_t FOR VALUES IN (1)",
    "INSERT INTO {h}_t SELECT n, 1, 'old' FROM generate_series(11, 15) n",
)
BIG = (
    "CREATE TABLE {h}_t (id int, g int, note text, big text) PARTITION BY LIST (g)",
    "ALTER TABLE {h}_t ADD PRIMARY KEY (id, g)",
    "ALTER TABLE {h}_t ALTER big SET STORAGE EXTERNAL",
    "CREATE TABLE {h}_p0 PARTITION OF {h}_t FOR VALUES IN (0)",
)
KEYED = (
    "CREATE TABLE {h}_t (id int PRIMARY KEY, v text)",
    "INSERT INTO {h}_t SELECT n, 'old' FROM generate_series(1, 3) n",
)
FULL = (*KEYED, "ALTER TABLE {h}_t REPLICA IDENTITY FULL")
DEFERRABLE = (
    "CREATE TABLE {h}_t (id int PRIMARY KEY DEFERRABLE, v text)",
    "ALTER TABLE {h}_t REPLICA IDENTITY FULL",
    "INSERT INTO {h}_t SELECT n, 'old' FROM generate_series(1, 3) n",
)
RELOAD = "TRUNCATE {h}_p1;\nINSERT INTO {h}_p1 SELECT n, 1, 'new' FROM generate_series(11, 12) n;\n"


def one(
    name: str,
    create: tuple[str, ...],
    text: str,
    *,
    is_read_again: bool | None = None,
    least: int = 14,
) -> History:
    """Make a history of one phase."""
    return History(name, create, (script(text),), is_read_again, least)


CAME = (
    one(
        "rows_came_and_went_with_a_partition",
        LEAVES,
        """BEGIN;
        CREATE TABLE {h}_p1 PARTITION OF {h}_t FOR VALUES IN (1);
        INSERT INTO {h}_t SELECT n, 1, 'loaded' FROM generate_series(101, 105) n;
        TRUNCATE {h}_p1;
        INSERT INTO {h}_t VALUES (106, 1, 'kept');
        COMMIT;
        """,
    ),
    one(
        "rows_came_in_a_subtransaction",
        LEAVES,
        "DO $$ BEGIN CREATE TABLE {h}_p1 (LIKE {h}_t INCLUDING ALL);"
        " BEGIN INSERT INTO {h}_p1 SELECT n, 1, 'loaded' FROM generate_series(101, 105) n;"
        " EXCEPTION WHEN others THEN NULL; END;"
        " ALTER TABLE {h}_t ATTACH PARTITION {h}_p1 FOR VALUES IN (1); END $$",
    ),
    one(
        "rows_came_after_a_savepoint",
        LEAVES,
        """BEGIN;
        CREATE TABLE {h}_p1 (LIKE {h}_t INCLUDING ALL);
        SAVEPOINT s;
        INSERT INTO {h}_p1 SELECT n, 1, 'loaded' FROM generate_series(101, 105) n;
        RELEASE s;
        ALTER TABLE {h}_t ATTACH PARTITION {h}_p1 FOR VALUES IN (1);
        COMMIT;
        """,
    ),
    one(
        "rows_came_from_another_session",
        LEAVES,
        """CREATE TABLE {h}_p1 (LIKE {h}_t INCLUDING ALL);
        BEGIN;
        SELECT pg_current_xact_id();
        -- session b
        INSERT INTO {h}_p1 SELECT n, 1, 'loaded' FROM generate_series(101, 105) n;
        -- session a
        ALTER TABLE {h}_t ATTACH PARTITION {h}_p1 FOR VALUES IN (1);
        COMMIT;
        """,
    ),
    one(
        "rows_came_of_a_prepared_transaction",
        LEAVES,
        """CREATE TABLE {h}_p1 (LIKE {h}_t INCLUDING ALL);
        BEGIN;
        SELECT pg_current_xact_id();
        -- session b
        BEGIN;
        INSERT INTO {h}_p1 SELECT n, 1, 'loaded' FROM generate_series(101, 105) n;
        PREPARE TRANSACTION '{h}_x';
        COMMIT PREPARED '{h}_x';
        -- session a
        ALTER TABLE {h}_t ATTACH PARTITION {h}_p1 FOR VALUES IN (1);
        COMMIT;
        """,
    ),
    one(
        "rows_that_came_are_updated",
        BIG,
        """CREATE TABLE {h}_p1 (LIKE {h}_t INCLUDING ALL);
        INSERT INTO {h}_p1 SELECT n, 1, 'came', repeat('x', 3000) FROM generate_series(1, 3) n;
        ALTER TABLE {h}_t ATTACH PARTITION {h}_p1 FOR VALUES IN (1);
        UPDATE {h}_t SET note = 'updated';
        """,
    ),
)
TRUNCATED = (
    one("reloaded_and_analyzed", SHARED, f"{RELOAD}ANALYZE {{h}}_p1;"),
    one(
        "reloaded_and_granted",
        SHARED,
        f"{RELOAD}ANALYZE {{h}}_p1;\nGRANT SELECT ON {{h}}_p1 TO pg_monitor;",
    ),
    one("reloaded_and_vacuumed", SHARED, f"{RELOAD}VACUUM FULL {{h}}_p1;"),
    one("reloaded_and_clustered", SHARED, f"{RELOAD}CLUSTER {{h}}_p1 USING {{h}}_p1_pkey;"),
    one(
        "reloaded_and_set",
        SHARED,
        f"{RELOAD}ANALYZE {{h}}_p1;\nALTER TABLE {{h}}_p1 SET (fillfactor = 70);",
    ),
    one(
        "reloaded_with_a_trigger",
        SHARED,
        f"{RELOAD}ANALYZE {{h}}_p1;\nCREATE TRIGGER tr BEFORE UPDATE ON {{h}}_p1"
        " FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger();",
    ),
    one(
        "reloaded_after_a_savepoint",
        SHARED,
        """BEGIN;
        SELECT pg_current_xact_id();
        SAVEPOINT a;
        TRUNCATE {h}_p1;
        RELEASE a;
        INSERT INTO {h}_p1 SELECT n, 1, 'new' FROM generate_series(11, 12) n;
        COMMIT;
        ANALYZE {h}_p1;
        """,
    ),
)
DOUBLED = (
    one("deferrable_key_shifted", DEFERRABLE, "UPDATE {h}_t SET id = id + 1;"),
    one(
        "deferrable_key_swapped",
        DEFERRABLE,
        "UPDATE {h}_t SET id = CASE id WHEN 1 THEN 2 WHEN 2 THEN 1 ELSE id END;",
    ),
    one(
        "key_dropped_and_added",
        FULL,
        """ALTER TABLE {h}_t DROP CONSTRAINT {h}_t_pkey;
        INSERT INTO {h}_t VALUES (4, 'old'), (4, 'new');
        DELETE FROM {h}_t WHERE id = 4 AND v = 'old';
        ALTER TABLE {h}_t ADD PRIMARY KEY (id);
        """,
    ),
    one(
        "key_dropped_and_added_at_once",
        FULL,
        """BEGIN;
        ALTER TABLE {h}_t DROP CONSTRAINT {h}_t_pkey;
        INSERT INTO {h}_t VALUES (4, 'old'), (4, 'new');
        DELETE FROM {h}_t WHERE id = 4 AND v = 'old';
        ALTER TABLE {h}_t ADD PRIMARY KEY (id);
        COMMIT;
        """,
    ),
    one(
        "key_dropped_loaded_and_added",
        KEYED,
        """BEGIN;
        ALTER TABLE {h}_t REPLICA IDENTITY FULL;
        ALTER TABLE {h}_t DROP CONSTRAINT {h}_t_pkey;
        INSERT INTO {h}_t VALUES (4, 'old'), (4, 'new');
        DELETE FROM {h}_t WHERE id = 4 AND v = 'old';
        ALTER TABLE {h}_t ADD PRIMARY KEY (id);
        ALTER TABLE {h}_t REPLICA IDENTITY DEFAULT;
        COMMIT;
        """,
    ),
)
LABELS = ("CREATE TYPE {h}_mood AS ENUM ('ok', 'sad')",)
CAME_AND_WENT = (
    one(
        "attached_and_detached",
        (
            *LEAVES,
            "CREATE TABLE {h}_s (id int, g int, note text, PRIMARY KEY (id, g))",
            "INSERT INTO {h}_s SELECT n, 5, 'old' FROM generate_series(1, 3) n",
        ),
        """ALTER TABLE {h}_t ATTACH PARTITION {h}_s FOR VALUES IN (5);
        INSERT INTO {h}_t VALUES (4, 5, 'new');
        UPDATE {h}_t SET note = 'updated' WHERE id = 2 AND g = 5;
        ALTER TABLE {h}_t DETACH PARTITION {h}_s;
        """,
    ),
    one(
        "label_added_used_and_renamed",
        (*LABELS, "CREATE TABLE {h}_t (id int PRIMARY KEY, m {h}_mood)"),
        """ALTER TYPE {h}_mood ADD VALUE 'sleppy';
        INSERT INTO {h}_t VALUES (1, 'sleppy');
        ALTER TYPE {h}_mood RENAME VALUE 'sleppy' TO 'sleepy';
        """,
    ),
    one(
        "label_renamed_there_and_back",
        (*LABELS, "CREATE TABLE {h}_t (id int PRIMARY KEY, m {h}_mood)"),
        """ALTER TYPE {h}_mood RENAME VALUE 'sad' TO 'blue';
        INSERT INTO {h}_t VALUES (1, 'blue');
        ALTER TYPE {h}_mood RENAME VALUE 'blue' TO 'sad';
        """,
    ),
    one(
        "partition_unlogged_for_a_time",
        SHARED,
        """ALTER TABLE {h}_p1 SET UNLOGGED;
        UPDATE {h}_t SET note = 'unlogged' WHERE g = 1;
        ALTER TABLE {h}_p1 SET LOGGED;
        GRANT SELECT ON {h}_p1 TO pg_monitor;
        """,
    ),
)
MOVED = (
    one(
        "schema_there_and_back",
        KEYED,
        """ALTER TABLE {h}_t SET SCHEMA elsewhere;
        INSERT INTO elsewhere.{h}_t VALUES (4, 'unseen');
        UPDATE elsewhere.{h}_t SET v = 'unseen' WHERE id = 1;
        ALTER TABLE elsewhere.{h}_t SET SCHEMA public;
        """,
        least=15,
    ),
)
"""Of a publication FOR TABLES IN SCHEMA."""
PUBLISHED = (
    one(
        "publish_option_there_and_back",
        KEYED,
        """ALTER PUBLICATION "{p}" SET (publish = 'insert');
        UPDATE {h}_t SET v = 'unseen' WHERE id = 1;
        ALTER PUBLICATION "{p}" SET (publish = 'insert, update, delete, truncate');
        """,
        least=15,
    ),
    one(
        "schema_left_the_publication",
        KEYED,
        """ALTER PUBLICATION "{p}" DROP TABLES IN SCHEMA public;
        UPDATE {h}_t SET v = 'unseen' WHERE id = 1;
        ALTER PUBLICATION "{p}" ADD TABLES IN SCHEMA public;
        """,
        least=15,
    ),
    one(
        "schema_renamed_there_and_back",
        KEYED,
        """ALTER SCHEMA public RENAME TO gone;
        UPDATE gone.{h}_t SET v = 'unseen' WHERE id = 1;
        ALTER SCHEMA gone RENAME TO public;
        """,
        least=15,
    ),
    one(
        "publication_given_away_and_back",
        KEYED,
        """ALTER PUBLICATION "{p}" OWNER TO pg_monitor;
        ALTER PUBLICATION "{p}" SET (publish = 'insert');
        UPDATE {h}_t SET v = 'unseen' WHERE id = 1;
        ALTER PUBLICATION "{p}" SET (publish = 'insert, update, delete, truncate');
        ALTER PUBLICATION "{p}" OWNER TO postgres;
        """,
        least=15,
    ),
)
"""The same, each in a life of its own: it has every table read again."""
NAMED_OBJECTS = (
    one(
        "relation_of_a_value_renamed",
        (
            "CREATE TABLE {h}_t (id int PRIMARY KEY, r regclass)",
            "CREATE TABLE elsewhere.{h}_a (x int)",
            "INSERT INTO {h}_t VALUES (1, 'elsewhere.{h}_a')",
        ),
        """ALTER TABLE elsewhere.{h}_a RENAME TO {h}_b;
        INSERT INTO {h}_t VALUES (2, 'elsewhere.{h}_b');
        """,
    ),
    one(
        "type_of_a_value_renamed",
        (
            *LABELS,
            "CREATE TABLE {h}_t (id int PRIMARY KEY, r regtype)",
            "INSERT INTO {h}_t VALUES (1, '{h}_mood')",
        ),
        "ALTER TYPE {h}_mood RENAME TO {h}_spirit;",
    ),
)
IDENTIFIED = (
    one(
        "identity_moved",
        (*KEYED, "ALTER TABLE {h}_t ADD k int NOT NULL DEFAULT 7, ADD UNIQUE (k, id)"),
        "ALTER TABLE {h}_t REPLICA IDENTITY USING INDEX {h}_t_k_id_key;",
        is_read_again=True,
    ),
    one(
        "key_moved",
        (*KEYED, "ALTER TABLE {h}_t ADD k int", "UPDATE {h}_t SET k = id + 10"),
        "ALTER TABLE {h}_t DROP CONSTRAINT {h}_t_pkey, ADD PRIMARY KEY (k);",
        is_read_again=True,
    ),
    one(
        "typmod_of_a_key",
        ("CREATE TABLE {h}_t (id numeric(10, 2) PRIMARY KEY)", "INSERT INTO {h}_t VALUES (1)"),
        "ALTER TABLE {h}_t ALTER id TYPE numeric(12, 2);\nINSERT INTO {h}_t VALUES (2);",
        is_read_again=True,
    ),
)
RETURNED = (
    one(
        "left_the_publication_and_returned",
        KEYED,
        # The daemon may have put it back.
        """ALTER PUBLICATION "{p}" DROP TABLE {h}_t;
        UPDATE {h}_t SET v = 'unseen' WHERE id = 1;
        """
        'DO $$ BEGIN ALTER PUBLICATION "{p}" ADD TABLE {h}_t;'
        " EXCEPTION WHEN duplicate_object THEN END $$",
    ),
)
DROPPED = (
    History(
        "changes_before_a_drop",
        KEYED,
        (script("INSERT INTO {h}_t VALUES (4, 'last');\nDROP TABLE {h}_t;"),),
        logged=("last",),
    ),
)
NAMED = (
    *CAME,
    *TRUNCATED,
    *DOUBLED,
    *CAME_AND_WENT,
    *NAMED_OBJECTS,
    *IDENTIFIED,
    *RETURNED,
    *DROPPED,
)

NOT_VALID = one(
    "null_in_an_identity",
    (
        "CREATE TABLE {h}_t (id int, v text)",
        "CREATE UNIQUE INDEX {h}_i ON {h}_t (id)",
        "INSERT INTO {h}_t VALUES (NULL, 'a'), (NULL, 'b')",
        "ALTER TABLE {h}_t ADD CONSTRAINT {h}_n NOT NULL id NOT VALID",
        "ALTER TABLE {h}_t REPLICA IDENTITY USING INDEX {h}_i",
    ),
    "UPDATE {h}_t SET v = 'c' WHERE v = 'a';",
    least=18,
)
"""PostgreSQL 18."""
