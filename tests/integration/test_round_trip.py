"""Every type that a table can have, through the daemon and back: the source's text, exactly (I7).

Read in the snapshot, inserted, updated and deleted, with whole old rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from psycopg import sql

from ingestd.demo.comparison import await_caught_up
from ingestd.demo.daemon import Daemon
from ingestd.schema import TableId, delta_type
from ingestd.sink.read import read_raw
from tests.harness.compare import registry
from tests.harness.config import wal_config
from tests.harness.databases import Database, fresh_database
from tests.harness.round_trip import Texts, read_texts, row_faults
from tests.harness.types import BUILT_IN, Type
from tests.harness.user_types import EXTENSIONS, PAIRS, SETUP, USER_DEFINED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

    from ingestd.demo.postgres import PostgresServer

LIMIT_S = 60.0
STREAMED = 1000
"""Added to the `id` of a row of the snapshot, for the row of the same values in the stream."""


@dataclass(frozen=True)
class Column:
    name: str
    sql_type: str
    delta: str
    expressions: list[sql.Composable]
    odd: range
    """Which of the expressions are not for the column."""


@dataclass(frozen=True)
class Wide:
    """A table with a column for each type, and as many rows as the longest list of values."""

    name: str
    columns: list[Column]

    @property
    def rows(self) -> int:
        return max(len(c.expressions) for c in self.columns)

    @property
    def names(self) -> list[str]:
        return [c.name for c in self.columns]

    def create(self, database: Database) -> None:
        table = sql.Identifier(self.name)
        definitions = [
            sql.SQL("{} {}").format(sql.Identifier(c.name), sql.SQL(c.sql_type))
            for c in self.columns
        ]
        with database.connect() as connection:
            connection.execute(
                sql.SQL("CREATE TABLE {} (id int PRIMARY KEY, {})").format(
                    table, sql.SQL(", ").join(definitions)
                )
            )
            connection.execute(sql.SQL("ALTER TABLE {} REPLICA IDENTITY FULL").format(table))
            for i in range(self.rows):
                values = [c.expressions[i % len(c.expressions)] for c in self.columns]
                connection.execute(
                    sql.SQL("INSERT INTO {} VALUES ({}, {})").format(
                        table, i, sql.SQL(", ").join(values)
                    )
                )

    def change(self, database: Database) -> tuple[dict[int, Texts], dict[int, Texts]]:
        """Insert the rows again, give each the next one's values, delete them; what was there."""
        table, columns = sql.Identifier(self.name), [sql.Identifier(n) for n in self.names]
        insert = sql.SQL("INSERT INTO {0} SELECT id + {1}, {2} FROM {0}").format(
            table, STREAMED, sql.SQL(", ").join(columns)
        )
        update = sql.SQL(
            "UPDATE {0} SET {1} FROM {0} n WHERE {0}.id >= {2} AND n.id = ({0}.id - {2} + 1) % {3}"
        ).format(
            table,
            sql.SQL(", ").join(sql.SQL("{0} = n.{0}").format(c) for c in columns),
            STREAMED,
            self.rows,
        )
        delete = sql.SQL("DELETE FROM {} WHERE id >= {}").format(table, STREAMED)
        with database.connect() as connection:
            connection.execute(insert)
            inserted = read_texts(database, self.name, self.names)
            connection.execute(update)
            updated = read_texts(database, self.name, self.names)
            connection.execute(delete)
        return inserted, updated


@dataclass(frozen=True)
class Trip:
    """What the source had, and the raw tables of it."""

    database: Database
    lake: Path
    tables: dict[str, Wide]
    texts: dict[str, tuple[dict[int, Texts], dict[int, Texts]]]
    """Of each table: after its inserts, after its updates."""
    raw: dict[str, pa.Table]

    def rows(self, table: str, op: str) -> dict[int, dict[str, Any]]:
        found = self.raw[table].to_pylist(maps_as_pydicts="strict")
        return {row["id"]: row for row in found if row["_cdc_op"] == op}


def columns_of(types: Sequence[Type]) -> list[Column]:
    return [
        Column(
            f"c{i}",
            t.name,
            t.delta,
            t.expressions(),
            range(len(t.values), len(t.values) + len(t.odd)),
        )
        for i, t in enumerate(types)
    ]


def array_columns_of(types: Sequence[Type]) -> list[Column]:
    found = []
    for i, t in enumerate(types):
        if t.array_delta:
            expressions = t.array_expressions()
            odd = range(4, len(expressions) - 1) if t.array_delta != "string" else range(0)
            found.append(Column(f"a{i}", f"{t.name}[]", t.array_delta, expressions, odd))
    return found


@pytest.fixture(scope="module")
def trip(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trip]:
    folder = tmp_path_factory.mktemp("round_trip")
    with fresh_database(postgres) as database:
        database.execute(*SETUP)
        types = {
            "built_in": built_in_types(database),
            "user_defined": [t for t in USER_DEFINED if t.since <= postgres.major],
            "of_extensions": install_extensions(database),
        }
        tables = {}
        for name, found in types.items():
            tables[name] = Wide(name, columns_of(found))
            tables[f"{name}_arrays"] = Wide(f"{name}_arrays", array_columns_of(found))
        chosen = tables[CHOSEN] = Wide(CHOSEN, columns_of([t for t, _ in WITH_STRUCTS]))
        for table in tables.values():
            table.create(database)
        choice = dict(zip(chosen.names, (wanted for _, wanted in WITH_STRUCTS), strict=True))
        text = wal_config(
            lake=folder / "lake",
            dsn=database.dsn,
            source_extra=f'slot = "{database.name}"\nbefore = "full"',
            tables=[f"public.{name}" for name in tables],
            extra=types_of({CHOSEN: choice}),
        )
        daemon = Daemon(folder / "daemon", text)
        try:
            daemon.start_ready(LIMIT_S)
            texts = {name: table.change(database) for name, table in tables.items()}
            with database.connect() as connection:
                await_caught_up(connection, database.name, LIMIT_S)
        except TimeoutError as error:
            pytest.fail(f"{error}\n{daemon.tail()}")
        finally:
            daemon.close()
        raw = {
            name: read_raw(str(folder / "lake"), "shop", TableId("public", name)) for name in tables
        }
        yield Trip(database, folder / "lake", tables, texts, raw)


def types_of(tables: Mapping[str, Mapping[str, str]]) -> str:
    """TOML of the lake types chosen for columns, by table."""
    lines = []
    for table, types in tables.items():
        lines += [f'[sources.shop.table."public.{table}".types]']
        lines += [f'{column} = "{wanted}"' for column, wanted in types.items()]
    return "\n".join(lines)


def built_in_types(database: Database) -> list[Type]:
    """Give those that the server has; where it is built without libxml, xml has no values."""
    query = "SELECT setting LIKE '%--with-libxml%' FROM pg_config WHERE name = 'CONFIGURE'"
    has_xml = database.value(query)
    return [
        replace(t, values=()) if t.name == "xml" and not has_xml else t
        for t in BUILT_IN
        if t.since <= database.server.major
    ]


def install_extensions(database: Database) -> list[Type]:
    """Create those that the server has; give their types."""
    query = "SELECT name FROM pg_available_extensions"
    available = {name for (name,) in database.rows(query)}
    found: list[Type] = []
    for name, types in EXTENSIONS.items():
        if name in available:
            database.execute(f"CREATE EXTENSION {name}")
            found += types
    return found


PAIR = "struct<a:integer,b:string>"
NEST = f"struct<p:{PAIR},ints:array<integer>,day:date>"
CHOSEN = "chosen"
WITH_STRUCTS = (
    (Type("pair", PAIR, PAIRS), "struct"),
    (Type("filled_pair", PAIR, ("(1,x)",)), "struct"),
    (Type("parts", "struct<a:integer,d:date>", ("(1,2024-02-29)",), ("(,infinity)",)), "struct"),
    (
        Type(
            "nest",
            NEST,
            ('("(1,""x \\\\ y"")","{1,NULL}",2024-02-29)', "(,,)", '("(,)",{},)'),
            ('(,"{{1},{2}}",)', "(,,infinity)"),
        ),
        "struct",
    ),
    (
        Type(
            "pair[]",
            f"array<{PAIR}>",
            ("{}", '{"(1,)",NULL,"(,\\"x \\\\\\\\ \\"\\" y\\")"}'),
            ('{{"(1,)"},{"(2,)"}}', '[0:0]={"(1,)"}'),
        ),
        "array<struct>",
    ),
    (
        Type("nest[]", f"array<{NEST}>", ('{"(,\\"{1,2}\\",)"}',), ('{"(,,-infinity)"}',)),
        "array<struct>",
    ),
    (Type("int4", "long", ("-2147483648", "2147483647")), "long"),
    (Type("int2[]", "array<long>", ("{1,NULL,-32768}",), ("[2:2]={1}",)), "array<long>"),
    (Type("oid", "decimal(10,0)", ("0", "4294967295")), "decimal(10,0)"),
    (Type("price", "string", ("1.5", "NaN")), "string"),
    (Type("timestamptz", "string", ("infinity", "2024-02-29 01:02:03.45+05")), "string"),
    (Type("tags", "string", ("{a,NULL}", "{{a},{b}}")), "string"),
)
"""Types, and the lake type that the config asks for."""

TABLES = [
    f"{name}{suffix}"
    for name in ("built_in", "user_defined", "of_extensions")
    for suffix in ("", "_arrays")
] + [CHOSEN]
every_table = pytest.mark.parametrize("table", TABLES)

UNUSED_TYPES = """
SELECT format_type(t.oid, NULL) FROM pg_type t
  LEFT JOIN pg_type e ON e.typarray = t.oid
  LEFT JOIN pg_class c ON c.oid IN (t.typrelid, e.typrelid)
 WHERE t.typtype <> 'p' AND coalesce(e.typtype, 'b') <> 'p'
   AND coalesce(c.relkind = 'c', true) AND coalesce(c.relnamespace, 0) <> 'pg_toast'::regnamespace
   AND NOT EXISTS (
     SELECT FROM pg_attribute a JOIN pg_class r ON r.oid = a.attrelid
      WHERE a.atttypid = t.oid AND r.relkind = 'r' AND r.relname = ANY(%s)
        AND r.relnamespace = 'public'::regnamespace)
"""
"""Of every type in the database but pseudo-types and the row types of relations."""


def test_every_type_a_table_can_have_is_tried(trip: Trip) -> None:
    assert [name for (name,) in trip.database.rows(UNUSED_TYPES, TABLES)] == []


@every_table
def test_every_type_has_its_lake_type(trip: Trip, table: str) -> None:
    wide, schema = trip.tables[table], trip.raw[table].schema
    [last] = [r for r in registry(trip.lake) if r["table"] == f"public.{table}"][-1:]
    recorded = {c["name"]: c["delta_type"] for c in last["columns"]}
    before = schema.field("_cdc_before").type
    wrong = [
        f"{c.sql_type}: {there} instead of {c.delta}"
        for c in wide.columns
        if (
            there := {
                delta_type(schema.field(c.name).type),
                delta_type(before.field(c.name).type),
                recorded[c.name],
            }
        )
        != {c.delta}
    ]
    assert not wrong, "\n".join(wrong)


@every_table
@pytest.mark.parametrize("op", ["r", "c", "u", "d"])
def test_lossless_every_value_is_given_back(trip: Trip, table: str, op: str) -> None:
    wide = trip.tables[table]
    inserted, updated = trip.texts[table]
    states: dict[str, tuple[dict[int, Texts], dict[int, Texts] | None]] = {
        "r": (inserted, None),
        "c": (inserted, None),
        "u": (updated, inserted),
        "d": (updated, updated),
    }
    new, old = states[op]
    rows = trip.rows(table, op)
    shift = 0 if op == "r" else STREAMED
    assert sorted(rows) == [shift + i for i in range(wide.rows)]
    types = {c.name: c.sql_type for c in wide.columns}
    faults = [
        f"{types.get(fault.removeprefix('_cdc_before.').split(':')[0], '')} row {i}: {fault}"
        for i, row in rows.items()
        for fault in row_faults(
            row, trip.raw[table].schema, new[i], None if old is None else old[i]
        )
    ]
    assert not faults, "\n".join(faults)


@every_table
@pytest.mark.parametrize("op", ["r", "c"])
def test_only_odd_values_are_kept_as_text(trip: Trip, table: str, op: str) -> None:
    wide = trip.tables[table]
    raw = {i % STREAMED: row["_cdc_raw"] or {} for i, row in trip.rows(table, op).items()}
    wrong = [
        f"{c.sql_type} row {i}: {raw[i].get(c.name)!r} in _cdc_raw"
        for c in wide.columns
        for i in range(wide.rows)
        if (i % len(c.expressions) in c.odd) != (c.name in raw[i])
    ]
    assert not wrong, "\n".join(wrong)
