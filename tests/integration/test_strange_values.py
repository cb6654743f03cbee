"""Values that are legal and strange stop neither their source nor their table (I7, I13)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ingestd.model.schema import TableId
from tests.harness.compare import raw_rows
from tests.harness.config import wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 90.0
SETUP = (
    "CREATE TYPE inner_type AS (a int, gone text, b text)",
    "CREATE TYPE outer_type AS (i inner_type, many inner_type[], n numeric)",
    "ALTER TYPE inner_type DROP ATTRIBUTE gone",
    "CREATE TYPE empty_type AS ()",
    "CREATE TYPE mood AS ENUM ('good', 'bad', '', 'ä, \"x\"')",
    "CREATE DOMAIN moods AS mood[]",
    "CREATE DOMAIN deep AS moods CHECK (VALUE IS DISTINCT FROM '{bad,bad}')",
    "CREATE TYPE spans AS RANGE (subtype = text)",
    "CREATE TYPE odd_base",
    (
        "CREATE FUNCTION odd_in(cstring) RETURNS odd_base LANGUAGE internal IMMUTABLE STRICT"
        " AS 'textin'"
    ),
    (
        "CREATE FUNCTION odd_out(odd_base) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT"
        " AS 'textout'"
    ),
    "CREATE TYPE odd_base (INPUT = odd_in, OUTPUT = odd_out, LIKE = text, DELIMITER = ';')",
)
VALUES: dict[str, tuple[str, ...]] = {
    "date": ("infinity", "-infinity", "5874897-12-31", "4713-01-01 BC", "0001-01-01"),
    "timestamp": ("infinity", "-infinity", "294276-12-31 23:59:59.999999", "4713-01-01 BC"),
    "timestamptz": ("infinity", "294276-12-31 23:59:59.999999+00", "0001-01-01 00:00+15:59:59"),
    "time": ("24:00:00", "00:00:00"),
    "timetz": ("24:00:00+15:59:59", "00:00:00-15:59:59"),
    "interval": (
        "178000000 years",
        "-178000000 years",
        "2147483647 days 2562047788 hours",
        "-1 mons +1 days -00:00:00.000001",
    ),
    "numeric": ("NaN", "Infinity", "-Infinity", "1e131071", "1e-16383", "-0.0", "0.000"),
    "numeric(5,2)": ("NaN", "999.99"),
    "numeric(3,-2)": ("99900",),
    "float4": ("NaN", "-0", "Infinity", "1e-45", "3.4028235e38"),
    "float8": ("NaN", "-0", "-Infinity", "5e-324", "1.7976931348623157e308"),
    "money": ("-92233720368547758.08", "0"),
    "int4[]": ("{}", "[5:7]={1,2,3}", "[-2:-1][0:0]={{1},{NULL}}", "{{{{{{1}}}}}}", "{NULL}"),
    "text[]": ("{}", '{"","NULL",NULL,"a,b","\\\\","{"}', "[0:0]={x}"),
    "box[]": ("{(1,1),(0,0);(2,2),(1,1)}",),
    "bytea[]": ('{"\\\\x00ff",NULL}',),
    "outer_type": ("(,,)", '("(1,x)","{""(1,)"",NULL}",NaN)'),
    "empty_type": ("()",),
    "inner_type[]": ('{"(1,\\"a b\\")",NULL}', "{}"),
    "mood": ("", 'ä, "x"'),
    "deep": ("{}", '{good,""}', "[3:3]={bad}"),
    "spans": ("empty", '["",)', '("a,b","c""d"]'),
    "int4range": ("empty", "(,)", "[1,1]"),
    "tstzrange": ("[-infinity,infinity]", '["294276-12-31 23:59:59.999999+00",)'),
    "nummultirange": ("{}", "{[1,2),[3,NaN)}"),
    "bit(1)": ("1",),
    "varbit": ("", "101"),
    "json": ('"\\u0000"', '{"a":1,"a":2}', " null ", "1e999999", '"\\ud800"'),
    "jsonb": ('"\\uffff"', "1e1000", '{"":{"":[]}}', '"\\ud83d\\ude00"'),
    "jsonpath": ("$", '$."a b"[*] ? (@ > 1)'),
    "xml": ("<a/>", "text & &amp;".replace("& ", "&amp; "), "<?x?>"),
    "tsvector": ("", "'a b':1A,2 'it''s':16383"),
    "tsquery": ("", "'a' & !'b' <-> 'c':*"),
    "text": ("", "\ufffe\uffff\U0010ffff", "\u0085\u2028\x01", "\u200b\u202e", "\\N", "\ufeff"),
    "varchar(3)": ("  ", "äöü"),
    "char(5)": ("", "a"),
    '"char"': ("", "a", "\\"),
    "name": ("", "x" * 63),
    "uuid": ("00000000-0000-0000-0000-000000000000",),
    "inet": ("::/0", "0.0.0.0/0", "::ffff:1.2.3.4/128"),
    "cidr": ("::/0",),
    "macaddr8": ("ff:ff:ff:ff:ff:ff:ff:ff",),
    "point": ("(NaN,Infinity)", "(1e308,-0)"),
    "path": ("[(0,0)]", "((0,0),(1,1))"),
    "polygon": ("((0,0))",),
    "circle": ("<(0,0),0>", "<(NaN,0),Infinity>"),
    "line": ("{1,NaN,0}",),
    "pg_lsn": ("FFFFFFFF/FFFFFFFF", "0/0"),
    "txid_snapshot": ("1:9223372036854775807:2",),
    "xid8": ("18446744073709551615",),
    "oid": ("4294967295",),
    "tid": ("(4294967295,65535)",),
    "oidvector": ("", "1 2"),
    "int2vector": ("", "-1 2"),
    "regclass": ("pg_class",),
    "regtype": ("int4[]",),
    "refcursor": ("",),
    "odd_base": ("", "a;b"),
    "odd_base[]": ("{a;b}", "{}"),
    "bool": ("t",),
    "bytea": ("", "\\x00"),
}
EXPRESSIONS = {
    '"char"': '(-127)::"char"',  # servers to 15 send the byte itself
    "regclass": "4294967295::oid::regclass",
    "regtype": "4294967295::oid::regtype",
}


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_strange_values_stop_nothing(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """Read at the start and from the stream, for each type: all tables continue, with all rows."""
    tables = {f"t{number}": kind for number, kind in enumerate(VALUES)}
    database.execute(*SETUP)
    taken = filled(database, tables)
    extra = f'slot = "{database.name}"'
    daemon = make_daemon(wal_config(lake=lake, dsn=database.dsn, source_extra=extra))
    daemon.start()

    def states() -> dict[str, Any]:
        sources = (daemon.status() or {"sources": {}})["sources"].values()
        return {
            table["table"]: (table["state"], table["reason"])
            for source in sources
            for table in source["tables"]
        }

    def are_live() -> bool:
        found = states()
        return len(found) == len(tables) and all(state == "live" for state, _ in found.values())

    def failing() -> str:
        stopped = {n: s for n, s in states().items() if s[0] != "live"}
        return f"all tables to be live: {stopped}"

    await_until(are_live, LIMIT_S, failing)
    for table in tables:
        database.execute(f"INSERT INTO {table} (v) SELECT v FROM {table}")
    for table, kind in tables.items():
        at = TableId("public", table)

        def arrived(at: TableId = at, count: int = 2 * taken[table]) -> bool:
            return len(_rows(lake, at)) == count

        await_until(arrived, LIMIT_S, f"the rows of {kind}")
        texts = [row["_cdc_raw"] or row["v"] for row in _rows(lake, at)]
        assert None not in texts, kind
        half = taken[table]
        assert str(texts[:half]) == str(texts[half:]), kind
    assert are_live(), failing()


def filled(database: Database, tables: dict[str, str]) -> dict[str, int]:
    """Make a table of each type with its values; return how many each has."""
    taken: dict[str, int] = {}
    with database.connect() as connection:
        for table, kind in tables.items():
            connection.execute(f"CREATE TABLE {table} (id serial PRIMARY KEY, v {kind})".encode())
            for value in VALUES[kind]:
                query = f"INSERT INTO {table} (v) VALUES (%s::text::{kind})"
                connection.execute(query.encode(), (value,))
            taken[table] = len(VALUES[kind])
    for table, kind in tables.items():
        if kind in EXPRESSIONS:
            database.execute(f"INSERT INTO {table} (v) VALUES ({EXPRESSIONS[kind]})")
            taken[table] += 1
    return taken


def _rows(lake: Path, table: TableId) -> list[dict[str, Any]]:
    rows = [row for row in raw_rows(lake, table) if row["_cdc_op"] in {"r", "c"}]
    return sorted(rows, key=lambda row: row["id"])
