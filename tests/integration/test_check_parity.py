"""`check` and `run` agree on every table: kinds of keys, identities, settings and relations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ingestd.app.check import check
from ingestd.testing.embedded.daemon import Daemon
from tests.harness.config import polling_config, wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from tests.harness.databases import Database

LIMIT_S = 120.0
KEY_TYPES = [
    "float8",
    "real",
    "numeric",
    "char(5)",
    "bit(3)",
    "varbit(5)",
    "bytea",
    "uuid",
    "date",
    "timestamp",
    "timestamptz",
    "time",
    "timetz",
    "interval",
    "inet",
    "cidr",
    "macaddr",
    "money",
    "oid",
    "name",
    "boolean",
    "int[]",
    "text[]",
    "int4range",
    "int4multirange",
    "mood",
    "pair",
    "positive",
    "mood_of",
    "pair_of",
    "jsonb",
    "tsvector",
    "tsquery",
    "pg_lsn",
    "xid8",
    "regclass",
    "regtype",
    "regproc",
    "regrole",
    "oidvector",
    '"char"',
    "numeric(20,-2)",
    "positive[]",
    "pair[]",
    "mood[]",
]
TYPES = """CREATE TYPE mood AS ENUM ('a', 'b');
CREATE TYPE pair AS (x int, y text);
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE DOMAIN mood_of AS mood;
CREATE DOMAIN pair_of AS pair"""
TABLES = {
    "deferred": "(id int PRIMARY KEY DEFERRABLE)",
    "deferred_full": "(id int PRIMARY KEY DEFERRABLE); ALTER TABLE {t} REPLICA IDENTITY FULL",
    "deferred_unique": "(id int NOT NULL UNIQUE DEFERRABLE)",
    "no_identity": "(id int PRIMARY KEY); ALTER TABLE {t} REPLICA IDENTITY NOTHING",
    "by_index": """(id int NOT NULL); CREATE UNIQUE INDEX by_id ON {t} (id);
        ALTER TABLE {t} REPLICA IDENTITY USING INDEX by_id""",
    "by_no_index": """(id int NOT NULL); CREATE UNIQUE INDEX no_index ON {t} (id);
        ALTER TABLE {t} REPLICA IDENTITY USING INDEX no_index; DROP INDEX no_index""",
    "no_key_full": "(a int, b json); ALTER TABLE {t} REPLICA IDENTITY FULL",
    "part_of_rows": "(id int NOT NULL); CREATE UNIQUE INDEX ON {t} (id) WHERE id > 0",
    "of_expression": "(id text NOT NULL); CREATE UNIQUE INDEX ON {t} (lower(id))",
    "may_be_null": "(id int UNIQUE)",
    "no_columns": "(); ALTER TABLE {t} REPLICA IDENTITY FULL",
    "computed": "(id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED)",
    "parent": "(id int PRIMARY KEY); CREATE TABLE child () INHERITS ({t})",
    "divided": """(id int) PARTITION BY RANGE (id);
        CREATE TABLE divided_1 PARTITION OF {t} FOR VALUES FROM (0) TO (9)""",
    "odd_partition": """(id int PRIMARY KEY) PARTITION BY RANGE (id);
        CREATE TABLE odd_1 PARTITION OF {t} DEFAULT;
        ALTER TABLE odd_1 REPLICA IDENTITY NOTHING""",
    "no_wal": "(id int PRIMARY KEY); ALTER TABLE {t} SET UNLOGGED",
    "hidden": "(id int PRIMARY KEY); ALTER TABLE {t} FORCE ROW LEVEL SECURITY",
    "two_cases": '(id int PRIMARY KEY, "ID" int)',
    "reserved": "(id int PRIMARY KEY, _cdc_op text)",
}
WITH_SETTINGS = {
    "key_to_null": ("(id int PRIMARY KEY)", 'mask_columns = { id = "null" }'),
    "key_hashed": ("(id int PRIMARY KEY)", 'mask_columns = { id = "sha256" }'),
    "key_left_out": ("(id int PRIMARY KEY, v text)", 'exclude_columns = ["id"]'),
    "all_but_key": ("(id int PRIMARY KEY, v text)", 'exclude_columns = ["v"]'),
    "key_as_text": ("(id numeric PRIMARY KEY)", 'types = { id = "string" }'),
    "referred": ("(id float8 PRIMARY KEY)", 'reference = "snapshot_plus_cdc"'),
    "referred_no_key": ("(id int)", 'reference = "snapshot_only"'),
}
POLLED = {
    "by_text": ("(id int PRIMARY KEY, u text)", 'cursor = "u"'),
    "by_float": ("(id int PRIMARY KEY, u float8 NOT NULL)", 'cursor = "u"'),
    "by_domain": ("(id int PRIMARY KEY, u positive NOT NULL)", 'cursor = "u"'),
    "by_none": ("(id int PRIMARY KEY)", 'cursor = "u"'),
    "by_left_out": (
        "(id int PRIMARY KEY, u date)",
        'cursor = "u"\nexclude_columns = ["u"]',
    ),
    "key_may_be_null": ("(id int UNIQUE)", 'key = ["id"]'),
    "key_is_not_unique": ("(id int NOT NULL)", 'key = ["id"]'),
    "key_is_not_there": ("(id int PRIMARY KEY)", 'key = ["idd"]'),
    "key_is_deferrable": ("(id int NOT NULL UNIQUE DEFERRABLE)", 'key = ["id"]'),
    "mark_is_not_there": ("(id int PRIMARY KEY)", 'deleted = "d"'),
    "mark_is_text": ("(id int PRIMARY KEY, d text)", 'deleted = "d"'),
    "swept": ("(id pair PRIMARY KEY)", 'detect_deletes = "1s"'),
}


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["wal", "polling"])
def test_check_refuses_the_tables_that_run_stops(
    database: Database, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {f"key_{i}": (f"(id {name} PRIMARY KEY)", "") for i, name in enumerate(KEY_TYPES)}
    tables |= {name: (made, "") for name, made in TABLES.items()}
    tables |= WITH_SETTINGS | (POLLED if kind == "polling" else {})
    with database.connect() as connection:
        connection.execute(TYPES.encode())
        for name, (made, _) in tables.items():
            connection.execute(f'CREATE TABLE "{name}" {made.format(t=name)}'.encode())
    extra = "\n".join(
        f'[sources.shop.table."public.{name}"]\n{settings}'
        for name, (_, settings) in tables.items()
        if settings
    )
    make = polling_config if kind == "polling" else wal_config
    masked = 'mask_key = "of-some-sixteen-characters-or-more"'
    text = make(lake="lake", dsn=database.dsn, source_extra=masked, extra=extra)
    daemon = Daemon(tmp_path / "daemon", text)
    monkeypatch.chdir(daemon.folder)
    refused = {
        line.subject.removeprefix("table "): line.remedy
        for line in check(daemon.config_path)
        if line.level == "fail"
    }

    def stopped() -> dict[str, str | None] | None:
        status = daemon.status()
        found = status["sources"]["shop"].get("tables", ()) if status else ()
        if not found or any(t["state"] not in {"live", "stopped"} for t in found):
            return None
        then = "\n  then: ingestd snapshot "
        return {
            t["table"]: t["remedy"].partition(then)[0] for t in found if t["state"] == "stopped"
        }

    with daemon:
        daemon.start()
        await_until(
            lambda: stopped() == refused, LIMIT_S, lambda: f"run: {stopped()}\ncheck: {refused}"
        )
