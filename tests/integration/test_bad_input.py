from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import psycopg
import pytest

from ingestd.testing.embedded.accounts import account_for_server, open_way
from ingestd.testing.embedded.daemon import Daemon, module_environment
from ingestd.testing.embedded.postgres import PostgresServer
from tests.harness.command_line import run_command
from tests.harness.config import wal_config
from tests.harness.databases import Database, skip_without_lists
from tests.harness.servers import FAST, running_server
from tests.harness.standbys import server_of
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ingestd.testing.embedded.accounts import Account
    from tests.conftest import MakeDaemon

PASSWORD = "s3cr3t-Pa55"
WRONG_PASSWORD = "wr0ng-Pa55"
LIMIT_S = 30.0


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str

    @property
    def failures(self) -> list[str]:
        """The lines that say fail, with the remedies below them."""
        found = re.findall(r"^fail .*\n(?:        .*\n)*", self.out, re.MULTILINE)
        return [str(f) for f in found]


AS_ANOTHER_USER = """
import os, sys
import ingestd.app.check, ingestd.app.daemon, ingestd.cli, ingestd.lake.check, ingestd.lake.factory
user, group = map(int, sys.argv[1:3])
os.setgroups([]), os.setgid(group), os.setuid(user)
sys.argv[:3] = ["ingestd"]
ingestd.cli.main()
"""
"""Gives up being root when all is imported: the interpreter may lie where only root may read."""


def ingestd(folder: Path, command: str, config: str, account: Account | None = None) -> Outcome:
    """Run the command line on a config as a user would; under root, as another account."""
    path = folder / "ingestd.toml"
    path.write_text(config, encoding="utf-8")
    program = ["-m", "ingestd"]
    if account is not None:
        rights = account.popen_arguments()
        program = ["-c", AS_ANOTHER_USER, str(rights["user"]), str(rights["group"])]
    done = subprocess.run(
        [sys.executable, *program, command, "--config", str(path)],
        cwd=folder,
        env=module_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    out = done.stdout + done.stderr
    assert "Traceback" not in out
    for secret in (PASSWORD, WRONG_PASSWORD):
        assert secret not in out
    return Outcome(done.returncode, out)


def assert_fails(found: Outcome, cause: str, remedy: str) -> None:
    """`check` ends with 1 and one failure of one to three lines: the cause, then the remedy."""
    assert found.code == 1, found.out
    [failure] = [f for f in found.failures if re.search(cause, f)] or [found.out]
    first, *rest = failure.splitlines()
    assert re.search(cause, first), failure
    assert len(rest) in {1, 2}, failure
    assert re.search(remedy, " ".join(rest)), failure


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    return database


# --- config and usage: exit code 2 -----------------------------------------------------------

GOOD = wal_config(lake="lake", dsn="host=127.0.0.1 dbname=x password=" + PASSWORD)


@pytest.mark.parametrize(
    ("config", "cause", "remedy"),
    [
        (GOOD.replace("max_delay", "max_dellay"), r"epoch\.max_dellay", "max_delay"),
        (GOOD.replace('"wal"', '"wall"'), r"sources\.shop\.kind", "'wal'"),
        (GOOD.replace("[lake]\nuri", "[lake]\nurl"), r"lake\.ur", "uri"),
        (GOOD.replace('"public.*"', '"orders"'), r"sources\.shop\.tables", r"schema\.table"),
        (GOOD.replace('"200ms"', '"200 parsecs"'), r"epoch\.max_delay", "'?5s|ms"),
        (GOOD.replace("host=", "env:SHOP_DSN_THAT_IS_NOT_SET #"), r"sources\.shop\.dsn", "env"),
        (
            GOOD.replace("host=127.0.0.1 ", "host='127 "),
            r"sources\.shop\.dsn",
            "host=|postgresql://",
        ),
        (GOOD.replace("[epoch]", "[epoch"), "not TOML", "line"),
    ],
)
def test_a_wrong_config_ends_with_2_and_the_key(
    tmp_path: Path, config: str, cause: str, remedy: str
) -> None:
    found = ingestd(tmp_path, "check", config)
    assert found.code == 2, found.out
    lines = found.out.strip().splitlines()
    assert 1 <= len(lines) <= 3, found.out
    assert re.search(cause, found.out), found.out
    assert re.search(remedy, found.out), found.out


def test_a_wrong_config_ends_the_daemon_too(tmp_path: Path) -> None:
    wrong = GOOD.replace("max_delay", "max_dellay").replace('"wal"', '"wall"')
    found = ingestd(tmp_path, "run", wrong)
    assert found.code == 2, found.out
    assert "epoch.max_dellay" in found.out
    assert "sources.shop.kind" in found.out
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_config_that_is_not_there_ends_with_2(tmp_path: Path, command: str) -> None:
    done = run_command(tmp_path / "none.toml", command)
    assert done.returncode == 2
    assert "none.toml" in done.stderr
    assert "Traceback" not in done.stderr


# --- the source: check ends with 1 -----------------------------------------------------------


def test_a_source_in_order_passes_the_check_with_0(tmp_path: Path, shop: Database) -> None:
    found = ingestd(tmp_path, "check", wal_config(lake="lake", dsn=shop.dsn))
    assert found.code == 0, found.out
    assert not found.failures
    assert "table public.orders" in found.out


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "cause", "remedy"),
    [
        ({"host": "host.invalid"}, "host.invalid", "check host and port"),
        ({"port": "1"}, "refused", "check host and port"),
        ({"dbname": "no_such_db"}, 'database "no_such_db" does not exist', "CREATE DATABASE"),
        (
            {"user": "no_such"},
            'authentication failed for user "no_such"',
            "correct the role or the password",
        ),
    ],
)
def test_a_wrong_dsn_names_what_is_wrong(
    tmp_path: Path, shop: Database, change: dict[str, str], cause: str, remedy: str
) -> None:
    dsn = psycopg.conninfo.make_conninfo(shop.dsn, **change)
    assert_fails(ingestd(tmp_path, "check", wal_config(lake="lake", dsn=dsn)), cause, remedy)


def test_one_wrong_dsn_does_not_hide_what_the_others_have(tmp_path: Path, shop: Database) -> None:
    spilt = f"postgresql://user:{PASSWORD}@x@127.0.0.1/db"
    other = f'[sources.other]\nkind = "wal"\ndsn = "{spilt}"\ntables = ["public.*"]\n'
    found = ingestd(tmp_path, "check", wal_config(lake="lake", dsn=shop.dsn, extra=other))
    assert_fails(found, "other .*not a connection string", "percent-encoded")
    assert re.search("^ok .*shop .*table public.orders", found.out, re.MULTILINE)


@pytest.fixture(scope="module")
def strict_postgres(postgres_bindir: Path) -> Iterator[PostgresServer]:
    """A server that asks for passwords, without logical replication."""
    settings = {**FAST, "wal_level": "replica"}
    with running_server(postgres_bindir, settings, password=PASSWORD) as server:
        yield server


@pytest.mark.thorough
def test_a_wrong_password_is_named_and_never_shown(
    tmp_path: Path, strict_postgres: PostgresServer
) -> None:
    dsn = psycopg.conninfo.make_conninfo(strict_postgres.dsn(), password=WRONG_PASSWORD)
    config = wal_config(lake="lake", dsn=dsn)
    found = ingestd(tmp_path, "check", config)
    assert_fails(
        found, "password authentication failed", "correct the role or the password in `dsn`"
    )
    without = psycopg.conninfo.make_conninfo(strict_postgres.dsn("postgres", user="postgres"))
    bare = re.sub(r" ?password=\S+", "", without)
    found = ingestd(tmp_path, "check", wal_config(lake="lake", dsn=bare))
    assert_fails(found, "no password supplied", "correct the role or the password")


def test_wal_level_replica_names_the_setting(
    tmp_path: Path, strict_postgres: PostgresServer
) -> None:
    found = ingestd(tmp_path, "check", wal_config(lake="lake", dsn=strict_postgres.dsn()))
    assert_fails(found, "wal_level is 'replica'", "ALTER SYSTEM SET wal_level = 'logical'")


def test_a_slot_wants_a_second_one_beside_it(tmp_path: Path) -> None:
    with server_of(15, {"max_replication_slots": "2"}) as server:
        database = Database(server, "postgres")
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
        for taken, (state, code, told) in enumerate(
            (
                ("ok", 0, "slot ingestd_shop  will be created\n"),
                ("warn", 0, "max_replication_slots +1 will be created, the last of 2; if a table"),
                ("fail", 1, "max_replication_slots +2 of 2 are in use, and 1 more needed"),
            )
        ):
            if taken:
                database.execute(f"SELECT pg_create_physical_replication_slot('taken_{taken}')")
            found = ingestd(tmp_path, "check", wal_config(lake="lake", dsn=database.dsn))
            assert found.code == code, found.out
            assert re.search(f"^{state} +shop  {told}", found.out, re.MULTILINE)


@contextmanager
def plain_role(database: Database, attributes: str = "") -> Iterator[str]:
    """A role that owns nothing; return its DSN."""
    role = f"r_{database.name}"
    database.execute(
        f"CREATE ROLE {role} LOGIN {attributes}",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}",
    )
    try:
        yield psycopg.conninfo.make_conninfo(database.dsn, user=role)
    finally:
        database.execute(f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")


def test_no_replication_attribute_names_the_role(tmp_path: Path, shop: Database) -> None:
    with plain_role(shop) as dsn:
        found = ingestd(tmp_path, "check", wal_config(lake="lake", dsn=dsn))
        assert_fails(found, "has no REPLICATION attribute", "ALTER ROLE .* REPLICATION;")
        assert_fails(found, "CREATE privilege", "CREATE PUBLICATION .*manage = false")


def test_a_role_without_read_rights_fails_beside_a_publication(
    tmp_path: Path, shop: Database
) -> None:
    shop.execute("CREATE PUBLICATION ingestd_shop")
    with plain_role(shop, "REPLICATION") as dsn:
        shop.execute(f"REVOKE ALL ON ALL TABLES IN SCHEMA public FROM r_{shop.name}")
        found = ingestd(tmp_path, "check", wal_config(lake="lake", dsn=dsn))
    assert_fails(found, "table public.orders .*no privilege to read it", "GRANT SELECT ON")


def test_manage_false_wants_publication_and_slot(tmp_path: Path, shop: Database) -> None:
    config = wal_config(lake="lake", dsn=shop.dsn, source_extra="manage = false")
    found = ingestd(tmp_path, "check", config)
    assert_fails(found, "publication .*does not exist", "CREATE PUBLICATION .*orders")
    assert_fails(
        found, "slot .*does not exist", "SELECT pg_catalog.pg_create_logical_replication_slot"
    )
    for failure in found.failures:  # the remedies are what they say: pasted, they work
        shop.execute(failure.splitlines()[1].strip())
    assert ingestd(tmp_path, "check", config).code == 0


def test_tables_that_cannot_be_captured_are_named(tmp_path: Path, shop: Database) -> None:
    shop.execute(
        "CREATE TABLE events (kind text)",
        "CREATE TABLE marked (id int PRIMARY KEY, _cdc_op text)",
        "CREATE UNLOGGED TABLE scratch (id int PRIMARY KEY)",
    )
    found = ingestd(tmp_path, "check", wal_config(lake="lake", dsn=shop.dsn))
    assert_fails(found, "table public.events .*replica identity", "REPLICA IDENTITY FULL;")
    assert_fails(found, "table public.marked .*_cdc_op", "rename the column, or exclude")
    assert_fails(found, "table public.scratch .*unlogged", "SET LOGGED;")
    assert re.search("^ok .*table public.orders", found.out, re.MULTILINE)


@pytest.fixture
def new_shop(shop: Database) -> Database:
    skip_without_lists(shop)
    return shop


def table_line(found: Outcome, name: str) -> str:
    """What check says of a table, on one line and without the columns' padding."""
    [text] = re.findall(
        rf"^\w+ .*table public\.{name} .*\n(?:        .*\n)*", found.out, re.MULTILINE
    )
    return " ".join(str(text).split())


def test_what_a_publication_sends_in_part_is_captured_in_part(
    tmp_path: Path, new_shop: Database
) -> None:
    config = wal_config(lake="lake", dsn=new_shop.dsn, source_extra="manage = false")
    new_shop.execute(
        "CREATE TABLE lines (id int PRIMARY KEY, note text)",
        "CREATE PUBLICATION ingestd_shop FOR TABLE orders (id), lines WHERE (id > 0)"
        " WITH (publish_via_partition_root = true)",
        "SELECT pg_create_logical_replication_slot('ingestd_shop', 'pgoutput')",
    )
    found = ingestd(tmp_path, "check", config)
    assert found.code == 0, found.out
    orders = (
        "1 columns, identity: id; left out: note; columns as publication 'ingestd_shop' lists them"
    )
    assert orders in table_line(found, "orders")
    assert "2 columns, identity: id; rows where (id > 0)" in table_line(found, "lines")


@pytest.mark.thorough
def test_a_list_without_the_identity_lets_only_inserts_by(
    tmp_path: Path, new_shop: Database
) -> None:
    new_shop.execute(
        "CREATE TABLE events (kind text)",
        "CREATE PUBLICATION ingestd_shop FOR TABLE orders (note), events"
        " WITH (publish_via_partition_root = true)",
        "SELECT pg_create_logical_replication_slot('ingestd_shop', 'pgoutput')",
    )
    theirs = wal_config(lake="lake", dsn=new_shop.dsn, source_extra="manage = false")
    found = ingestd(tmp_path, "check", theirs)
    assert found.code == 0, found.out
    for name, why in (("orders", "lacks 'id'"), ("events", "no usable replica identity")):
        assert re.match(f"warn .*{why}.*only inserts are possible", table_line(found, name))
    assert 'ALTER TABLE "public"."events" REPLICA IDENTITY FULL;' in found.out
    [remedy] = re.findall(r"ALTER PUBLICATION .* DROP TABLE .*; ALTER PUBLICATION .*;", found.out)
    # ours: the list goes, and a table that it would break is refused
    found = ingestd(tmp_path, "check", wal_config(lake="lake", dsn=new_shop.dsn))
    assert table_line(found, "orders").startswith("ok ")
    assert_fails(found, "table public.events .*replica identity", "REPLICA IDENTITY FULL;")
    new_shop.execute(*remedy.rstrip(";").split("; "))
    assert table_line(ingestd(tmp_path, "check", theirs), "orders").startswith("ok ")


def test_what_can_identify_rows(tmp_path: Path, shop: Database) -> None:
    shop.execute(
        "CREATE TABLE later (id int PRIMARY KEY DEFERRABLE)",
        "CREATE TABLE chosen (id int PRIMARY KEY, code text NOT NULL UNIQUE)",
        "ALTER TABLE chosen REPLICA IDENTITY USING INDEX chosen_code_key",
        "CREATE TABLE robbed (code text NOT NULL UNIQUE)",
        "ALTER TABLE robbed REPLICA IDENTITY USING INDEX robbed_code_key",
        "ALTER TABLE robbed DROP CONSTRAINT robbed_code_key",
        "CREATE TABLE whole (a int, b int)",
        "ALTER TABLE whole REPLICA IDENTITY FULL",
    )
    found = ingestd(tmp_path, "check", wal_config(lake="lake", dsn=shop.dsn))
    assert "2 columns, identity: code" in table_line(found, "chosen")
    assert "2 columns, identity: whole rows" in table_line(found, "whole")
    for name in ("later", "robbed"):
        assert_fails(found, f"table public.{name} .*no usable replica", "REPLICA IDENTITY FULL;")


def test_replica_identity_nothing_is_mended_as_it_says(tmp_path: Path, shop: Database) -> None:
    shop.execute("ALTER TABLE orders REPLICA IDENTITY NOTHING")
    config = wal_config(lake="lake", dsn=shop.dsn)
    found = ingestd(tmp_path, "check", config)
    assert_fails(found, "table public.orders .*replica identity", "REPLICA IDENTITY DEFAULT;")
    [failure] = found.failures
    shop.execute(failure.splitlines()[1].strip())
    assert ingestd(tmp_path, "check", config).code == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("controls", "cause", "remedy"),
    [
        (
            'exclude_columns = ["nots"]',
            "column 'nots' in exclude_columns does not exist",
            r"did you mean 'note'\? correct table\.\"public\.orders\"\.exclude_columns",
        ),
        (
            'exclude_columns = ["id"]',
            "column 'id' belongs to the replica identity",
            r"remove it from table\.\"public\.orders\"\.exclude_columns",
        ),
        (
            'mask_columns = { id = "null" }',
            "column 'id' belongs to the replica identity",
            r"use sha256 for it in table\.\"public\.orders\"\.mask_columns",
        ),
        (
            'types = { id = "date" }',
            "column 'id' integer can't be 'date'",
            r"correct table\.\"public\.orders\"\.types\.id",
        ),
        (
            'types = { note = "decimal(39,2)" }',
            "column 'note' text can't be 'decimal\\(39,2\\)'",
            r"correct table\.\"public\.orders\"\.types\.note",
        ),
    ],
)
def test_controls_a_table_cannot_have_are_reported_with_the_key(
    tmp_path: Path, shop: Database, controls: str, cause: str, remedy: str
) -> None:
    section = f'[sources.shop.table."public.orders"]\n{controls}'
    found = ingestd(tmp_path, "check", wal_config(lake="lake", dsn=shop.dsn, extra=section))
    assert_fails(found, f"table public.orders +{cause}", remedy)


def test_the_check_tells_what_is_left_out_masked_and_retyped(
    tmp_path: Path, shop: Database
) -> None:
    shop.execute("ALTER TABLE orders ADD amount numeric, ADD email text, ADD phone text")
    section = """[sources.shop.table."public.orders"]
exclude_columns = ["note"]
mask_columns = { email = "sha256", phone = "null" }
types = { amount = "decimal(12,2)" }
"""
    key = f'mask_key = "{PASSWORD}"'
    config = wal_config(lake="lake", dsn=shop.dsn, source_extra=key, extra=section)
    found = ingestd(tmp_path, "check", config)
    assert found.code == 0, found.out
    assert (
        "4 columns, identity: id; left out: note; masked: email (sha256), phone (null); "
        "types: amount (decimal(12,2))"
    ) in table_line(found, "orders")


def test_columns_are_left_out_of_a_publication_made_by_hand(
    tmp_path: Path, new_shop: Database
) -> None:
    """The remedy of manage = false makes the list, so that the server does not send them."""
    section = '[sources.shop.table."public.orders"]\nexclude_columns = ["note"]'
    config = wal_config(lake="lake", dsn=new_shop.dsn, source_extra="manage = false", extra=section)
    found = ingestd(tmp_path, "check", config)
    assert_fails(found, "publication .*does not exist", r'CREATE PUBLICATION .*"orders" \("id"\)')
    for failure in found.failures:
        new_shop.execute(failure.splitlines()[1].strip())
    assert ingestd(tmp_path, "check", config).code == 0


def test_a_schema_that_may_not_be_used(tmp_path: Path, shop: Database) -> None:
    role = f"r_{shop.name}"
    shop.execute(
        "CREATE SCHEMA closed",
        "CREATE TABLE closed.t (id int PRIMARY KEY)",
        f"CREATE ROLE {role} LOGIN REPLICATION",
        f"GRANT SELECT ON closed.t TO {role}",
        f'GRANT CREATE ON DATABASE "{shop.name}" TO {role}',
        f"ALTER TABLE closed.t OWNER TO {role}",
    )
    try:
        dsn = shop.server.dsn(shop.name, user=role)
        config = wal_config(lake="lake", dsn=dsn, tables=["closed.t"])
        found = ingestd(tmp_path, "check", config)
        assert_fails(found, "table closed.t +no privilege to use schema", "GRANT USAGE ON SCHEMA")
        [failure] = found.failures
        shop.execute(failure.splitlines()[1].strip())
        assert ingestd(tmp_path, "check", config).code == 0
    finally:
        shop.execute(f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")


def test_a_table_named_outright_must_exist(tmp_path: Path, shop: Database) -> None:
    config = wal_config(lake="lake", dsn=shop.dsn, tables=["public.order"])
    found = ingestd(tmp_path, "check", config)
    assert_fails(found, "table public.order +does not exist", "did you mean 'public.orders'")


# --- the lake --------------------------------------------------------------------------------


def test_a_file_where_the_lake_should_be(tmp_path: Path, shop: Database) -> None:
    (tmp_path / "lake").write_text("in the way")
    found = ingestd(tmp_path, "check", wal_config(lake="lake", dsn=shop.dsn))
    assert_fails(found, "lake .*a file exists where a folder should be", "move it, or set")


def test_a_lake_that_this_user_may_not_write(
    tmp_path: Path, shop: Database, make_daemon: MakeDaemon
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    config = wal_config(lake=closed / "lake", dsn=shop.dsn)
    account = account_for_server()  # as root nothing is forbidden
    if account is None:
        closed.chmod(0o500)
    else:
        open_way(tmp_path, account)
    found = ingestd(tmp_path, "check", config, account)
    closed.chmod(0o700)
    remedy = "let the daemon's user read and write there: sudo mkdir"
    assert_fails(found, "lake .*permission denied", remedy)
    # and the daemon: a file in the way stops the source, the process continues
    (closed / "lake").write_text("in the way")
    daemon = make_daemon(config)
    daemon.start()
    assert "a file exists where a folder should be" in not_ready(daemon, "stopped")


# --- run: what ends it, and what it survives -------------------------------------------------


def not_ready(daemon: Daemon, state: str) -> str:
    """Wait for /readyz to say 503 with the source in that state; return its text."""

    def answer() -> str | None:
        assert daemon.is_running, daemon.tail()
        found = daemon.get("/readyz")
        return found[1] if found and found[0] == 503 and f" is {state}" in found[1] else None

    return await_until(answer, LIMIT_S, lambda: f"503 with {state}\n{daemon.tail()}")


def failed_events(daemon: Daemon) -> list[dict[str, object]]:
    return daemon.events("source.failed")


def test_a_port_in_use_ends_the_daemon_with_1(tmp_path: Path, shop: Database) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        http = f'[http]\nlisten = "127.0.0.1:{port}"\n'
        found = ingestd(tmp_path, "run", wal_config(lake="lake", dsn=shop.dsn, extra=http))
    assert found.code == 1, found.out
    said = [line for line in found.out.splitlines() if not line.startswith("{")]
    assert 1 <= len(said) <= 3, found.out
    assert f"127.0.0.1:{port} is in use" in said[0]
    assert "http" in said[1]
    assert not (tmp_path / "lake").exists()
    assert shop.slots() == []


def test_an_operator_fault_keeps_the_daemon_and_says_so_once(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    dsn = psycopg.conninfo.make_conninfo(shop.dsn, user="no_such_role", password=PASSWORD)
    daemon = make_daemon(wal_config(lake=lake, dsn=dsn))
    daemon.start()
    told = 'password authentication failed for user "no_such_role"'
    assert told in not_ready(daemon, "stopped")
    [failed] = failed_events(daemon)
    assert "correct the role or the password" in str(failed["remedy"])
    assert failed["retry_s"] == 60.0
    answer = daemon.get("/healthz")
    assert answer is not None
    assert answer[0] == 200
    assert daemon.sigterm() == 0
    assert PASSWORD not in daemon.tail()
    assert "Traceback" not in daemon.tail()


@pytest.mark.thorough
def test_a_source_recovers_automatically_from_a_transient_fault(
    own_postgres: PostgresServer, lake: Path, make_daemon: MakeDaemon
) -> None:
    own_postgres.psql("CREATE TABLE orders (id int PRIMARY KEY)")
    config = wal_config(lake=lake, dsn=own_postgres.dsn())
    own_postgres.stop()
    daemon = make_daemon(config)
    daemon.start()
    assert "refused" in not_ready(daemon, "backing_off")
    own_postgres.start()
    daemon.await_ready()
    [failed] = failed_events(daemon)[:1]
    assert "check host and port" in str(failed["remedy"])
    reasons = [e["reason"] for e in failed_events(daemon)]
    assert all(a != b for a, b in pairwise(reasons)), "said twice"


def test_a_slot_in_use_by_another_client_is_named_and_taken_over(
    tmp_path: Path, shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    slot = f"s_{shop.name}"
    extra = f'slot = "{slot}"\nlake_lost = "resnapshot"'
    config = wal_config(lake=lake, dsn=shop.dsn, source_extra=extra)
    shop.execute(
        "CREATE PUBLICATION other FOR ALL TABLES",
        f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')",
    )
    program = shop.server.program("pg_recvlogical")
    options = ["-o", "proto_version=1", "-o", "publication_names=other", "-f", "/dev/null"]
    with subprocess.Popen(
        [str(program), "-d", shop.dsn, "-S", slot, "--start", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as other:
        try:
            query = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
            await_until(lambda: shop.value(query, slot), LIMIT_S, "pg_recvlogical to hold the slot")
            found = ingestd(tmp_path, "check", config)
            assert_fails(found, r"in use by pid \d+ \(pg_recvlogical\)", "pg_terminate_backend")
            daemon = make_daemon(config)
            daemon.start()
            assert "(pg_recvlogical)" in not_ready(daemon, "backing_off")
            assert "pg_terminate_backend" in str(failed_events(daemon)[0]["remedy"])
        finally:
            other.terminate()
    daemon.await_ready()


@pytest.mark.thorough
def test_one_writer_a_second_daemon_says_who_works_on_the_slot(
    tmp_path: Path, shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    config = wal_config(lake=lake, dsn=shop.dsn, source_extra=f'slot = "s_{shop.name}"')
    first, second = make_daemon(config, "first"), make_daemon(config, "second")
    first.start_ready()
    found = ingestd(tmp_path, "check", config)
    assert found.code == 0, found.out
    assert re.search("^warn .*in use by a running ingestd", found.out, re.MULTILINE)
    second.start()
    assert "another ingestd works on slot" in not_ready(second, "backing_off")
    assert "stop the other one" in str(failed_events(second)[0]["remedy"])
    first.await_ready()


def test_isolated_a_table_without_key_stops_alone(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    shop.execute("CREATE TABLE events (kind text)", "INSERT INTO orders VALUES (1)")
    daemon = make_daemon(
        wal_config(lake=lake, dsn=shop.dsn, source_extra=f'slot = "s_{shop.name}"')
    )
    daemon.start()

    def flows() -> bool:
        status = daemon.status()
        return status is not None and status["sources"]["shop"]["rows"] >= 2

    await_until(flows, LIMIT_S, lambda: f"the other table to flow\n{daemon.tail()}")
    shop.execute("INSERT INTO orders VALUES (2)", "INSERT INTO events VALUES ('a')")
    shop.execute("UPDATE events SET kind = 'b'")  # the source's own work continues
    status = await_until(
        lambda: (s := daemon.status()) and s["sources"]["shop"]["rows"] >= 3 and s,
        LIMIT_S,
        lambda: f"the insert\n{daemon.tail()}",
    )
    tables = {t["table"]: t for t in status["sources"]["shop"]["tables"]}
    assert tables["public.orders"]["state"] == "live"
    assert tables["public.events"]["state"] == "stopped"
    assert "REPLICA IDENTITY FULL" in tables["public.events"]["remedy"]
    answer = daemon.get("/readyz")
    assert answer is not None
    assert answer[0] == 503
    assert "public.events is stopped" in answer[1]
    [stopped] = daemon.events("table.stopped")
    assert stopped["table"] == "public.events"
