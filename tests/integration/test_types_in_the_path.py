"""Types that only an unpinned search_path finds: in the role's own schema, and where SET points.

Each of three schemas has types of the same names, with other contents, so that a type that is found
by its bare name is another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.harness.command_line import await_verified, run_command
from tests.harness.compare import registry
from tests.harness.config import polling_config, wal_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("database owner")
LIMIT_S = 90.0
APP = "app"
VALUES = {
    "mood": "('{0} sad')::{1}.mood",
    "word": "'w {0}'::{1}.word",
    "pair": "ROW(i, 'p {0}', '{0} sad')::{1}.pair",
    "span": "{1}.span('a {0} ' || i, 'b', '[)')",
    "bool": "('{0} odd')::{1}.bool",
    "_mood": "ARRAY['{0} sad', NULL]::{1}._mood",
}
"""By type, SQL of a value, of a schema and its name in SQL. pg_catalog has a `bool`, too."""
KEYED = ("mood", "word", "pair", "span")


def role_of(database: Database) -> str:
    return f"r {database.name}"


def schemas_of(database: Database) -> list[str]:
    return [role_of(database), APP, "public"]


def quoted(name: str) -> str:
    return sql.Identifier(name).as_string(None)


def types_in(name: str) -> list[str]:
    schema, label = quoted(name), name.replace("'", "''")
    return [
        f"CREATE TYPE {schema}.mood AS ENUM ('{label} sad', '{label} glad')",
        f"CREATE DOMAIN {schema}.word AS text CHECK (VALUE LIKE '% {label}%')",
        f"CREATE TYPE {schema}.pair AS (a int, b text, c {schema}.mood)",
        f"CREATE TYPE {schema}.span AS RANGE (subtype = text)",
        f"CREATE TYPE {schema}.bool AS ENUM ('{label} odd')",
    ]


def value(kind: str, schema: str) -> str:
    return VALUES[kind].format(schema, quoted(schema))


@pytest.fixture
def shop(database: Database) -> Iterator[Database]:
    role = role_of(database)
    database.execute(
        f"CREATE ROLE {quoted(role)} SUPERUSER LOGIN",
        f"CREATE SCHEMA {quoted(role)}",
        f"CREATE SCHEMA {APP}",
        *(statement for schema in schemas_of(database) for statement in types_in(schema)),
    )
    pairs = [(kind, schema) for schema in schemas_of(database) for kind in VALUES]
    columns = ", ".join(f"c{i} {quoted(s)}.{k}" for i, (k, s) in enumerate(pairs))
    values = ", ".join(value(kind, schema) for kind, schema in pairs)
    database.execute(
        f"CREATE TABLE every (id int PRIMARY KEY, {columns})",
        f"INSERT INTO every SELECT i, {values} FROM generate_series(1, 20) i",
    )
    for number, (kind, schema) in enumerate(pairs):
        if kind in KEYED:
            kinds = f"k {quoted(schema)}.{kind}, n int, note text, PRIMARY KEY (k, n)"
            database.execute(
                f"CREATE TABLE keyed{number} ({kinds})",
                f"INSERT INTO keyed{number} SELECT {value(kind, schema)}, i, 'x'"
                " FROM generate_series(1, 20) i",
            )
    yield database
    database.execute(
        f"DROP OWNED BY {quoted(role)}",
        f"DROP ROLE {quoted(role)}",
    )


def with_path(database: Database, path: str) -> None:
    """Set which type is found first: by role, by database."""
    role = quoted(role_of(database))
    database.execute(
        f"ALTER ROLE {role} SET search_path = {path}",
        f"ALTER DATABASE {quoted(database.name)} SET search_path = {path}",
    )


def read_again(daemon: Daemon) -> list[str]:
    """The tables that were read, after the first time."""
    events = daemon.events("table.state")
    tables = [str(e["table"]) for e in events if e["state"] == "snapshotting"]
    return [t for i, t in enumerate(tables) if t in tables[:i]]


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["wal", "polling"])
def test_types_that_only_another_path_finds(
    shop: Database, lake: Path, make_daemon: MakeDaemon, kind: str
) -> None:
    dsn = make_conninfo(shop.dsn, user=role_of(shop))
    own = quoted(role_of(shop))
    if kind == "wal":
        extra = f'slot = "{shop.name}"\npublication = "{shop.name}"\ndiscover_interval = "200ms"'
        config = wal_config(lake=lake, dsn=dsn, source_extra=extra)
    else:
        section = '[sources.shop.table."public.keyed{}"]\ndetect_deletes = "200ms"\n'
        extra = "".join(section.format(number) for number in keyed_tables(shop))
        config = polling_config(lake=lake, dsn=dsn, extra=extra)
    daemon = make_daemon(config)
    checked = run_command(daemon.config_path, "check")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    daemon.start_ready(LIMIT_S)
    with_path(shop, f"{APP}, public")
    shop.execute(
        f"INSERT INTO every (id, c0) VALUES (100, {value('mood', role_of(shop))})",
        "UPDATE every SET c6 = c6, c7 = c7 WHERE id < 5",
        *(f"UPDATE keyed{n} SET note = 'y' WHERE n < 9" for n in keyed_tables(shop)),
        *(f"DELETE FROM keyed{n} WHERE n > 15" for n in keyed_tables(shop)),
    )
    await_verified(daemon, LIMIT_S)
    names = {
        column["name"]: column["pg_type"]
        for row in registry(lake)
        if row["table"] == "public.every"
        for column in row["columns"]
    }
    assert names["c0"] == f"{own}.mood"
    assert names["c6"] == f"{APP}.mood"
    assert names["c12"] == "mood"
    assert names["c16"] == "public.bool"
    # an alteration of one of them is of the tables that have this one
    shop.execute(f"ALTER TYPE {own}.mood RENAME VALUE '{role_of(shop)} glad' TO 'other'")
    shop.execute("UPDATE every SET c0 = 'other' WHERE id = 7")
    await_verified(daemon, LIMIT_S)
    before = sorted(read_again(daemon))
    assert all(table != "public.keyed6" for table in before)
    # the path does not matter to what is recorded
    daemon.sigterm()
    with_path(shop, f"pg_catalog, public, {own}")
    daemon.start_ready(LIMIT_S)
    if kind == "wal":
        where = f"c6 = '{APP} sad'::{APP}.mood AND c0 <> 'other'::{own}.mood"
        done = run_command(daemon.config_path, "snapshot", "shop", "public.every", "--where", where)
        assert done.returncode == 0, done.stderr
    shop.execute("UPDATE public.every SET c1 = c1 WHERE id = 8")
    await_verified(daemon, LIMIT_S)
    assert sorted(read_again(daemon)) == before


def keyed_tables(shop: Database) -> list[int]:
    names = [name for (name,) in shop.rows("SELECT relname FROM pg_class WHERE relkind = 'r'")]
    return sorted(int(name[5:]) for name in names if name.startswith("keyed"))
