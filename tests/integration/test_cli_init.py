"""`ingestd init` on a real server: `check` and `run` accept what it writes."""

from __future__ import annotations

import stat
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from psycopg.conninfo import make_conninfo
from typer.testing import CliRunner

from ingestd import cli
from ingestd.model.schema import TableId
from tests.harness.compare import assert_lake_equals_source
from tests.harness.servers import FAST, running_server
from tests.integration.test_least_privilege import attributes, granted, run_script

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typer.testing import Result

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 120.0
ORDERS, ITEMS = TableId("public", "orders"), TableId("Sales", "Line [x] Items")
HTTP = '[http]\nlisten = "127.0.0.1:9464" # status page, /metrics, /readyz\n'


@pytest.fixture
def shop(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Database:
    monkeypatch.chdir(tmp_path)
    database.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, note text)",
        "INSERT INTO orders SELECT i, 'n' || i FROM generate_series(1, 100) i",
        "CREATE TABLE keyless (id int)",
        'CREATE SCHEMA "Sales"',
        'CREATE TABLE "Sales"."Line [x] Items" (id int PRIMARY KEY, "Order" int)',
        'INSERT INTO "Sales"."Line [x] Items" SELECT i, i % 7 FROM generate_series(1, 50) i',
    )
    return database


@pytest.fixture
def role(shop: Database) -> Iterator[str]:
    """The name of a role that does not exist yet."""
    name = f"i_{shop.name}"
    yield name
    if shop.rows("SELECT FROM pg_roles WHERE rolname = %s", name):
        shop.execute(f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def init(shop: Database, *arguments: str, dsn: str | None = None, asked: str = "") -> Result:
    given = [] if dsn == "" else ["--dsn", dsn or shop.dsn]
    return CliRunner().invoke(cli.app, ["init", *given, *arguments], input=asked)


def check(path: Path) -> Result:
    return CliRunner().invoke(cli.app, ["check", "-c", str(path)])


def statements(told: str) -> list[str]:
    """The SQL that was printed."""
    _, _, told = told.partition("as a superuser:")
    return [line.strip() for line in told.splitlines() if line.endswith(";")]


def test_what_it_writes_is_checked_and_run(
    shop: Database, tmp_path: Path, make_daemon: MakeDaemon
) -> None:
    dsn = make_conninfo(shop.dsn, password=shop.server.password)
    lake = tmp_path / "lake"
    done = init(shop, shop.name, "--lake", str(lake), "--yes", dsn=dsn)
    assert done.exit_code == 0, done.output
    path, secret = tmp_path / "ingestd.toml", tmp_path / f"{shop.name}.dsn"
    text = path.read_text()
    assert shop.server.password not in text
    assert shop.server.password not in done.output
    assert shop.server.password in secret.read_text()
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    # what can't be captured is left out, and it says why
    assert '"!public.keyless"' in text
    assert "REPLICA IDENTITY FULL" in text
    unwrapped = ("uri", "  #   add a primary key")
    assert [ln for ln in text.splitlines() if len(ln) > 79 and not ln.startswith(unwrapped)] == []
    checked = check(path)
    assert checked.exit_code == 0, checked.output
    assert "0 failed, 0 with a warning" in checked.stdout

    assert HTTP in text
    daemon = make_daemon(text.replace(HTTP, "").replace("file:", f"file:{tmp_path}/"))
    daemon.start_ready(LIMIT_S)
    shop.execute("UPDATE orders SET note = 'new' WHERE id < 10", "INSERT INTO keyless VALUES (1)")
    assert_lake_equals_source(
        shop,
        lake,
        source=shop.name,
        tables=[ORDERS, ITEMS],
        slot=f"ingestd_{shop.name}",
        limit_s=LIMIT_S,
    )
    assert daemon.sigterm() == 0


def test_it_asks_for_what_is_not_given(shop: Database, tmp_path: Path) -> None:
    asked = f"{shop.dsn}\n{shop.name}\npublic.*, !public.keyless\n./here\n"
    done = init(shop, dsn="", asked=asked)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "ingestd.toml").read_text()
    assert 'uri = "./here"' in text
    assert "Sales" not in text
    assert text.count('"!public.keyless"') == 1
    assert check(tmp_path / "ingestd.toml").exit_code == 0
    assert shop.slots() == []  # it changes nothing


def test_nothing_is_replaced_without_force(shop: Database, tmp_path: Path) -> None:
    path = tmp_path / "ingestd.toml"
    path.write_text("mine")
    done = init(shop, shop.name, "--yes")
    assert (done.exit_code, path.read_text()) == (2, "mine")
    assert "ingestd.toml exists already" in done.stderr
    secret = tmp_path / f"{shop.name}.dsn"
    secret.write_text("mine")
    secret.chmod(0o644)
    dsn = make_conninfo(shop.dsn, password=shop.server.password)
    done = init(shop, shop.name, "--yes", "-o", "other.toml", dsn=dsn)
    assert (done.exit_code, secret.read_text()) == (2, "mine")
    assert not (tmp_path / "other.toml").exists()
    done = init(shop, shop.name, "--yes", "--force", dsn=dsn)
    assert done.exit_code == 0
    assert shop.server.password in secret.read_text()
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


@pytest.mark.attack("account")
@pytest.mark.parametrize("name", ["ingestd.toml", "{}.dsn"])
@pytest.mark.parametrize("is_dangling", [True, False])
def test_nothing_is_written_through_a_link(
    shop: Database, tmp_path: Path, name: str, *, is_dangling: bool
) -> None:
    target, link = tmp_path / "target", tmp_path / name.format(shop.name)
    if not is_dangling:
        target.write_text("theirs")
    link.symlink_to(target)
    dsn = make_conninfo(shop.dsn, password=shop.server.password)
    done = init(shop, shop.name, "--yes", dsn=dsn)
    assert done.exit_code == 2, done.output
    assert f"{link.name} exists already" in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path != target] == [link.name]
    done = init(shop, shop.name, "--yes", "--force", dsn=dsn)
    assert done.exit_code == 0, done.output
    assert not link.is_symlink()
    assert target.exists() is not is_dangling
    assert is_dangling or target.read_text() == "theirs"
    assert check(tmp_path / "ingestd.toml").exit_code == 0


def test_the_printed_sql_does_what_the_script_does(
    shop: Database, tmp_path: Path, role: str
) -> None:
    done = init(shop, shop.name, "--yes", "--role", role)
    assert done.exit_code == 0, done.output
    shop.execute("REVOKE ALL ON SCHEMA public FROM PUBLIC", *statements(done.stdout))
    made = attributes(shop, role), granted(shop, role)
    published = shop.rows("SELECT schemaname, tablename FROM pg_publication_tables ORDER BY 1, 2")
    options = "SELECT pubviaroot, pubinsert, pubupdate, pubdelete, pubtruncate FROM pg_publication"
    sent = shop.rows(options)
    slot = f"ingestd_{shop.name}"
    assert shop.slots() == [slot]

    # as that role everything exists: nothing to create, or to ask for
    done = init(shop, shop.name, "--yes", "--force", dsn=make_conninfo(shop.dsn, user=role))
    assert done.exit_code == 0, done.output
    assert "manage = false" in (tmp_path / "ingestd.toml").read_text()
    assert check(tmp_path / "ingestd.toml").exit_code == 0

    # and the same by the script
    shop.execute(
        f"DROP OWNED BY {role}",
        f"DROP ROLE {role}",
        f"DROP PUBLICATION {slot}",
        f"SELECT pg_drop_replication_slot('{slot}')",
    )
    named = 'public.orders, "Sales"."Line [x] Items"'
    run_script(shop, role, tables=named, publication=slot, slot=slot)
    assert made == (attributes(shop, role), granted(shop, role))
    tables = "SELECT schemaname, tablename FROM pg_publication_tables ORDER BY 1, 2"
    assert published == shop.rows(tables)
    assert sent == shop.rows(options)
    assert shop.slots() == [slot]
    # again: only what is not there yet
    done = init(shop, shop.name, "--yes", "--force", "--role", role)
    told = "\n".join(statements(done.stdout))
    assert "CREATE" not in told
    shop.execute(*statements(done.stdout))


def test_polling_is_taken_where_the_wal_can_not_be_read(
    shop: Database, tmp_path: Path, stranger: str
) -> None:
    shop.execute(f"GRANT SELECT ON orders TO {stranger}")
    dsn = make_conninfo(shop.dsn, user=stranger)
    done = init(shop, shop.name, "--yes", "--tables", "public.*", dsn=dsn)
    assert done.exit_code == 0, done.output
    assert "no REPLICATION attribute" in done.stdout
    text = (tmp_path / "ingestd.toml").read_text()
    assert 'kind = "polling"' in text
    assert "no REPLICATION attribute" in text.replace("\n# ", " ")
    assert check(tmp_path / "ingestd.toml").exit_code == 0
    # what was asked for is written all the same, and what it lacks is said
    done = init(shop, shop.name, "--yes", "--force", "--kind", "wal", dsn=dsn)
    assert done.exit_code == 0, done.output
    assert "fix the problems above" in done.stdout
    assert 'kind = "wal"' in (tmp_path / "ingestd.toml").read_text()


def test_a_polled_table_gets_the_cursor_that_its_index_offers(
    shop: Database, tmp_path: Path
) -> None:
    shop.execute(
        "CREATE TABLE invoices (id int PRIMARY KEY, last_name text, made_at timestamptz,"
        ' updated_at timestamptz, "Changed ""At""" timestamp NOT NULL)',
        'CREATE INDEX ON invoices ("Changed ""At""")',
        "CREATE INDEX ON invoices (made_at)",
        "CREATE INDEX ON invoices (updated_at) WHERE id > 7",
        "CREATE TABLE payments (id int PRIMARY KEY, modified date)",
    )
    done = init(shop, "old", "--yes", "--kind", "polling", "--tables", "public.*")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "ingestd.toml").read_text()
    tables = tomllib.loads(text)["sources"]["old"]["table"]
    assert tables == {"public.invoices": {"cursor": 'Changed "At"'}}
    assert check(tmp_path / "ingestd.toml").exit_code == 0
    # what is offered for others works as it stands
    [index] = [ln.strip("# ") for ln in text.splitlines() if "CREATE INDEX" in ln]
    shop.execute(index)
    done = init(shop, "old", "--yes", "--force", "--kind", "polling", "--tables", "public.*")
    assert done.exit_code == 0, done.output
    tables = tomllib.loads((tmp_path / "ingestd.toml").read_text())["sources"]["old"]["table"]
    assert tables["public.payments"] == {"cursor": "modified"}


@pytest.mark.parametrize(
    ("lake", "option"),
    [
        ("s3://bucket/lake", "AWS_REGION"),
        ("s3a://bucket/lake", "AWS_SECRET_ACCESS_KEY"),
        ("gs://bucket/lake", "GOOGLE_SERVICE_ACCOUNT"),
        ("abfss://box@account.dfs.core.windows.net/lake", "AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_a_lake_in_a_store_has_a_section_to_fill_in(
    shop: Database, tmp_path: Path, lake: str, option: str
) -> None:
    done = init(shop, "shop", "--yes", "--lake", lake)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "ingestd.toml").read_text()
    assert tomllib.loads(text)["lake"] == {"uri": lake, "storage_options": {}}
    filled = "".join(
        ln.removeprefix("# ") if option in ln else ln for ln in text.splitlines(keepends=True)
    )
    assert option in tomllib.loads(filled)["lake"]["storage_options"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--tables", "public.ordres"], 2, "no table public.ordres is visible"),
        (["--tables", "orders"], 2, "--tables 'orders': write it as schema.table"),
        (["--dsn", "env:NOT_SET_AT_ALL"], 2, "environment variable NOT_SET_AT_ALL is not set"),
        (["--dsn", "postgresql://u:hunter2@[x"], 2, "--dsn: not a connection string"),
        (["--dsn", "host=127.0.0.1 port=1 user=u password=hunter2"], 75, "Connection refused"),
        (["--kind", "magic"], 2, "must be wal or polling"),
        (["Shop!"], 2, "a source's name is 1-55"),
    ],
)
def test_errors_are_reported(
    shop: Database, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    done = CliRunner().invoke(cli.app, ["init", "--yes", "--dsn", shop.dsn, *arguments])
    assert (done.exit_code, list(tmp_path.iterdir())) == (code, [])
    assert said in done.stderr
    assert "hunter2" not in done.output


def test_a_password_is_asked_for_and_a_default_server_is_polled(
    tmp_path: Path, postgres_bindir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PGPASSWORD", "")
    settings = {**FAST, "wal_level": "replica"}
    with running_server(postgres_bindir, settings, password="hunter2") as server:
        dsn = f"host=127.0.0.1 port={server.port} user=postgres dbname=postgres"
        with server.connect() as connection:
            connection.execute("CREATE TABLE orders (id int PRIMARY KEY)")
        told = CliRunner().invoke(cli.app, ["init"], input=f"{dsn}\nhunter2\nmine\n\n\n")
        checked = check(tmp_path / "ingestd.toml")
        given = ["init", "other", "--yes", "--force", "--dsn", dsn]
        refused = CliRunner().invoke(cli.app, given)
    assert told.exit_code == 0, told.output
    assert "hunter2" not in told.output
    assert "hunter2" in (tmp_path / "mine.dsn").read_text()
    assert "server: wal_level is 'replica'" in told.stdout
    assert "remedy: ALTER SYSTEM SET wal_level = 'logical'; then restart" in told.stdout
    text = (tmp_path / "ingestd.toml").read_text()
    assert 'kind = "polling"' in text
    assert '# kind = "wal" is not possible: server: wal_level is' in text
    assert checked.exit_code == 0, checked.output
    assert refused.exit_code == 1
    assert "no password supplied" in refused.stderr


def test_an_empty_database_gets_a_config_for_tables_to_come(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = init(database, database.name, "--yes")
    assert done.exit_code == 0, done.output
    assert '"public.*"' in (tmp_path / "ingestd.toml").read_text()
    checked = check(tmp_path / "ingestd.toml")
    assert checked.exit_code == 0, checked.output
    assert "no table matches 'public.*' in `tables`" in checked.stdout
