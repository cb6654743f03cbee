"""A daemon with the rights that deploy/role.sql grants, in a database without default rights."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from pydantic import SecretStr

import ingestd
from ingestd.model.printable_text import printable_lines
from ingestd.model.schema import TableId
from ingestd.postgres.role_sql import least_privilege
from ingestd.postgres.settings import WalSettings
from ingestd.testing.oracle.comparison import compare_source
from tests.harness.compare import assert_lake_equals_source
from tests.harness.config import polling_config, wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

SCRIPT = Path(ingestd.__file__).parent.parent / "deploy/role.sql"
ORDERS, ITEMS = TableId("public", "orders"), TableId("Sales", "Line Items")
NAMED = 'public.orders, "Sales"."Line Items"'
LIMIT_S = 120.0


@pytest.fixture
def role(database: Database) -> Iterator[str]:
    """The role for the script to create; tables of an owner who is no superuser."""
    name, owner = f"i_{database.name}", f"o_{database.name}"
    database.execute(
        f"REVOKE ALL ON DATABASE {database.name} FROM PUBLIC",
        "REVOKE ALL ON SCHEMA public FROM PUBLIC",
        f"CREATE ROLE {owner}",
        'CREATE SCHEMA "Sales"',
        "CREATE TABLE orders (id int PRIMARY KEY, note text)",
        'CREATE TABLE "Sales"."Line Items" (id bigint PRIMARY KEY, "Order" int)',
        "CREATE TABLE secrets (id int PRIMARY KEY, word text)",
        f"ALTER TABLE orders OWNER TO {owner}",
        f'ALTER TABLE "Sales"."Line Items" OWNER TO {owner}',
        "INSERT INTO orders SELECT i, 'order ' || i FROM generate_series(1, 500) i",
        'INSERT INTO "Sales"."Line Items" SELECT i, i % 7 FROM generate_series(1, 700) i',
        "INSERT INTO secrets VALUES (1, 'sesame')",
    )
    yield name
    database.execute(
        f"DROP OWNED BY {name}",
        f"DROP ROLE {name}",
        f"DROP OWNED BY {owner} CASCADE",
        f"DROP ROLE {owner}",
    )


def run_script(database: Database, role: str, **variables: str) -> None:
    done = script_run(database, role, **variables)
    assert done.returncode == 0, done.stderr


def script_run(database: Database, role: str, **variables: str) -> subprocess.CompletedProcess[str]:
    told = {"tables": NAMED, "role": role, "publication": role, "slot": role, **variables}
    done = subprocess.run(
        [
            *(str(database.server.program("psql")), "-X", "-q", "-d", database.dsn),
            *(f"-v{name}={value}" for name, value in told.items()),
            *("-f", str(SCRIPT)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    database.server.share_password()
    return done


def dsn(database: Database, role: str) -> str:
    return make_conninfo(database.dsn, user=role)


def config(database: Database, role: str, lake: Path, orders: str, extra: str) -> str:
    names = f'slot = "{role}"\npublication = "{role}"\ndiscover_interval = "300ms"\n{extra}'
    return wal_config(
        lake=lake, dsn=dsn(database, role), tables=[orders, "Sales.*"], source_extra=names
    )


def change(database: Database) -> None:
    database.execute(
        "INSERT INTO orders VALUES (1000, 'new')",
        "UPDATE orders SET note = 'changed' WHERE id % 2 = 0",
        'DELETE FROM "Sales"."Line Items" WHERE id < 100',
        "TRUNCATE orders",
        "INSERT INTO orders VALUES (2000, 'after')",
        "INSERT INTO secrets VALUES (2, 'not for us')",
    )


def attributes(database: Database, role: str) -> dict[str, bool]:
    names = ["super", "createdb", "createrole", "bypassrls", "replication", "canlogin"]
    columns = ", ".join(f"rol{name}" for name in names)
    [row] = database.rows(f"SELECT {columns} FROM pg_roles WHERE rolname = %s", role)
    return dict(zip(names, row, strict=True))


NONE = {"super": False, "createdb": False, "createrole": False, "bypassrls": False}


def granted(database: Database, role: str) -> set[tuple[Any, ...]]:
    """What the role itself may do with tables, schemas and the database."""
    return set(
        database.rows(
            """
            SELECT c.oid::regclass::text, a.privilege_type
              FROM pg_class c, aclexplode(c.relacl) a WHERE a.grantee = %(role)s::regrole
            UNION ALL
            SELECT n.nspname::text, a.privilege_type
              FROM pg_namespace n, aclexplode(n.nspacl) a WHERE a.grantee = %(role)s::regrole
            UNION ALL
            SELECT 'database', a.privilege_type
              FROM pg_database d, aclexplode(d.datacl) a WHERE a.grantee = %(role)s::regrole
            """.replace("%(role)s", f"'{role}'")
        )
    )


READING = {
    ("orders", "SELECT"),
    ('"Sales"."Line Items"', "SELECT"),
    ("public", "USAGE"),
    ("Sales", "USAGE"),
    ("database", "CONNECT"),
}


def refused(database: Database, role: str, statement: str) -> None:
    with (
        psycopg.connect(dsn(database, role)) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute(statement.encode())


def test_publication_and_slot_made_by_others(
    database: Database, role: str, lake: Path, make_daemon: MakeDaemon
) -> None:
    run_script(database, role)
    run_script(database, role)  # again, as for more tables
    assert attributes(database, role) == {**NONE, "replication": True, "canlogin": True}
    assert granted(database, role) == READING
    daemon = make_daemon(config(database, role, lake, "public.orders", "manage = false"))
    daemon.start_ready(LIMIT_S)
    change(database)
    assert_lake_equals_source(database, lake, tables=[ORDERS, ITEMS], slot=role, limit_s=LIMIT_S)
    assert not daemon.events("source.failed")
    assert daemon.sigterm() == 0
    for statement in (
        "SELECT * FROM secrets",
        "INSERT INTO orders VALUES (1)",
        "DELETE FROM orders",
        "CREATE TABLE public.t ()",
        f"CREATE PUBLICATION more_{role}",
        f"ALTER PUBLICATION {role} SET (publish = 'insert')",
    ):
        refused(database, role, statement)


def test_publication_and_slot_made_by_the_daemon(
    database: Database, role: str, lake: Path, make_daemon: MakeDaemon
) -> None:
    run_script(database, role, manage="true", owner=f"o_{database.name}")
    assert attributes(database, role) == {**NONE, "replication": True, "canlogin": True}
    assert granted(database, role) == READING | {("database", "CREATE")}
    daemon = make_daemon(config(database, role, lake, "public.*", "manage = true"))
    daemon.start()
    for table in (ORDERS, ITEMS):
        await_until(
            partial(is_live, daemon, table),
            LIMIT_S,
            lambda: f"the tables to be live\n{daemon.tail()}",
        )
    change(database)
    assert_lake_equals_source(database, lake, tables=[ORDERS, ITEMS], slot=role, limit_s=LIMIT_S)
    # what it may not read stops alone
    stopped = [event["table"] for event in daemon.events("table.stopped")]
    assert set(stopped) == {"public.secrets"}
    assert daemon.sigterm() == 0
    refused(database, role, "SELECT * FROM secrets")
    refused(database, role, sql.SQL("CREATE ROLE x").as_string(None))


# --- what the script publishes ----------------------------------------------------------------

KEYLESS = "CREATE TABLE t (id int NOT NULL, note text)"
PARTED = "CREATE TABLE t (id int NOT NULL, note text) PARTITION BY RANGE (id)"
PART = "CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (0) TO (9)"
REFUSED = {
    "no key": [KEYLESS],
    "a deferrable key": ["CREATE TABLE t (id int PRIMARY KEY DEFERRABLE, note text)"],
    "identity nothing": [
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        "ALTER TABLE t REPLICA IDENTITY NOTHING",
    ],
    "its identity's index was dropped": [
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        "CREATE UNIQUE INDEX u ON t (id)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX u",
        "DROP INDEX u",
    ],
    "a partition without key": [PARTED, PART],
    "a partition of a partition": [
        PARTED,
        "CREATE TABLE t_0 PARTITION OF t FOR VALUES FROM (0) TO (99) PARTITION BY LIST (id)",
        "CREATE TABLE t_1 PARTITION OF t_0 DEFAULT",
        "ALTER TABLE t REPLICA IDENTITY FULL",
    ],
    "one that inherits": [
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        "CREATE TABLE t_1 () INHERITS (t)",
    ],
}
TAKEN = {
    "a key": ["CREATE TABLE t (id int PRIMARY KEY, note text)"],
    "a unique index": [
        KEYLESS,
        "CREATE UNIQUE INDEX u ON t (id)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX u",
    ],
    "identity full": [KEYLESS, "ALTER TABLE t REPLICA IDENTITY FULL"],
    "a partitioned key": [PARTED, "ALTER TABLE t ADD PRIMARY KEY (id)", PART],
    "full partitions": [PARTED, PART, "ALTER TABLE t_1 REPLICA IDENTITY FULL"],
}


def published(database: Database, publication: str) -> set[str]:
    found = database.rows(
        "SELECT prrelid::regclass::text FROM pg_publication_rel r"
        " JOIN pg_publication p ON p.oid = prpubid WHERE pubname = %s",
        publication,
    )
    return {name for [name] in found}


def write(database: Database) -> None:
    database.execute(
        "DELETE FROM t",
        "INSERT INTO t VALUES (1, 'a'), (2, 'b')",
        "UPDATE t SET note = 'c' WHERE id = 1",
        "DELETE FROM t WHERE id = 2",
    )


@pytest.mark.thorough
@pytest.mark.parametrize("made", REFUSED.values(), ids=REFUSED)
def test_no_table_is_published_whose_own_writes_would_fail(
    database: Database, role: str, made: list[str]
) -> None:
    database.execute(*made)
    told = "public.t_1" if any("t_1" in statement for statement in made) else "public.t"
    found = script_run(database, role, tables="public.t, public.orders")
    assert found.returncode == 3
    assert f"UPDATE and DELETE fail: {told}\n" in found.stderr
    assert f"ALTER TABLE {told} REPLICA IDENTITY FULL;" in found.stderr
    assert database.rows("SELECT FROM pg_roles WHERE rolname = %s", role) == []
    assert database.rows("SELECT FROM pg_publication") == []
    assert database.slots() == []
    write(database)
    # nor is it added to a publication
    run_script(database, role, tables="public.orders")
    assert script_run(database, role, tables="public.t").returncode == 3
    assert published(database, role) == {"orders"}
    write(database)
    # what it says helps
    database.execute(f"ALTER TABLE {told} REPLICA IDENTITY FULL")
    run_script(database, role, tables="public.t")
    assert published(database, role) >= {"orders", "t"}
    write(database)


@pytest.mark.parametrize("made", TAKEN.values(), ids=TAKEN)
def test_tables_that_can_be_published_are(database: Database, role: str, made: list[str]) -> None:
    database.execute(*made)
    run_script(database, role, tables="public.t")
    assert published(database, role) == {"t"}
    write(database)


def test_a_keyless_table_may_be_read_where_nothing_is_published(
    database: Database, role: str
) -> None:
    database.execute(KEYLESS)
    run_script(database, role, tables="public.t", kind="polling")
    assert granted(database, role) >= {("t", "SELECT")}
    write(database)


def test_more_tables_are_added_to_what_is_published(database: Database, role: str) -> None:
    run_script(database, role, tables="public.orders, public.orders")
    assert published(database, role) == {"orders"}
    run_script(database, role, tables='"Sales"."Line Items"')
    assert published(database, role) == {"orders", '"Sales"."Line Items"'}
    assert granted(database, role) == READING
    if database.server.major >= 15:  # row filters and column lists
        database.execute(f"ALTER PUBLICATION {role} SET TABLE orders (id) WHERE (id > 7)")
        run_script(database, role)
        assert published(database, role) == {"orders", '"Sales"."Line Items"'}
        shown = "SELECT attnames::text, rowfilter FROM pg_publication_tables WHERE tablename = %s"
        assert database.rows(shown, "orders") == [("{id}", "(id > 7)")]
    database.execute(f"DROP PUBLICATION {role}", f"CREATE PUBLICATION {role} FOR ALL TABLES")
    run_script(database, role)
    assert published(database, role) == set()


def is_live(daemon: Daemon, table: TableId) -> bool:
    status = daemon.status()
    tables = [] if status is None else status["sources"]["shop"]["tables"]
    return any(t["state"] == "live" for t in tables if TableId.parse(t["table"]) == table)


@pytest.mark.thorough
def test_polling_without_replication(
    database: Database, role: str, lake: Path, make_daemon: MakeDaemon
) -> None:
    run_script(database, role, kind="polling", manage="true")
    assert attributes(database, role) == {**NONE, "replication": False, "canlogin": True}
    assert granted(database, role) == READING
    sections = "".join(
        f"[sources.shop.table.'{table}']\ndetect_deletes = \"200ms\"\n" for table in (ORDERS, ITEMS)
    )
    daemon = make_daemon(
        polling_config(
            lake=lake,
            dsn=dsn(database, role),
            tables=["public.orders", "Sales.*"],
            extra=sections,
        )
    )
    daemon.start_ready(LIMIT_S)
    change(database)

    def is_equal() -> bool:
        with database.connect() as connection:
            found = compare_source(connection, str(lake), "shop", [ORDERS, ITEMS])
        return all(c.is_equal for c in found)

    await_until(is_equal, LIMIT_S, lambda: f"the lake to equal the source\n{daemon.tail()}")
    assert not daemon.events("source.failed")
    assert database.slots() == []
    assert daemon.sigterm() == 0
    refused(database, role, "SELECT * FROM secrets")
    refused(database, role, "INSERT INTO orders VALUES (1)")
    with pytest.raises(psycopg.OperationalError, match=r"(?i)wal ?sender"):
        psycopg.connect(make_conninfo(dsn(database, role), replication="database"))


async def test_what_is_printed_grants_the_named_table_only(database: Database, role: str) -> None:
    """A tab in a name is not printed as the space of another name."""
    tab, space = TableId("public", "pay\troll"), TableId("public", "pay roll")
    database.execute(*(f'CREATE TABLE "{t.name}" (id int PRIMARY KEY)' for t in (tab, space)))
    settings = WalSettings(
        kind="wal",
        dsn=SecretStr(database.dsn),
        tables=["public.*"],
        slot=database.name,
        publication=database.name,
        manage=False,
    )
    found = await least_privilege(settings, role, [tab], "source shop")
    pasted = printable_lines("\n".join(found))
    assert "\t" not in pasted
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        for statement in pasted.splitlines():
            if "replication_slot" not in statement:
                connection.execute(statement.encode())
        may_read = "SELECT has_table_privilege(%s, quote_ident(%s), 'SELECT')"
        given = [connection.execute(may_read, (role, t.name)).fetchone() for t in (tab, space)]
    assert given == [(True,), (False,)]
