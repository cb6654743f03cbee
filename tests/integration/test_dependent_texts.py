"""Values whose text is the name of another object: renamed, moved, dropped, re-created."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr

from ingestd.model.schema import TableId
from ingestd.postgres.connection.session import connect
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.preflight import preflight
from ingestd.testing.oracle.comparison import await_caught_up, compare_source
from tests.harness.compare import assert_lake_equals_source, raw_rows, registry
from tests.harness.config import polling_config, wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60.0
F = "LANGUAGE sql AS 'SELECT 1'"


@dataclass(frozen=True)
class Kind:
    """Objects that values of `type` refer to. `{n}`: the name of one, in schema `obj`."""

    type: str
    make: str
    keyword: str
    value: str
    arguments: str = ""

    def sql(self, template: str, name: str) -> str:
        return template.replace("{n}", name)


KINDS = (
    Kind("regclass", "CREATE TABLE obj.{n} (id int)", "TABLE", "obj.{n}"),
    Kind("regproc", f"CREATE FUNCTION obj.{{n}}() RETURNS int {F}", "FUNCTION", "obj.{n}"),
    Kind("regprocedure", f"CREATE FUNCTION obj.{{n}}() RETURNS int {F}", "FUNCTION", "obj.{n}()"),
    Kind("regtype", "CREATE TYPE obj.{n} AS (x int)", "TYPE", "obj.{n}"),
    Kind(
        "regconfig",
        "CREATE TEXT SEARCH CONFIGURATION obj.{n} (COPY = pg_catalog.simple)",
        "TEXT SEARCH CONFIGURATION",
        "obj.{n}",
    ),
    Kind(
        "regdictionary",
        "CREATE TEXT SEARCH DICTIONARY obj.{n} (TEMPLATE = pg_catalog.simple)",
        "TEXT SEARCH DICTIONARY",
        "obj.{n}",
    ),
    Kind("regcollation", 'CREATE COLLATION obj.{n} FROM "C"', "COLLATION", "obj.{n}"),
    Kind("regnamespace", "CREATE SCHEMA {n}", "SCHEMA", "{n}"),
    Kind("regrole", "CREATE ROLE {n}", "ROLE", "{n}"),
    Kind("aclitem", "CREATE ROLE {n}", "ROLE", "{n}=r/{n}"),
)
OPERATORS = ("regoper", "regoperator")
"""Can't be renamed."""


def name_of(kind: Kind, database: Database) -> str:
    return f"{database.name}_{kind.type}"


def renamed(kind: Kind, name: str, to: str) -> str:
    schema = "" if kind.keyword in {"SCHEMA", "ROLE"} else "obj."
    return f"ALTER {kind.keyword} {schema}{name} RENAME TO {to}"


def dropped(kind: Kind, name: str) -> str:
    schema = "" if kind.keyword in {"SCHEMA", "ROLE"} else "obj."
    return f"DROP {kind.keyword} {schema}{name}"


@pytest.fixture
def objects(database: Database) -> Iterator[Database]:
    database.execute("CREATE SCHEMA obj", "CREATE SCHEMA obj2")
    roles = []
    for kind in KINDS:
        name = name_of(kind, database)
        database.execute(
            kind.sql(kind.make, name),
            f"CREATE TABLE t_{kind.type} (id int PRIMARY KEY, v {kind.type})",
            f"INSERT INTO t_{kind.type} VALUES (1, '{kind.sql(kind.value, name)}')",
        )
        roles += [name] * (kind.keyword == "ROLE")
    for type_, value in (("regoper", "obj.@@@"), ("regoperator", "obj.@@@(integer,integer)")):
        database.execute(
            *(
                ["CREATE OPERATOR obj.@@@ (FUNCTION = int4pl, LEFTARG = int, RIGHTARG = int)"]
                if type_ == "regoper"
                else []
            ),
            f"CREATE TABLE t_{type_} (id int PRIMARY KEY, v {type_})",
            f"INSERT INTO t_{type_} VALUES (1, '{value}')",
        )
    database.execute(
        "CREATE TABLE obj.shaped (id int)",
        "CREATE DOMAIN obj.d AS regclass",
        "CREATE DOMAIN obj.da AS regclass[]",
        "CREATE TYPE obj.c AS (n int, r regclass)",
        "CREATE TYPE obj.r AS RANGE (SUBTYPE = oid)",
        "CREATE TABLE s_array (id int PRIMARY KEY, v regclass[])",
        "CREATE TABLE s_domain (id int PRIMARY KEY, v obj.d)",
        "CREATE TABLE s_domain_of_array (id int PRIMARY KEY, v obj.da)",
        "CREATE TABLE s_array_of_domain (id int PRIMARY KEY, v obj.d[])",
        "CREATE TABLE s_composite (id int PRIMARY KEY, v obj.c)",
        "CREATE TABLE s_acl (id int PRIMARY KEY, v aclitem[])",
        "INSERT INTO s_array VALUES (1, '{pg_class,obj.shaped,NULL}')",
        "INSERT INTO s_domain VALUES (1, 'obj.shaped')",
        "INSERT INTO s_domain_of_array VALUES (1, '{obj.shaped}')",
        "INSERT INTO s_array_of_domain VALUES (1, '{obj.shaped}')",
        "INSERT INTO s_composite VALUES (1, '(1,obj.shaped)')",
        f"INSERT INTO s_acl VALUES (1, '{{{name_of(KINDS[-1], database)}=r/postgres}}')",
        "CREATE TABLE others (id int PRIMARY KEY, v regclass, r regrole, a aclitem)",
        "INSERT INTO others VALUES (1, 'pg_class', 'postgres', '=r/postgres')",
    )
    yield database
    with database.connect() as connection:
        found = connection.execute(
            "SELECT rolname FROM pg_roles WHERE rolname LIKE %s", (f"{database.name}%",)
        ).fetchall()
        for (role,) in found:
            connection.execute(f'DROP OWNED BY "{role}"'.encode())
            connection.execute(f'DROP ROLE "{role}"'.encode())


SHAPES = ("array", "domain", "domain_of_array", "array_of_domain", "composite")


@pytest.fixture
def daemon(objects: Database, make_daemon: MakeDaemon, lake: Path) -> Daemon:
    names = f'slot = "{objects.name}"\npublication = "{objects.name}"\ndiscover_interval = "500ms"'
    made = make_daemon(wal_config(lake=lake, dsn=objects.dsn, source_extra=names))
    made.start_ready()
    return made


def tables(database: Database) -> list[TableId]:
    found = database.rows("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
    return [TableId("public", name) for (name,) in found]


def readings(database: Database, lake: Path) -> dict[str, int]:
    """How often each table was read."""
    return {
        str(t): sum(row["_cdc_op"] == "t" for row in raw_rows(lake, t)) for t in tables(database)
    }


def await_equal(database: Database, lake: Path, daemon: Daemon) -> None:
    def is_equal() -> bool:
        with database.connect() as connection:
            await_caught_up(connection, database.name, LIMIT_S)
            return all(
                c.is_equal for c in compare_source(connection, str(lake), "shop", tables(database))
            )

    await_until(is_equal, LIMIT_S, lambda: differences(database, lake) + daemon.tail())


def differences(database: Database, lake: Path) -> str:
    with database.connect() as connection:
        found = compare_source(connection, str(lake), "shop", tables(database))
    return "\n".join(str(c) for c in found if not c.is_equal) + "\n"


def rename_all(database: Database, *, to: str) -> list[str]:
    statements = []
    for kind in KINDS:
        name = name_of(kind, database)
        new = f"{name}{to}"
        statements += [
            renamed(kind, name, new),
            f"INSERT INTO t_{kind.type} VALUES (2, '{kind.sql(kind.value, new)}')",
        ]
    return [*statements, "ALTER TABLE obj.shaped RENAME TO reshaped"]


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_running", [True, False])
def test_objects_that_values_refer_to_change(
    objects: Database, daemon: Daemon, lake: Path, *, is_running: bool
) -> None:
    def change(*statements: str) -> None:
        if not is_running:
            assert daemon.sigterm() == 0
        objects.execute(*statements)
        if not is_running:
            daemon.start_ready()
        await_equal(objects, lake, daemon)

    assert_lake_equals_source(objects, lake, tables=tables(objects), slot=objects.name)
    before = readings(objects, lake)
    unrelated = [
        "CREATE TABLE obj.fresh (id int)",
        f"CREATE ROLE {objects.name}_fresh",
        f"ALTER ROLE {objects.name}_fresh RENAME TO {objects.name}_stale",
        f"DROP ROLE {objects.name}_stale",
        "ALTER TABLE obj.fresh RENAME TO stale",
        "DROP TABLE obj.stale",
        "CREATE TEMP TABLE passing (id int)",
        "GRANT SELECT ON obj.shaped TO PUBLIC",
        "INSERT INTO others VALUES (2, 'obj.shaped', 'postgres', '=r/postgres')",
        "VACUUM FULL obj.shaped",
    ]
    change(*unrelated)
    assert_lake_equals_source(objects, lake, tables=tables(objects), slot=objects.name)
    assert readings(objects, lake) == before
    # Set schema.
    moved = [k for k in KINDS if k.keyword not in {"SCHEMA", "ROLE"}]
    change(
        *(f"ALTER {k.keyword} obj.{name_of(k, objects)} SET SCHEMA obj2" for k in moved),
        "ALTER OPERATOR obj.@@@ (int, int) SET SCHEMA obj2",
    )
    reread = {t for t, n in readings(objects, lake).items() if n > before[t]}
    assert reread == {f"public.t_{t}" for t in (*(k.type for k in moved), *OPERATORS)}
    change(
        *(f"ALTER {k.keyword} obj2.{name_of(k, objects)} SET SCHEMA obj" for k in moved),
        "ALTER OPERATOR obj2.@@@ (int, int) SET SCHEMA obj",
    )
    change(*rename_all(objects, to="_x"))
    every = {t for t, n in readings(objects, lake).items() if n > before[t]}
    assert {t for t in before if t not in every} == set()
    change("ALTER SCHEMA obj RENAME TO subj")
    change("ALTER SCHEMA subj RENAME TO obj")
    # Dropped and re-created.
    change(
        *(
            s
            for k in KINDS
            for s in (
                dropped(k, name_of(k, objects) + "_x"),
                k.sql(k.make, name_of(k, objects) + "_x"),
                f"INSERT INTO t_{k.type} VALUES (3, '{k.sql(k.value, name_of(k, objects))}_x')"
                if k.type not in {"regprocedure", "aclitem"}
                else f"INSERT INTO t_{k.type} VALUES (3, NULL)",
            )
        ),
        "DROP OPERATOR obj.@@@ (int, int)",
        "DROP TABLE obj.reshaped",
    )
    reasons = {row["reason"] for row in registry(lake) if row["reason"]}
    assert reasons == {"an object that its values refer to was renamed, moved or dropped"}


@pytest.mark.thorough
@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_running", [True, False])
def test_objects_that_change_between_two_readings_of_the_catalog(
    objects: Database, daemon: Daemon, lake: Path, *, is_running: bool
) -> None:
    assert_lake_equals_source(objects, lake, tables=tables(objects), slot=objects.name)
    if not is_running:
        daemon.sigterm()
    objects.execute(
        "BEGIN; CREATE TABLE obj.brief (id int); INSERT INTO t_regclass VALUES (7, 'obj.brief');"
        " DROP TABLE obj.brief; COMMIT",
        "BEGIN; ALTER TABLE obj.shaped RENAME TO reshaped;"
        " INSERT INTO s_array VALUES (7, '{obj.reshaped}');"
        " ALTER TABLE obj.reshaped RENAME TO shaped; COMMIT",
        f"BEGIN; CREATE ROLE {objects.name}_a; INSERT INTO t_aclitem VALUES"
        f" (7, '{objects.name}_a=r/postgres'); ALTER ROLE {objects.name}_a RENAME TO"
        f" {objects.name}_b; COMMIT",
    )
    if not is_running:
        daemon.start_ready()
    await_equal(objects, lake, daemon)
    daemon.sigterm()
    daemon.start_ready()
    assert_lake_equals_source(objects, lake, tables=tables(objects), slot=objects.name)


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_settings_of_the_database_change_no_text(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    """search_path, quote_all_identifiers and lc_monetary decide nothing; nothing is read again."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, c regclass, m money, a aclitem)",
        "INSERT INTO t VALUES (1, 't', 1234.5, '=r/postgres')",
    )
    names = f'slot = "{database.name}"\npublication = "{database.name}"'
    extra = f'{names}\ndiscover_interval = "500ms"\ncatch_up_above = "250kB"'
    daemon = make_daemon(wal_config(lake=lake, dsn=database.dsn, source_extra=extra))
    daemon.start_ready()
    for setting in (*OTHERWISE, "search_path = pg_catalog"):
        database.execute(f"ALTER DATABASE {database.name} SET {setting}")
    database.execute("INSERT INTO public.t VALUES (2, 'public.t', 1234.5, '=r/postgres')")
    await_until(lambda: len(texts_of(lake)) == 2, LIMIT_S, daemon.tail)
    daemon.sigterm()
    database.execute(  # a backlog that is drained by SQL functions
        "INSERT INTO public.t SELECT g, 'public.t', 1234.5, '=r/postgres'"
        " FROM generate_series(3, 6000) g"
    )
    daemon.start_ready()
    await_until(lambda: len(texts_of(lake)) == 6000, LIMIT_S, daemon.tail)
    assert set(texts_of(lake)) == {("public.t", "$1,234.50", "=r/postgres")}
    assert sum(row["_cdc_op"] == "t" for row in raw_rows(lake, TableId("public", "t"))) == 1
    daemon.sigkill()
    database.execute("ALTER TABLE public.t RENAME COLUMN m TO money")  # has it read again
    daemon.start_ready()
    await_until(lambda: len(texts_of(lake)) == 12000, LIMIT_S, daemon.tail)
    assert {(c, a) for c, _, a in texts_of(lake)} == {("public.t", "=r/postgres")}


def texts_of(lake: Path) -> list[tuple[str, str, str]]:
    rows = raw_rows(lake, TableId("public", "t"))
    return [(r["c"], r.get("money") or r["m"], r["a"]) for r in rows if r["_cdc_op"] in "rc"]


@pytest.mark.thorough
@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_running", [True, False])
def test_a_polled_table_is_read_again_when_an_object_is_renamed(
    database: Database, make_daemon: MakeDaemon, lake: Path, *, is_running: bool
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v regclass, at timestamptz NOT NULL DEFAULT now())",
        "CREATE TABLE obj (id int)",
        "CREATE TABLE free (id int)",
        "INSERT INTO t VALUES (1, 'obj'), (2, 'pg_class')",
    )
    extra = '[sources.shop.table."public.t"]\ncursor = "at"'
    config = polling_config(lake=lake, dsn=database.dsn, tables=["public.t"], extra=extra)
    daemon = make_daemon(config)
    daemon.start_ready()
    if not is_running:
        daemon.sigterm()
    database.execute("ALTER TABLE free RENAME TO freed", "INSERT INTO t VALUES (3, 'obj')")
    if not is_running:
        daemon.start_ready()
    await_until(lambda: "3" in polled(lake), LIMIT_S, daemon.tail)
    if not is_running:
        daemon.sigterm()
    database.execute("ALTER TABLE obj RENAME TO renamed", "INSERT INTO t VALUES (4, 'renamed')")
    if not is_running:
        daemon.start_ready()
    now = "public.renamed"
    expected = {"1": now, "2": "pg_class", "3": now, "4": now}
    await_until(lambda: polled(lake) == expected, LIMIT_S, daemon.tail)
    table = TableId("public", "t")
    await_until(
        lambda: sum(row["_cdc_op"] == "t" for row in raw_rows(lake, table)) == 2,
        LIMIT_S,
        daemon.tail,
    )


def polled(lake: Path) -> dict[str, str]:
    rows = sorted(
        raw_rows(lake, TableId("public", "t")), key=lambda r: (r["_cdc_lsn"], r["_cdc_seq"])
    )
    found: dict[str, str] = {}
    for row in rows:
        if row["_cdc_op"] == "t":
            found = {}
        else:
            found[str(row["id"])] = row["v"]
    return found


OTHERWISE = ("quote_all_identifiers = on", "lc_monetary = 'C.utf8'", "search_path = nowhere")


@pytest.mark.parametrize("replication", [False, True])
async def test_what_texts_depend_on_is_pinned(database: Database, *, replication: bool) -> None:
    """On a walsender too."""
    database.execute(*(f"ALTER DATABASE {database.name} SET {setting}" for setting in OTHERWISE))
    async with await connect(database.dsn, replication=replication) as connection:
        found = [
            (await (await connection.execute(f"SHOW {name}".encode())).fetchone())
            for name in ("quote_all_identifiers", "lc_monetary", "search_path")
        ]
    assert found == [("off",), ("C",), ("pg_catalog, pg_temp",)]


KEYS = ("regclass", "regrole[]", "aclitem", "obj.d", "obj.c", "obj.r")


@pytest.mark.timeout(60)
async def test_such_a_value_is_refused_as_a_key(database: Database) -> None:
    """The remedy works: after it the table is captured."""
    database.execute(
        "CREATE SCHEMA obj",
        "CREATE DOMAIN obj.d AS regclass",
        "CREATE TYPE obj.c AS (n int, r regclass)",
        "CREATE TYPE obj.r AS RANGE (SUBTYPE = regclass)",
    )
    for number, kind in enumerate(KEYS):
        database.execute(f'CREATE TABLE "k {number}" (id {kind} NOT NULL, v int)')
        if kind != "aclitem":  # has no order
            database.execute(f'ALTER TABLE "k {number}" ADD PRIMARY KEY (id)')
    database.execute(
        "CREATE TABLE plain (id int PRIMARY KEY, v regclass)",
        "CREATE TABLE whole (v regclass)",
        "ALTER TABLE whole REPLICA IDENTITY FULL",
    )
    settings = WalSettings(
        kind="wal",
        dsn=SecretStr(database.dsn),
        tables=["public.*"],
        slot=database.name,
        publication=database.name,
    )
    lines = {line.subject: line for line in await preflight("shop", settings)}
    assert lines["table public.plain"].level == lines["table public.whole"].level == "ok"
    refused = [n for n, kind in enumerate(KEYS) if kind != "aclitem"]
    for number in refused:
        line = lines[f"table public.k {number}"]
        assert line.level == "fail"
        assert "whose text changes when the object it refers to is renamed" in line.detail
        assert line.remedy is not None
        database.execute(line.remedy)
    after = {line.subject: line for line in await preflight("shop", settings)}
    assert [after[f"table public.k {n}"].level for n in refused] == ["ok"] * len(refused)
