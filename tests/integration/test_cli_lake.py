"""`ingestd epochs` and `ingestd peek` on a lake that a daemon wrote, and writes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from typer.testing import CliRunner

from ingestd import cli
from ingestd.lake.delta.read import read_raw
from ingestd.lake.epochs_table import SCHEMA as EPOCHS
from ingestd.model.schema import TableId
from ingestd.testing.oracle.comparison import await_caught_up
from tests.harness.config import wal_config
from tests.harness.object_store import ObjectStoreServer

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 120.0
NOW = datetime(2026, 1, 2, tzinfo=UTC)
TABLE = TableId("public", "orders")
MASKS = """
[sources.shop.table."public.orders"]
mask_columns = { email = "sha256", phone = "null" }
"""


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, tags text[], amount numeric(12,2),"
        " email text, phone text, note text)",
        "ALTER TABLE orders ALTER note SET STORAGE EXTERNAL",
        "INSERT INTO orders SELECT i, ARRAY['a'], 1.5, 'e' || i || '@example.com', '12345',"
        " repeat('x', 5000) FROM generate_series(1, 2000) i",
    )
    return database


def config(shop: Database, lake: Path, extra: str = MASKS) -> str:
    names = f'slot = "{shop.name}"\npublication = "{shop.name}"\nmask_key = "sesame open"'
    return wal_config(lake=lake, dsn=shop.dsn, source_extra=names, extra=extra)


def ask(daemon: Daemon, *words: str) -> Result:
    return CliRunner().invoke(cli.app, [*words, "-c", str(daemon.config_path)])


def told(daemon: Daemon, *words: str) -> list[dict[str, Any]]:
    done = ask(daemon, *words, "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    found: list[dict[str, Any]] = document.get("changes", document.get("epochs"))
    return found


@pytest.fixture
def daemon(shop: Database, lake: Path, make_daemon: MakeDaemon) -> Daemon:
    """One that has read the table and three changes, each in an epoch of its own."""
    made = make_daemon(config(shop, lake))
    assert ask(made, "epochs", "shop").stdout == "no epochs yet\n"
    missing = ask(made, "peek", "shop", "public.orders")
    assert missing.exit_code == 1
    assert "has no changes of source shop yet" in missing.stderr
    made.start_ready(LIMIT_S)
    for statement in (
        "UPDATE orders SET id = -7, amount = 99.5, email = 'new@example.com' WHERE id = 7",
        "DELETE FROM orders WHERE id = 8",
        "INSERT INTO orders VALUES (9000, NULL, 'NaN', NULL, NULL, E'a\\x1b[31m\\nb')",
    ):
        shop.execute(statement)
        with shop.connect() as connection:
            await_caught_up(connection, shop.name, LIMIT_S)
    return made


def test_peek_shows_the_last_changes_as_the_lake_has_them(lake: Path, daemon: Daemon) -> None:
    insert, delete, update, read = told(daemon, "peek", "shop", "public.orders", "--limit", "4")
    assert [c["op"] for c in (insert, delete, update, read)] == ["c", "d", "u", "r"]
    assert insert["columns"]["id"] == 9000
    assert insert["columns"]["note"] == "a\x1b[31m\nb"
    assert insert["raw"] == {"amount": "NaN"}
    assert delete["columns"]["id"] == 8
    assert update["before"] == {"id": 7}
    assert update["columns"]["amount"] == "99.50"
    assert update["unchanged"] == ["note"]
    # masked values are those of the lake, and never others
    rows = {r["id"]: r for r in read_raw(str(lake), "shop", TABLE).to_pylist()}
    assert update["columns"]["email"] == rows[-7]["email"]
    assert len(update["columns"]["email"]) == 64
    assert update["columns"]["phone"] is None
    assert (insert["seq"], insert["epoch"]) == (1, rows[9000]["_cdc_epoch"])
    assert datetime.fromisoformat(insert["ts"]) == rows[9000]["_cdc_ts"]

    done = ask(daemon, "peek", "shop", "public.orders")
    assert done.exit_code == 0
    assert "example.com" not in done.stdout
    assert "\x1b" not in done.stdout
    assert 'amount "NaN" (raw)' in done.stdout
    assert "note (unchanged)" in done.stdout
    assert "before: id 7" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stdout.startswith("insert  ")
    assert done.stdout.count("epoch ") == 20


def test_a_mask_that_came_later_hides_older_rows(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon(config(shop, lake, extra=""))
    daemon.start_ready(LIMIT_S)
    assert daemon.sigterm() == 0
    [plain] = told(daemon, "peek", "shop", "public.orders", "--limit", "1")
    assert plain["columns"]["email"].endswith("@example.com")
    later = MASKS + 'exclude_columns = ["tags"]\n'
    daemon.write_config(config(shop, lake, extra=later))
    [hidden] = told(daemon, "peek", "shop", "public.orders", "--limit", "1")
    assert {hidden["columns"][c] for c in ("email", "phone", "tags")} == {"***"}
    assert hidden["columns"]["id"] == plain["columns"]["id"]


def test_the_last_epochs_are_listed_with_and_without_a_daemon(
    shop: Database, daemon: Daemon
) -> None:
    running = told(daemon, "epochs", "shop")
    numbers = [e["epoch"] for e in running]
    assert numbers == sorted(range(1, len(numbers) + 1), reverse=True)
    assert len(numbers) >= 4
    assert daemon.sigterm() == 0
    assert told(daemon, "epochs", "shop") == running
    assert told(daemon, "epochs", "shop", "--limit", "2") == running[:2]
    last = running[0]
    assert (last["rows"], last["transactions"]) == (1, 1)
    assert [(t["table"], t["rows"]) for t in last["tables"]] == [("public.orders", 1)]
    assert shop.value("SELECT %s::pg_lsn > %s::pg_lsn", last["end_lsn"], last["first_lsn"])
    lines = ask(daemon, "epochs", "shop").stdout.splitlines()
    assert lines[0].split() == [
        "epoch",
        "end_lsn",
        "txns",
        "rows",
        "size",
        "committed_at",
        "tables",
    ]
    assert len(lines) == len(running) + 1
    assert max(map(len, lines)) <= 80
    # names that are not there
    for words, said in (
        (("peek", "shop", "public.ordres"), "did you mean 'public.orders'?"),
        (("peek", "shop", "orders"), "write it as schema.table"),
        (("peek", "shpo", "public.orders"), "no such source; there is shop"),
        (("epochs", "shpo"), "no such source; there is shop"),
        (("epochs", "shop", "--limit", "0"), "--limit"),
    ):
        done = ask(daemon, *words)
        assert (done.exit_code, done.stdout) == (2, "")
        assert said in done.stderr


def test_a_lake_in_an_object_store_is_read(tmp_path: Path) -> None:
    with ObjectStoreServer() as server:
        row: dict[str, Any] = {
            "epoch": 1,
            "first_lsn": 1,
            "end_lsn": 2,
            "transactions": 1,
            "rows": 3,
            "bytes": 4,
        }
        row |= {"last_commit_ts": NOW, "committed_at": NOW, "tables": []}
        rows = pa.Table.from_pylist([row, {**row, "epoch": 2, "end_lsn": 1 << 33}], EPOCHS)
        uri = f"{server.uri}/shop/_epochs"
        write_deltalake(uri, rows, storage_options=server.options)
        text = wal_config(lake=server.uri, dsn="dbname=x", extra=server.config)
        path = tmp_path / "s3.toml"
        path.write_text(text)
        done = CliRunner().invoke(cli.app, ["epochs", "shop", "-c", str(path), "--json"])
        missing = CliRunner().invoke(cli.app, ["peek", "shop", "public.a", "-c", str(path)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["epochs"]
    assert [(e["epoch"], e["end_lsn"]) for e in found] == [(2, "2/0"), (1, "0/2")]
    assert missing.exit_code == 1
    assert "has no changes of source shop yet" in missing.stderr
