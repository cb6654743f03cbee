"""`check` refuses what `run` refuses, with the same remedy: each refusal is brought about on both.

What docs/errors.md shows of a running daemon has to be among these, or named with the reason why it
can't be found beforehand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.conninfo import make_conninfo

from ingestd.app.check import check
from ingestd.testing.embedded.daemon import Daemon
from tests.harness.config import polling_config, wal_config
from tests.harness.servers import FAST, running_server
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from ingestd.testing.embedded.postgres import PostgresServer

LIMIT_S = 60.0
ERRORS = Path(__file__).parent.parent.parent / "docs" / "errors.md"
ONLY_WHILE_IT_RUNS = {
    "The server goes away": "it was there",
    "Two daemons": "check says that a daemon works on the source, which is no fault",
}
LONG = "!" * 60


@dataclass(frozen=True)
class Case:
    """Statements that bring a refusal about; `{limited}` is a role without rights of its own.

    `shown`: its title in docs/errors.md. `kind`, `source`, `extra`: of the config. `as_limited`:
    the daemon connects as that role. `first`: a daemon has run before, without fault. `is_pasted`:
    the remedy is SQL, and the source starts after it.
    """

    statements: tuple[str, ...] = ()
    kind: str = "wal"
    source: tuple[str, ...] = ()
    extra: str = ""
    tables: tuple[str, ...] = ("public.*",)
    as_limited: bool = False
    shown: str = ""
    first: bool = False
    is_pasted: bool = False


READS = (
    "ALTER ROLE limited REPLICATION",
    "GRANT SELECT ON ALL TABLES IN SCHEMA public TO limited",
)
PUBLISHED = (
    "CREATE PUBLICATION ingestd_shop FOR TABLE orders WITH (publish_via_partition_root = true)",
    *READS,
)
HIDES = ("ALTER TABLE orders ENABLE ROW LEVEL SECURITY", "CREATE POLICY p ON orders USING (id > 9)")
UNMANAGED = ("manage = false",)
SLOT = "SELECT pg_create_logical_replication_slot('ingestd_shop', 'pgoutput')"

CASES: dict[str, Case] = {
    "row security": Case((*PUBLISHED, *HIDES), as_limited=True),
    "row security, polled": Case((*READS, *HIDES), kind="polling", as_limited=True),
    "row security of a partition": Case(
        (
            "CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id)",
            "CREATE TABLE p1 PARTITION OF p DEFAULT",
            PUBLISHED[0].replace("orders", "orders, p"),
            *READS,
            "ALTER TABLE p1 ENABLE ROW LEVEL SECURITY",
        ),
        as_limited=True,
    ),
    "no identity": Case(("CREATE TABLE visits (page text)",), shown="A new table without a key"),
    "an event trigger refuses": Case(
        (
            """CREATE FUNCTION no() RETURNS event_trigger LANGUAGE plpgsql
                   AS $$ BEGIN RAISE 'no publications'; END $$""",
            """CREATE EVENT TRIGGER "No ""pub\""" ON ddl_command_start
                   WHEN TAG IN ('CREATE PUBLICATION') EXECUTE FUNCTION no()""",
        ),
        is_pasted=True,
    ),
    "no publication": Case(source=UNMANAGED),
    "not in the publication": Case(
        ("CREATE PUBLICATION ingestd_shop WITH (publish_via_partition_root = true)", SLOT),
        source=UNMANAGED,
    ),
    "no slot": Case(PUBLISHED, source=UNMANAGED),
    "a physical slot": Case(("SELECT pg_create_physical_replication_slot('ingestd_shop')",)),
    "a slot of another plugin": Case(
        ("SELECT pg_create_logical_replication_slot('ingestd_shop', 'test_decoding')",)
    ),
    "all slots taken": Case(
        ("SELECT pg_create_physical_replication_slot('t' || i) FROM generate_series(1, 4) i",),
        shown="All replication slots are taken",
    ),
    "no connection left": Case(
        ("ALTER ROLE limited CONNECTION LIMIT 0",), as_limited=True, shown="Too many connections"
    ),
    "no REPLICATION": Case(as_limited=True),
    "a reserved name": Case(("ALTER TABLE orders ADD _cdc_x int",)),
    "unlogged": Case(("ALTER TABLE orders SET UNLOGGED",)),
    "a schema that may not be used": Case(
        ("CREATE SCHEMA s", "CREATE TABLE s.t (id int PRIMARY KEY)", *PUBLISHED),
        tables=("*.*",),
        as_limited=True,
    ),
    "a table that may not be read": Case(
        ("CREATE PUBLICATION ingestd_shop FOR TABLE orders", "ALTER ROLE limited REPLICATION"),
        as_limited=True,
    ),
    "a table of another owner": Case(
        (*READS, "GRANT CREATE ON DATABASE shop TO limited"), as_limited=True
    ),
    "a missing table": Case(tables=("public.orders", "public.order")),
    "an unknown column": Case(
        extra='[sources.shop.table."public.orders"]\nexclude_columns = ["notes"]'
    ),
    "a type that does not hold it": Case(
        extra='[sources.shop.table."public.orders"]\ntypes = { id = "timestamp" }'
    ),
    "a name too long for a path": Case((f'CREATE TABLE "{LONG}" (id int PRIMARY KEY)',)),
    "no key, polled": Case(("CREATE TABLE visits (page text)",), kind="polling"),
    "a cursor of no use, polled": Case(
        kind="polling", extra='[sources.shop.table."public.orders"]\ncursor = "note"'
    ),
    "the slot is gone": Case(
        ("SELECT pg_drop_replication_slot('ingestd_shop')",),
        source=('slot_lost = "stop"',),
        first=True,
        shown="The slot is missing",
    ),
    "the slot was moved": Case(
        (
            "SELECT pg_logical_emit_message(true, '', 'x')",
            "SELECT pg_replication_slot_advance('ingestd_shop', pg_current_wal_lsn())",
        ),
        source=('slot_lost = "stop"',),
        first=True,
    ),
    "the publication is gone": Case(
        ("DROP PUBLICATION ingestd_shop",), source=('slot_lost = "stop"',), first=True
    ),
}
SHORT = ("row security", "the slot was moved")


@pytest.fixture(scope="module")
def server(postgres_bindir: Path) -> Iterator[PostgresServer]:
    settings = {**FAST, "max_replication_slots": "4"}
    with running_server(postgres_bindir, settings) as made:
        yield made


@pytest.fixture
def shop(server: PostgresServer) -> Iterator[PostgresServer]:
    with server.connect() as connection:
        connection.execute("CREATE DATABASE shop")
        connection.execute("CREATE ROLE limited LOGIN")
    server.share_password()
    with server.connect("shop") as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
        connection.execute("INSERT INTO orders VALUES (1, 'a')")
    yield server
    _cleared(server)


def _cleared(server: PostgresServer) -> None:
    drop = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active"

    def is_free() -> bool:
        with server.connect() as connection:
            connection.execute(drop)
            return not connection.execute("SELECT FROM pg_replication_slots").fetchall()

    await_until(is_free, LIMIT_S, "the slots to be dropped")
    with server.connect() as connection:
        connection.execute("DROP DATABASE shop WITH (FORCE)")
        connection.execute("DROP ROLE limited")


def config_of(case: Case, server: PostgresServer) -> str:
    dsn = server.dsn("shop")
    if case.as_limited:
        dsn = make_conninfo(dsn, user="limited")
    source = "\n".join(case.source)
    if case.kind == "polling":
        return polling_config(
            lake="lake", dsn=dsn, tables=case.tables, source_extra=source, extra=case.extra
        )
    source += '\ndiscover_interval = "500ms"'
    return wal_config(
        lake="lake", dsn=dsn, tables=case.tables, source_extra=source, extra=case.extra
    )


def refusals(daemon: Daemon) -> list[dict[str, Any]]:
    """What a running daemon is stopped by: its source, or tables of it."""
    status = daemon.status()
    source = {} if status is None else status["sources"]["shop"]
    found = [source, *source.get("tables", ())]
    return [f for f in found if f.get("state") in {"stopped", "backing_off"} and f["reason"]]


def checked(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The remedies of failed checks, and the other lines."""
    monkeypatch.chdir(daemon.folder)
    lines = check(daemon.config_path)
    failed = [line.remedy or "" for line in lines if line.level == "fail"]
    return {"failed": failed, "all": [f"{x.level} {x.subject}: {x.detail}" for x in lines]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.thorough]) for n in CASES],
)
def test_check_refuses_what_run_refuses(
    shop: PostgresServer, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    daemon = Daemon(tmp_path / "daemon", config_of(case, shop))
    try:
        if case.first:
            daemon.start()
            daemon.await_ready(LIMIT_S)
            assert daemon.sigterm() == 0
            assert not checked(daemon, monkeypatch)["failed"]
        with shop.connect("shop") as connection:
            for statement in case.statements:
                connection.execute(statement.encode())
        before = checked(daemon, monkeypatch)
        daemon.start()
        await_until(lambda: bool(refusals(daemon)), LIMIT_S, daemon.tail)
        for refused in refusals(daemon):
            remedy, _, _ = refused["remedy"].partition("\n  then: ingestd snapshot ")
            assert remedy in before["failed"], (refused, before)
        if case.is_pasted:
            with shop.connect("shop") as connection:
                for refused in refusals(daemon):
                    connection.execute(refused["remedy"].encode())
            assert daemon.sigterm() == 0
            daemon.start_ready(LIMIT_S)
    finally:
        daemon.close()


@pytest.mark.thorough
def test_check_refuses_a_lake_that_is_ahead_of_its_server(
    shop: PostgresServer, postgres_bindir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restore from an older backup: the WAL of the server ends below the lake."""
    with shop.connect("shop") as connection:
        for _ in range(8):
            connection.execute("SELECT pg_switch_wal()")
            connection.execute("INSERT INTO orders SELECT coalesce(max(id), 0) + 1 FROM orders")
    daemon = Daemon(tmp_path / "daemon", config_of(Case(), shop))
    try:
        daemon.start()
        daemon.await_ready(LIMIT_S)
        assert daemon.sigterm() == 0
        with running_server(postgres_bindir, FAST) as restored:
            with restored.connect() as connection:
                connection.execute("CREATE DATABASE shop")
            with restored.connect("shop") as connection:
                connection.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
            daemon.write_config(config_of(Case(), restored))
            before = checked(daemon, monkeypatch)
            daemon.start()
            await_until(lambda: bool(refusals(daemon)), LIMIT_S, daemon.tail)
            assert [r["remedy"] for r in refusals(daemon)] == before["failed"]
            daemon.close()
    finally:
        daemon.close()


def test_every_refusal_that_the_docs_show_is_among_them() -> None:
    line = re.compile(r"^### (.*)$|^source shop(?:, table \S+)? is", re.MULTILINE)
    found = line.findall(ERRORS.read_text(encoding="utf-8"))
    shown, title = set(), ""
    for heading in found:
        title, is_of_run = (heading, False) if heading else (title, True)
        if is_of_run:
            shown.add(title)
    assert shown == {case.shown for case in CASES.values() if case.shown} | {*ONLY_WHILE_IT_RUNS}


def test_sources_that_fit_alone_are_added_up(
    shop: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three slots are left for four sources, by other names of one server too."""
    with shop.connect("shop") as connection:
        connection.execute("SELECT pg_create_physical_replication_slot('taken')")
    parts = [config_of(Case(), shop)]
    for number in range(3):
        more = config_of(Case(), shop).replace("sources.shop]", f"sources.more{number}]")
        parts.append(more[more.index("[sources.") :].replace("127.0.0.1", "localhost"))
    path = tmp_path / "ingestd.toml"
    path.write_text("\n".join(parts))
    monkeypatch.chdir(tmp_path)
    failed = [line for line in check(path) if line.level == "fail"]
    assert [line.source for line in failed] == ["shop", "more0", "more1", "more2"]
    assert {line.subject for line in failed} == {"max_replication_slots"}
    assert "4 more needed, by sources shop, more0, more1, more2" in failed[0].detail
    assert "ALTER SYSTEM SET max_replication_slots" in (failed[0].remedy or "")


@pytest.mark.parametrize("setting", ["*", "FIRST 1 (s1, *)", 'ANY 2 ("INGESTD (stream)", s1)'])
def test_a_possible_synchronous_standby_is_reported(
    shop: PostgresServer, tmp_path: Path, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shop.connect("shop") as connection:
        connection.execute("SET synchronous_commit = local")
        connection.execute("ALTER DATABASE shop SET synchronous_commit = 'local'")
        connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{setting}'".encode())
        connection.execute("SELECT pg_reload_conf()")
    try:
        with Daemon(tmp_path / "daemon", config_of(Case(), shop)) as daemon:
            daemon.await_ready(LIMIT_S)
            [told] = daemon.events("source.synchronous")
            status = daemon.status()
            assert status is not None
            [notice] = status["sources"]["shop"]["notices"]
            assert notice["remedy"] == told["remedy"]
            said = checked(daemon, monkeypatch)["all"]
            assert any("as a synchronous standby" in line for line in said)
            daemon.close()
    finally:
        with shop.connect("shop") as connection:
            connection.execute("SET synchronous_commit = local")
            connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
            connection.execute("SELECT pg_reload_conf()")


def test_names_of_standbys_do_not_take_the_stream(shop: PostgresServer, tmp_path: Path) -> None:
    """Neither `ingestd` nor the DSN's application_name."""
    case = Case(tables=("public.*", "nowhere.*"))
    config = config_of(case, shop).replace("dbname=shop", "dbname=shop application_name=s1")
    with shop.connect("shop") as connection:
        connection.execute("ALTER DATABASE shop SET synchronous_commit = 'local'")
        connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'ingestd, s1'")
        connection.execute("SELECT pg_reload_conf()")
    try:
        with Daemon(tmp_path / "daemon", config) as daemon:
            daemon.await_ready(LIMIT_S)
            with shop.connect("shop") as connection:
                query = "SELECT application_name, sync_state FROM pg_stat_replication"
                [(name, state)] = connection.execute(query).fetchall()
            assert (name, state) == ("s1 (stream)", "async")
            assert not daemon.events("source.synchronous")
            [unmatched] = daemon.events("tables.unmatched")
            assert "'nowhere.*'" in unmatched["reason"]
            daemon.close()
    finally:
        with shop.connect("shop") as connection:
            connection.execute("SET synchronous_commit = local")
            connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
            connection.execute("SELECT pg_reload_conf()")
