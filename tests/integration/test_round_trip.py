"""Every type that a table can have, through the daemon and back: the source's text, exactly (I7).

Read in the snapshot, inserted, updated and deleted, with complete old rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.lake.delta.read import read_raw
from ingestd.model.schema import TableId, lake_type_name
from ingestd.testing.embedded.daemon import Daemon
from ingestd.testing.oracle.comparison import await_caught_up
from tests.harness.chosen_types import (
    CHOSEN,
    NARROW,
    NARROWED,
    WITH_STRUCTS,
    change_narrowed,
    create_narrowed,
    types_of,
)
from tests.harness.compare import registry
from tests.harness.config import wal_config
from tests.harness.databases import Database, fresh_database
from tests.harness.round_trip import Texts, read_texts, row_faults
from tests.harness.user_types import SETUP, USER_DEFINED
from tests.harness.wide_tables import (
    STREAMED,
    Wide,
    array_columns_of,
    built_in_types,
    columns_of,
    install_extensions,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa

    from ingestd.testing.embedded.postgres import PostgresServer

LIMIT_S = 60.0


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
        create_narrowed(database)
        for name, identity in LARGE.items():
            create_large(database, name, identity)
        choice = dict(zip(chosen.names, (wanted for _, wanted in WITH_STRUCTS), strict=True))
        text = wal_config(
            lake=folder / "lake",
            dsn=database.dsn,
            source_extra=f'slot = "{database.name}"\nbefore = "full"',
            tables=[f"public.{name}" for name in (*tables, NARROWED, *LARGE)],
            extra=types_of({CHOSEN: choice, NARROWED: {c: w for c, _, w, _ in NARROW}}),
        )
        daemon = Daemon(folder / "daemon", text)
        try:
            daemon.start_ready(LIMIT_S)
            texts = {name: table.change(database) for name, table in tables.items()}
            change_narrowed(database)
            for name in LARGE:
                change_large(database, name)
            with database.connect() as connection:
                await_caught_up(connection, database.name, LIMIT_S)
        except TimeoutError as error:
            pytest.fail(f"{error}\n{daemon.tail()}")
        finally:
            daemon.close()
        raw = {
            name: read_raw(str(folder / "lake"), "shop", TableId("public", name))
            for name in (*tables, NARROWED, *LARGE)
        }
        yield Trip(database, folder / "lake", tables, texts, raw)


TABLES = [
    f"{name}{suffix}"
    for name in ("built_in", "user_defined", "of_extensions")
    for suffix in ("", "_arrays")
] + [CHOSEN]
every_table = pytest.mark.parametrize("table", TABLES)

LARGE = {"large": "DEFAULT", "large_full": "FULL"}
"""Tables with TOASTed values, and their replica identity."""
LARGE_COLUMNS = {
    "body": "text",
    "scan": "bytea",
    "doc": "jsonb",
    "lines": "text[]",
    "number": "numeric",
    "pair": "pair",
}


def create_large(database: Database, table: str, identity: str) -> None:
    columns = [f"{name} {pg_type}" for name, pg_type in LARGE_COLUMNS.items()]
    storage = [f"ALTER {name} SET STORAGE EXTERNAL" for name in LARGE_COLUMNS]
    database.execute(
        f"CREATE TABLE {table} (id int PRIMARY KEY, revision int, {', '.join(columns)})",
        f"ALTER TABLE {table} REPLICA IDENTITY {identity}, {', '.join(storage)}",
        # a million characters and more in each
        f"""INSERT INTO {table} SELECT 1, 1, s, s::bytea, to_jsonb(s), ARRAY[s, NULL, '"' || s],
              (repeat('1234567890', 13000) || '.5')::numeric, ROW(7, s)::pair
            FROM (SELECT string_agg(md5(i::text), ' ') AS s FROM generate_series(1, 33000) i) t""",
    )


def change_large(database: Database, table: str) -> None:
    names = ", ".join(LARGE_COLUMNS)
    database.execute(
        f"INSERT INTO {table} SELECT {STREAMED}, revision, {names} FROM {table}",
        f"UPDATE {table} SET revision = 2 WHERE id = {STREAMED}",
        f"DELETE FROM {table} WHERE id = {STREAMED}",
    )


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
                lake_type_name(schema.field(c.name).type),
                lake_type_name(before.field(c.name).type),
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


@pytest.mark.parametrize("op", ["r", "c"])
@pytest.mark.parametrize(("name", "wanted", "values"), [(n, w, v) for n, _, w, v in NARROW])
def test_lossless_values_outside_a_chosen_type_are_kept_as_text(
    trip: Trip, name: str, wanted: str, values: dict[str, Any], op: str
) -> None:
    assert lake_type_name(trip.raw[NARROWED].schema.field(name).type) == wanted
    rows = trip.rows(NARROWED, op)
    shift = 0 if op == "r" else STREAMED
    found = {
        text: (rows[shift + i][name], (rows[shift + i]["_cdc_raw"] or {}).get(name))
        for i, text in enumerate(values)
    }
    assert found == {
        text: (value, text if value is None else None) for text, value in values.items()
    }
    assert all(rows[shift + i][name] is None for i in range(len(values), len(rows)))


@pytest.mark.parametrize("table", LARGE)
def test_lossless_large_values_sent_or_unchanged(trip: Trip, table: str) -> None:
    raw = trip.raw[table]
    [texts] = read_texts(trip.database, table, list(LARGE_COLUMNS)).values()
    assert sorted(len(t or "") > 1_000_000 for t in texts.values()) == [False] + [True] * 5
    [read] = trip.rows(table, "r").values()
    [inserted] = trip.rows(table, "c").values()
    [updated] = trip.rows(table, "u").values()
    [deleted] = trip.rows(table, "d").values()
    nothing: Texts = dict.fromkeys(LARGE_COLUMNS)
    key: Texts = {"id": str(STREAMED)}
    is_full = LARGE[table] == "FULL"
    faults = [
        *row_faults(read, raw.schema, texts | {"id": "1", "revision": "1"}, None),
        *row_faults(inserted, raw.schema, texts | key | {"revision": "1"}, None),
        *row_faults(
            updated,
            raw.schema,
            nothing | key | {"revision": "2"},
            texts | key | {"revision": "1"} if is_full else None,
        ),
        *row_faults(
            deleted,
            raw.schema,
            (texts | {"revision": "2"} if is_full else nothing | {"revision": None}) | key,
            texts | key | {"revision": "2"} if is_full else None,
        ),
    ]
    assert not faults, "\n".join(fault[:200] for fault in faults)
    assert sorted(updated["_cdc_unchanged"]) == sorted(LARGE_COLUMNS)
    assert [row["_cdc_unchanged"] for row in (read, inserted, deleted)] == [None] * 3
