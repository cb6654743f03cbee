"""Any identifier Postgres accepts: schemas, tables and columns, to the lake and back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from prometheus_client.parser import text_string_to_metric_families
from psycopg import sql

from ingestd.lake.delta.read import read_raw
from ingestd.lake.layout import Layout
from ingestd.model.schema import TableId
from ingestd.testing.oracle.comparison import (
    await_caught_up,
    source_columns,
    source_key,
    source_rows,
)
from ingestd.testing.oracle.folding import fold
from tests.harness.command_line import run_command
from tests.harness.compare import (
    assert_change_log_is_sound,
    assert_lake_equals_source,
    epochs,
    registry,
)
from tests.harness.config import wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections import Counter
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from ingestd.testing.oracle.folding import Texts
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60

TABLES = [
    *(
        TableId("public", name)
        for name in ("select", "Mixed", "mixed", "MIXED", "1", "_", ".", "..")
    ),
    *(
        TableId("public", name)
        for name in (".hidden", "_delta_log", "a.b", "a/b", "a\\b", "..\\..")
    ),
    *(TableId("public", name) for name in ("%", "100%25", "a b", " ", "\t", "\n", "\r\n", "\x01")),
    *(
        TableId("public", name)
        for name in ("'", "''", '"', '""', '"a"', "a\"'b", "`", "$1", "$$", ";")
    ),
    *(
        TableId("public", name)
        for name in ("--", "/*", "{}", "{0}", "%s", "%(x)s", "a=b", "a,b", "*")
    ),
    *(
        TableId("public", name)
        for name in ("?", "[a]", "!a", "~", "_x0020_", "a_x0020_b", "_x", "é" * 31)
    ),
    *(
        TableId("public", name)
        for name in ("漢" * 21, "😀" * 15, "a" * 63, "\u0131", "\u0130", "ß", "\u200b")
    ),
    *(
        TableId(name, "t")
        for name in ("_epochs", "_tables", "_ref", "s.x", '"', '"s', 's"', ".", "..")
    ),
    *(TableId(name, "t") for name in (" ", "é" * 31, "a/b", "*", "!a", "Public", "\n", "%")),
    *(TableId("s.x", name) for name in ("y", "x.y", '"y"')),
    *(TableId("s", name) for name in ("x.y", 'x".y')),
    TableId('s"', "x"),
    TableId('"s.x"', "y"),
]

COLUMNS = [
    *("select", "Mixed", "1", "_", ".", "..", "a.b", "a.b.c", "a/b", "a\\b", "%", "100%25", "a b"),
    *(" ", " a", "a ", "\t", "\n", "a\r\nb", "\x01", "'", '"', '""', '"a"', "`", "a``b", "$1", ";"),
    *("--", "{}", "{0}", "%s", "%(x)s", "a=b", "a,b", "(a)", "*", "?", "[a]", "<a>", "!", "#", "@"),
    *("_x0020_", "é" * 31, "漢" * 21, "😀" * 15, "a" * 63, "\u0130", "ß", "\u200b", "a\u0301"),
    *("element", "key", "value", "op", "_cdc", "cdc_op", "_metadata", "_change_type", "null", "*a"),
]
"""No two of them differ only by case."""


def name_of(table: TableId) -> sql.Identifier:
    return sql.Identifier(table.schema, table.name)


def create_tables(database: Database) -> None:
    with database.connect() as connection:
        for schema in sorted({t.schema for t in TABLES} - {"public"}):
            connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        for number, table in enumerate(TABLES):
            statement = "CREATE TABLE {} (id int PRIMARY KEY, note text)"
            connection.execute(sql.SQL(statement).format(name_of(table)))
            statement = "INSERT INTO {} VALUES ({}, 'first'), ({} + 1000, 'second')"
            connection.execute(sql.SQL(statement).format(name_of(table), number, number))


def change_tables(database: Database) -> None:
    """Change all of them in one transaction."""
    with database.connect(autocommit=False) as connection:
        for number, table in enumerate(TABLES):
            for statement in (
                "INSERT INTO {} VALUES ({} + 2000, 'third')",
                "UPDATE {} SET id = id + 5000 WHERE id = {}",
                "DELETE FROM {} WHERE id = {} + 1000",
            ):
                connection.execute(sql.SQL(statement).format(name_of(table), number))


def make(database: Database, make_daemon: MakeDaemon, lake: Path) -> Daemon:
    names = f'slot = "{database.name}"\npublication = "{database.name}"'
    return make_daemon(wal_config(lake=lake, dsn=database.dsn, tables=["*.*"], source_extra=names))


@pytest.mark.thorough
def test_i7_tables_of_any_name(database: Database, make_daemon: MakeDaemon, lake: Path) -> None:
    create_tables(database)
    daemon = make(database, make_daemon, lake)
    daemon.start_ready(LIMIT_S)
    change_tables(database)
    compared = assert_lake_equals_source(database, lake, tables=TABLES, slot=database.name)
    assert {c.table for c in compared} == set(TABLES)
    assert_change_log_is_sound(database, lake)

    texts = {str(table) for table in TABLES}
    assert len(texts) == len(TABLES)
    assert {row["table"] for row in registry(lake)} == texts
    *_, streamed = epochs(lake)
    assert (streamed["transactions"], streamed["rows"]) == (1, 3 * len(TABLES))
    assert {entry["table"] for entry in streamed["tables"]} == texts

    status = daemon.status()
    assert status is not None
    assert {t["table"]: t["state"] for t in status["sources"]["shop"]["tables"]} == dict.fromkeys(
        texts, "live"
    )
    assert labels(daemon, "ingestd_table_state", "table", state="live") == texts
    assert labels(daemon, "ingestd_rows", "table", op="c") == texts
    assert shown(daemon)["sources"]["shop"] is not None

    assert daemon.sigterm() == 0
    daemon.start_ready(LIMIT_S)  # watermarks and states are found again under the same names
    database.execute("INSERT INTO public.\"select\" VALUES (1, 'after')")
    assert_lake_equals_source(database, lake, tables=TABLES, slot=database.name)
    assert_change_log_is_sound(database, lake)
    assert {row["table"]: row["schema_version"] for row in registry(lake)} == dict.fromkeys(
        texts, 1
    )


def labels(daemon: Daemon, family: str, label: str, **wanted: str) -> set[str]:
    """The values of a label in the samples with a value above 0."""
    answer = daemon.get("/metrics")
    assert answer is not None
    return {
        sample.labels[label]
        for found in text_string_to_metric_families(answer[1])
        if found.name == family
        for sample in found.samples
        if sample.value > 0 and wanted.items() <= sample.labels.items()
    }


def shown(daemon: Daemon) -> dict[str, Any]:
    """The output of `ingestd status`, which must handle a name in both forms."""
    text = run_command(daemon.config_path, "status")
    assert f"{len(TABLES)}/{len(TABLES)} live" in text.stdout
    tree = run_command(daemon.config_path, "status", "--json")
    found: dict[str, Any] = json.loads(tree.stdout)
    return found


def test_i7_columns_of_any_name(database: Database, make_daemon: MakeDaemon, lake: Path) -> None:
    """Every column is also in the key of one table, so in its statistics and `_cdc_before`."""
    with database.connect() as connection:
        for number in range(0, len(COLUMNS), 10):
            define(connection, number)
    daemon = make(database, make_daemon, lake)
    daemon.start_ready(LIMIT_S)
    with database.connect() as connection:
        for number in range(0, len(COLUMNS), 10):
            change(connection, number)
    assert_lake_equals_source(database, lake, slot=database.name)

    for row in registry(lake):
        names = [c["name"] for c in row["columns"]]
        assert names == [c["source_name"] for c in row["columns"]]
        assert set(names) <= set(COLUMNS)
    recorded = {c["name"] for row in registry(lake) for c in row["columns"]}
    assert recorded == set(COLUMNS)


def define(connection: Any, number: int) -> None:
    """Make a table whose key is ten of the columns, and put two rows into it."""
    key = COLUMNS[number : number + 10]
    parts = [sql.SQL("{} text DEFAULT 'x'").format(sql.Identifier(c)) for c in COLUMNS]
    parts.append(sql.SQL("PRIMARY KEY ({})").format(sql.SQL(",").join(map(sql.Identifier, key))))
    table = sql.Identifier(f"t{number}")
    connection.execute(sql.SQL("CREATE TABLE {} ({})").format(table, sql.SQL(",").join(parts)))
    statement = "INSERT INTO {} ({}) VALUES ('one'), ('two')"
    connection.execute(sql.SQL(statement).format(table, sql.Identifier(key[0])))


def change(connection: Any, number: int) -> None:
    """Insert, change every column of the key, delete."""
    key = COLUMNS[number : number + 10]
    table, first = sql.Identifier(f"t{number}"), sql.Identifier(key[0])
    sets = sql.SQL(",").join(
        sql.SQL("{0} = {0} || ' changed'").format(sql.Identifier(c)) for c in key
    )
    for statement in (
        sql.SQL("INSERT INTO {} ({}) VALUES ('three')").format(table, first),
        sql.SQL("UPDATE {} SET {} WHERE {} = 'one'").format(table, sets, first),
        sql.SQL("DELETE FROM {} WHERE {} = 'two'").format(table, first),
    ):
        connection.execute(statement)


def test_i7_columns_that_differ_by_case_only(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    """Delta can't have both names: each column has one of its own, and keeps it."""
    table = TableId("public", "t")
    database.execute(
        'CREATE TABLE t ("Id" int, id text, x int, "\u0130" text, "i" text, "ID" bigint,'
        ' "_CDC_op" text, PRIMARY KEY ("Id", id))',
        "INSERT INTO t VALUES (1, 'one', 10, 'I', 'i', 7, 'x'), (2, 'two', 20, 'I', 'i', 8, 'y')",
    )
    daemon = make(database, make_daemon, lake)
    daemon.start_ready(LIMIT_S)
    database.execute(
        """INSERT INTO t VALUES (3, 'three', 30, 'II', 'ii', 9, 'x')""",
        """UPDATE t SET "Id" = 4, id = 'four', "i" = 'iii' WHERE "Id" = 1""",
        """DELETE FROM t WHERE id = 'two'""",
        'ALTER TABLE t ADD COLUMN "X" text',
        """INSERT INTO t VALUES (5, 'five', 50, 'III', 'iv', 10, 'y', 'new')""",
    )
    assert rows_of(database, table) == current_rows(database, lake, table)
    names = {c["source_name"]: c["name"] for c in registry(lake)[-1]["columns"]}
    assert names == {
        "Id": "Id",
        "id": "id__v2",
        "x": "x",
        "X": "X__v2",
        "\u0130": "\u0130",
        "i": "i__v2",
        "ID": "ID__v3",
        "_CDC_op": "_x005F_CDC_op",
    }

    assert daemon.sigterm() == 0
    database.execute('ALTER TABLE t DROP COLUMN x, DROP COLUMN "ID"')
    daemon.start_ready(LIMIT_S)
    database.execute("""INSERT INTO t VALUES (6, 'six', 'III', 'v', 'z', 'X')""")
    assert rows_of(database, table) == current_rows(database, lake, table)
    assert {c["name"] for c in registry(lake)[-1]["columns"]} == set(names.values()) - {
        "x",
        "ID__v3",
    }


def rows_of(database: Database, table: TableId) -> Counter[Texts]:
    """The source's rows, when the lake has all that is written now."""
    with database.connect() as connection:
        await_caught_up(connection, database.name)
        return source_rows(connection, table, source_columns(connection, table))


def current_rows(database: Database, lake: Path, table: TableId) -> Counter[Texts]:
    """The folded raw table, by the source's names."""
    last = [row for row in registry(lake) if row["table"] == str(table)][-1]
    sources = {c["name"]: c["source_name"] for c in last["columns"]}
    raw = read_raw(str(lake), "shop", table)
    kept = [f for f in raw.schema.names if f in sources or f.startswith("_cdc_")]
    raw = raw.select(kept).rename_columns([sources.get(n, n) for n in kept])
    before = raw["_cdc_before"].combine_chunks()
    renamed = [f.with_name(sources.get(f.name, f.name)) for f in before.type]
    before = pa.StructArray.from_arrays(before.flatten(), fields=renamed, mask=before.is_null())
    raw = raw.set_column(raw.schema.get_field_index("_cdc_before"), "_cdc_before", before)
    with database.connect() as connection:
        columns, key = source_columns(connection, table), source_key(connection, table)
    folded = fold(raw, columns, key)
    assert not folded.faults
    return folded.rows


def test_i8_a_name_too_long_for_a_path_stops_its_table_alone(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    table = TableId("public", " " * 63)
    with pytest.raises(Exception, match="255"):
        Layout("shop").raw(table)
    database.execute(
        f'CREATE TABLE "{table.name}" (id int PRIMARY KEY)',
        f'INSERT INTO "{table.name}" VALUES (1)',
        "CREATE TABLE t (id int PRIMARY KEY)",
        "INSERT INTO t VALUES (1)",
    )
    daemon = make(database, make_daemon, lake)
    daemon.start()
    await_until(lambda: stopped(lake) == {str(table)}, LIMIT_S, daemon.tail)
    database.execute("INSERT INTO t VALUES (2)", f'INSERT INTO "{table.name}" VALUES (2)')
    others = [TableId("public", "t")]
    assert_lake_equals_source(database, lake, tables=others, slot=database.name)
    [last] = [row for row in registry(lake) if row["table"] == str(table)][-1:]
    assert "255" in last["reason"]
    answer = daemon.get("/readyz")
    assert answer is not None
    assert answer[0] == 503
    assert "255" in answer[1]


def stopped(lake: Path) -> set[str]:
    last = {row["table"]: row["state"] for row in registry(lake)}
    return {table for table, state in last.items() if state == "stopped"}
